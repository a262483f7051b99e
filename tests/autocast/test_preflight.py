"""Preflight: the forward table of a device that is not here, and what may go wrong in it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distamp import OpLists, findings, pin_precision, precision_report, preflight
from distamp.autocast.report import PrecisionReport
from tests.autocast.test_report import BF16, FP16, MODELS, mlp, needs


def counted(rows):
    """Rows, without what torch's fake kernels say of norms' statistics."""
    return Counter(
        replace(row, outputs=row.outputs[:1]) if "norm" in row.op else row for row in rows
    )


class Calls(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, *args):
        return self.what(*args)


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_a_cpu_is_that_of_a_real_forward_pass(name):
    make, shape = MODELS[name]
    needs(make, shape, BF16)
    model, x = make(), torch.randn(shape)
    result = preflight(model, x, "cpu", BF16)
    with precision_report(model) as report, torch.autocast("cpu", BF16):
        model(x)
    assert counted(result.report.rows) == counted(report.rows)
    assert not result.errors


def test_cudas_lists_hold_for_cuda():
    model = Calls(lambda x: F.softmax(x @ x, -1) + x.prod() + torch.tan(x))
    result = preflight(model, torch.randn(4, 4), "cuda", FP16)
    ran = {row.op: row.outputs for row in result.report.rows}
    # On CPU lists prod is a fp32 op too and tan is none; on CUDA both are.
    assert ran["mm"] == ("float16",)
    assert ran["_softmax"] == ran["prod"] == ran["tan"] == ("float32",)
    assert {"tan", "softmax"} <= set(OpLists.of_torch("cuda").fp32)


def test_no_weights_are_needed():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(200_000, 300_000), nn.ReLU(), nn.Linear(300_000, 10))
    result = preflight(model, torch.empty(4, 200_000, device="meta"))
    casts = [row for row in result.report.rows if row.module == "0" and row.casts]
    assert sum(row.bytes_read for row in casts) == 4 * (300_000 * 200_001 + 4 * 200_000)
    assert not result.errors


def test_the_model_is_left_as_it_was():
    class Assigns(nn.Module):
        def forward(self, x):
            self.seen = x
            self.register_buffer("mean", x.mean())
            return torch.rand(2) + x

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.LSTM(4, 4))
    model.append(Calls(lambda out: out[0]))
    model.append(nn.Linear(4, 2)).append(Assigns())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    x = torch.randn(8, 4)
    state = torch.get_rng_state()
    assert not preflight(model, x).errors
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert not hasattr(model[-1], "seen")
    assert torch.equal(torch.get_rng_state(), state)


def test_masks_and_lengths_decide_as_their_values_say():
    def forward(x, mask, lengths):
        if mask.all():
            raise AssertionError("another way")
        return x[: int(lengths.max())] @ x.t()

    inputs = torch.ones(4, 4), torch.zeros(2, dtype=torch.bool), torch.tensor([1, 3])
    result = preflight(Calls(forward), inputs)
    assert not result.errors
    assert "mm" in {row.op for row in result.report.rows}


@pytest.mark.parametrize("inputs", [(torch.ones(2, 4), 2.0), {"x": torch.ones(2, 4), "factor": 2}])
def test_inputs_by_position_or_by_name(inputs):
    class Net(nn.Module):
        def forward(self, x, factor):
            return x.cuda() @ x.to("cuda").t() * factor + torch.ones(2, 2, device="cuda")

    assert not preflight(Net(), inputs).errors


def test_where_it_cannot_go_on_is_an_error_with_the_module():
    model = nn.Sequential(nn.Linear(8, 8), Calls(lambda x: x @ x), nn.Linear(8, 8))
    result = preflight(model, torch.randn(4, 8))
    (found,) = result.errors
    assert (found.rule, found.module) == ("fails", "1")
    assert "4x8 and 4x8" in found.what
    assert found.what in str(result)
    assert "addmm" in {row.op for row in result.report.rows if row.module == "0"}


def test_what_values_decide_is_decided_by_zero():
    def forward(x):
        if x.max() > 3:
            raise AssertionError("another way")
        best = x.topk(2).indices
        assert best.tolist() == [[0, 0]] * 4
        chosen = x[(best == 0).any(-1)]
        return x[x > 0].sum() + chosen @ chosen.t() * x.mean().item()

    result = preflight(Calls(forward), torch.randn(4, 4))
    assert not result.errors
    assert {row.outputs for row in result.report.rows if row.op == "mm"} == {("float16",)}


def test_what_torch_forbids_on_the_device_is_an_error():
    model = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid())
    target = torch.zeros(4, 1)
    for device_type, rules in (("cuda", {"forbidden"}), ("cpu", set())):
        result = preflight(
            model,
            torch.randn(4, 8),
            device_type,
            BF16,
            loss_fn=lambda y: F.binary_cross_entropy(y.float(), target),
        )
        assert {each.rule for each in result.errors} == rules


def test_a_pin_shows_in_its_own_dtype():
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    pin_precision(net[1], "bf16")
    result = preflight(net, torch.randn(2, 4), "cuda", FP16)
    ran = {row.module: row.outputs for row in result.report.rows if row.op == "addmm"}
    assert ran == {"0": ("float16",), "1": ("bfloat16",), "2": ("float16",)}


def test_json_has_report_and_findings(tmp_path):
    result = preflight(mlp(), torch.randn(4, 8))
    result.to_json(tmp_path / "preflight.json")
    values = json.loads((tmp_path / "preflight.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps(values["report"]))
    again = PrecisionReport.from_json(tmp_path / "report.json")
    assert again.rows == result.report.rows
    assert again.device == "cuda, float16, simulated"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "gpt"}, TypeError, "a torch.nn.Module, got str"),
        ({"device_type": "cudaa"}, ValueError, "did you mean 'cuda'"),
        ({"device_type": "tpu"}, ValueError, "no autocast for 'tpu'"),
        ({"dtype": "float16"}, ValueError, "torch.bfloat16, got 'float16'"),
        ({"dtype": torch.float32}, ValueError, "float16 or torch.bfloat16, got torch.float32"),
    ],
)
def test_mistakes_are_named(change, error, message):
    arguments = {"model": mlp(), "example_inputs": torch.ones(1, 8)} | change
    with pytest.raises(error, match=message):
        preflight(**arguments)


def rules_of(forward):
    """Rules of a report of real code."""
    with precision_report() as report:
        forward()
    return {each.rule for each in findings(report)}


X = torch.ones(4, 4, dtype=FP16)


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        (
            "fp16-loss",
            lambda: F.l1_loss(X, X, reduction="none"),
            lambda: F.mse_loss(X.float(), X.float()),
        ),
        ("half-softmax", lambda: F.softmax(X, -1), lambda: F.softmax(X.float(), -1)),
        ("half-softmax", lambda: torch.logsumexp(X, -1), lambda: torch.logsumexp(X.float(), -1)),
        ("half-norm", lambda: F.layer_norm(X, (4,)), lambda: F.layer_norm(X.float(), (4,))),
        ("long-sum", lambda: X.expand(1000, 4, 4).sum(), lambda: X.expand(100, 4, 4).sum()),
        (
            "long-sum",
            lambda: X[0, 0].expand(2, 2**15) @ X[0, 0].expand(2**15, 2),
            lambda: X[0, 0].expand(2, 2**14) @ X[0, 0].expand(2**14, 2),
        ),
        ("mixed-half", lambda: X + X.bfloat16(), lambda: X + X),
        ("half-softmax", lambda: F.softmax(X, -1), lambda: F.scaled_dot_product_attention(X, X, X)),
    ],
)
def test_findings_are_read_off_a_real_report(rule, bad, good):
    assert rule in rules_of(bad)
    assert rule not in rules_of(good)


def test_findings_are_the_same_for_a_preflight():
    model = Calls(lambda x: F.softmax(x.half(), -1))
    result = preflight(model, torch.ones(4, 4), "cpu", FP16)
    assert [each.rule for each in result.findings] == ["half-softmax"]
    assert result.findings == findings(result.report)
