"""Today's model families under regions, lists, reports and preflight."""

from __future__ import annotations

import logging

import pytest
import torch

from distamp import OpLists, autocast, precision_report, preflight
from tests.autocast.models import MODELS
from tests.autocast.test_report import BF16, FP16, Independent, kernels

LISTS = OpLists(fp32={"linear"}, lower_precision={"gelu", "silu", "relu"})


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def built(request):
    # What transformers thinks of a configuration this small.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, inputs = request.param()
    if hasattr(model, "config"):
        # Real steps would leave layers out at random.
        model.config.layerdrop = 0.0
        model.config.apply_spec_augment = False
    return request.param.__name__, model, inputs


def loss_of(output):
    return next(iter(output.values())) if isinstance(output, dict) else output.mean()


def step(model, inputs, region):
    torch.manual_seed(0)
    model.zero_grad()
    with region:
        loss = loss_of(model(**inputs))
    loss.backward(torch.ones_like(loss))
    return loss.detach(), [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.filterwarnings("ignore")
def test_a_region_is_torchs_and_lists_and_reports_hold(built):
    _, model, inputs = built
    ours = step(model, inputs, autocast("cpu", BF16))
    theirs = step(model, inputs, torch.autocast("cpu", BF16))
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
    with Independent() as count, precision_report(model) as report:
        step(model, inputs, autocast("cpu", BF16, ops=LISTS))
    assert kernels(report) == count.kernels
    assert report.totals.casts == count.casts
    products = [row for row in report.rows if row.function == "linear" and row.op == "addmm"]
    products = [row for row in products if row.phase == "forward"]
    assert all(row.outputs == ("float32",) for row in products)
    assert any("backward" in row.phase and row.module != "(outside)" for row in report.rows)


@pytest.mark.filterwarnings("ignore")
def test_a_preflight_comes_to_the_end_and_leaves_the_model_alone(built):
    _, model, inputs = built
    before = {key: (it, it.clone()) for key, it in model.state_dict(keep_vars=True).items()}
    result = preflight(model, inputs, "cuda", FP16)
    assert not result.errors
    half = {row.op for row in result.report.rows if "float16" in row.outputs}
    assert half & {"mm", "addmm", "bmm", "convolution"}
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    for key, (tensor, value) in before.items():
        assert after[key] is tensor
        assert torch.equal(tensor, value)


@pytest.mark.filterwarnings("ignore")
def test_a_preflight_of_a_cpu_is_a_real_forward_pass(built):
    _, model, inputs = built
    result = preflight(model, inputs, "cpu", BF16)
    with precision_report(model) as report, torch.autocast("cpu", BF16):
        model(**inputs)
    assert computed(result.report.rows) == computed(report.rows)


def computed(rows):
    """Every kernel that computes with floating point numbers, by module and dtypes."""
    return {
        (row.module, row.op, row.inputs, row.outputs[:1], row.cause)
        for row in rows
        if any("float" in dtype for dtype in row.inputs) and not row.view
    }
