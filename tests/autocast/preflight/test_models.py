"""Preflight of today's models, whole, on a machine with no GPU: beside a real step on the CPU."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch

from distamp import precision_report, preflight
from tests.autocast.preflight.models import MODELS
from tests.autocast.report.test_report import BF16, FP16

# A loop over experts calls those that tokens are sent to: which, no one knows before it runs.
FINDINGS = {"mixtral_loop": {("info", "made-up-values")}}
# Kernels that only move numbers; whether they are needed depends on strides.
MOVES = {"clone", "copy_", "zeros", "new_zeros", "new_empty_strided"}


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def built(request):
    # What transformers thinks of a configuration this small.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, inputs = request.param()
    if hasattr(model, "config"):
        # Real steps would leave layers out at random.
        model.config.layerdrop = 0.0
    return request.param.__name__, model, inputs


def loss_of(output):
    return next(iter(output.values())) if isinstance(output, dict) else output.mean()


def images_of(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (tensor, tensor.clone(), tensor.grad) for name, tensor in tensors.items()}


def counted(rows):
    """Every kernel that computes with floating point numbers, by module, phase and dtypes."""
    counts = Counter()
    for row in rows:
        exact = not any("float" in dtype for dtype in (*row.inputs, *row.outputs))
        if not exact and not row.view and row.module != "(outside)":
            counts[row.module, row.phase, row.op, row.inputs, row.outputs, row.cause] += row.calls
    return counts


@pytest.mark.filterwarnings("ignore")
def test_a_gpu_s_step_is_seen_whole_and_leaves_the_model_as_it_was(built):
    name, model, inputs = built
    before = images_of(model)
    result = preflight(model, inputs, "cuda", FP16, measure=False)
    assert result.forward, result.findings
    after = images_of(model)
    assert after.keys() == before.keys()
    for key, (tensor, value, grad) in before.items():
        assert after[key][0] is tensor
        assert torch.equal(tensor, value)
        assert after[key][2] is grad is None
    assert {(f.severity, f.rule) for f in result.findings} == FINDINGS.get(name, set())
    half = {row.op for row in result.report.rows if "float16" in row.outputs}
    assert half & {"mm", "addmm", "bmm", "convolution"}
    _, real = real_step(model, inputs)
    assert real <= set(result.visited)


@pytest.mark.filterwarnings("ignore")
def test_the_table_is_that_of_a_real_step_on_the_cpu(built):
    name, model, inputs = built
    result = preflight(model, inputs, "cpu", BF16, loss_fn=loss_of, measure=False)
    rows, _ = real_step(model, inputs)
    simulated, real = counted(result.report.rows), counted(rows)
    if name == "wav2vec2":
        simulated, real = (
            {key: count for key, count in each.items() if key[2] not in MOVES}
            for each in (simulated, real)
        )
    if name == "mixtral_loop":
        # Made-up values may send tokens to more or fewer experts.
        simulated, real = set(simulated), set(real)
    assert simulated == real


def real_step(model, inputs):
    """The rows of a step on the CPU, and the names of the modules whose forward ran."""
    entered = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: entered.add(name))
        for name, module in model.named_modules()
    ]
    with precision_report(model) as report, torch.autocast("cpu", BF16):
        loss_of(model(**inputs))
    for hook in hooks:
        hook.remove()
    return report.rows, entered
