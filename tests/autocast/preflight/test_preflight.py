"""Preflight's table: that of a real step, with no device, no weights, and nothing changed."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections import Counter
from importlib import import_module

import pytest
import torch
from distamp.autocast.preflight.device import SIMULATED, _guard_table, simulated_device
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distamp import precision_report, preflight
from distamp.autocast import PrecisionReport
from tests.autocast.report.test_report import BF16, FP16, MODELS, mlp, needs

simulating = import_module("distamp.autocast.preflight.simulate")


def loss_of(output):
    return output.float().square().mean()


def real_rows(model, x, dtype=BF16):
    with precision_report(model) as report, torch.autocast("cpu", dtype):
        loss_of(model(x))
    return report.rows


def counted(rows):
    """Rows to calls and casts, without what torch's fake kernels state of norms' statistics."""
    counts = Counter()
    for row in rows:
        outputs = row.outputs[:1] if "norm" in row.op else row.outputs
        if row.function != "ones":
            key = row.module, row.phase, row.function, row.op, row.inputs, outputs, row.cause
            counts[key] += row.calls
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_the_table_is_that_of_a_real_step(name):
    make, shape = MODELS[name]
    needs(make, shape, BF16)
    model, x = make(), torch.randn(shape)
    result = preflight(model, x, "cpu", BF16, loss_fn=loss_of, measure=False)
    rows = real_rows(model, x)
    assert counted(result.report.rows) == counted(rows)
    totals, real = result.report.totals, PrecisionReport(rows).totals
    assert (totals.casts, totals.bytes_read, totals.bytes_written) == (
        real.casts,
        real.bytes_read,
        real.bytes_written,
    )


def test_cudas_lists_hold_for_cuda():
    class Net(nn.Module):
        def forward(self, x):
            return F.softmax(x @ x, -1) + x.prod() + torch.tan(x)

    result = preflight(Net(), torch.randn(4, 4), "cuda", FP16, measure=False)
    ran = {row.op: row.outputs for row in result.report.rows}
    # On CPU lists prod is a fp32 op too and tan is none; on CUDA both are.
    assert ran["mm"] == ("float16",)
    assert ran["_softmax"] == ran["prod"] == ran["tan"] == ("float32",)


@pytest.mark.parametrize("device_type", SIMULATED)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_runs_on_a_device_that_is_not_here(name, device_type):
    make, shape = MODELS[name]
    result = preflight(make(), torch.randn(shape), device_type, BF16, measure=False)
    phases = {row.phase for row in result.report.rows}
    assert phases == {"forward"}, result.findings
    assert not result.errors
    assert result.report.totals.autocast_casts > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_what_needs_the_device_itself_is_an_error_unless_allowed():
    model = nn.Sequential(nn.Linear(8, 8), Calls(lambda x: torch.cuda.current_stream() and x))
    result = preflight(model, torch.randn(4, 8), "cuda", FP16, measure=False)
    (found,) = result.errors
    assert (found.rule, found.module) == ("not-simulated", "1")
    assert "needs the device itself" in found.what
    assert (result.forward, result.finished) == (False, False)
    assert "forward NOT FINISHED" in str(result)
    allowed = preflight(model, torch.randn(4, 8), measure=False, allow_unfinished=True)
    assert not allowed.errors
    assert not allowed.finished
    (found,) = allowed.findings
    assert (found.severity, found.rule) == ("warning", "not-simulated")


def test_a_step_that_would_fail_on_the_device_too_is_an_error_even_if_allowed():
    model = Calls(lambda x: x + torch.ones(8))
    (found,) = preflight(model, torch.ones(4, 8), measure=False, allow_unfinished=True).errors
    assert "same device" in found.what


def test_modules_alike_that_took_no_part_are_named_as_one():
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(9))})
    model.forward = lambda x: model["layers"][0](x)
    result = preflight(model, torch.randn(4, 8), measure=False)
    assert result.summary.endswith("2 of 10 modules visited; not: layers.* x8")


def test_modules_that_took_no_part_are_named():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)
            self.by_weight, self.dropout = nn.Linear(8, 8), nn.Dropout()
            self.layers = nn.ModuleList([nn.ReLU()])

        def forward(self, x):
            return F.linear(self.layers[0](self.used(x)), self.by_weight.weight)

    result = preflight(Net(), torch.randn(4, 8), measure=False)
    assert result.visited == ("", "used", "by_weight", "layers.0")
    assert result.not_visited == ("unused", "dropout")
    assert "4 of 6 modules visited; not: unused, dropout" in str(result)
    (found,) = result.findings
    assert (found.severity, found.rule, found.module) == ("info", "not-visited", "unused")


class Calls(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what(x)


def test_no_weights_are_needed():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(200_000, 300_000), nn.ReLU(), nn.Linear(300_000, 10))
    result = preflight(model, torch.empty(4, 200_000, device="meta"), measure=False)
    casts = [row for row in result.report.rows if row.weight and row.module == "0"]
    assert sum(row.bytes_read for row in casts if row.phase == "forward") == 4 * 300_000 * 200_001
    assert not result.errors


def lstm_weights(lstm):
    return lstm._flat_weights_names, lstm._flat_weights


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.LSTM(4, 4))
    x = torch.randn(8, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    state = torch.get_rng_state()
    preflight(model, x, measure=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    for name, weight in zip(*lstm_weights(model[3]), strict=True):
        assert weight is parameters[f"3.{name}"]
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.is_autocast_enabled("cuda")


def test_tied_weights_are_one_weight():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    result = preflight(model, torch.randn(2, 4), measure=False)
    forward = [row for row in result.report.rows if row.phase == "forward"]
    assert sum(row.casts for row in forward if row.weight) == 1
    assert sum(row.hits for row in forward) == 1


@pytest.mark.parametrize("inputs", [(torch.ones(2, 4), 2.0), {"x": torch.ones(2, 4), "factor": 2}])
def test_inputs_by_position_or_by_name(inputs):
    class Net(nn.Module):
        def forward(self, x, factor):
            return x @ x.t() * factor

    assert not preflight(Net(), inputs, measure=False).errors


def test_a_policy_s_parameter_dtype_is_simulated():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=FP16)
    result = preflight(mlp(), torch.randn(4, 8), mixed_precision=policy, measure=False)
    forward = [row for row in result.report.rows if row.phase == "forward"]
    linear = [row for row in forward if row.function == "linear"]
    assert sum(row.casts for row in linear if row.weight) == 0, "FSDP has cast them"
    assert {row.inputs for row in forward if row.op == "addmm"} == {("float16",)}


NO_GUARD = pytest.mark.skipif(torch.version.cuda is not None, reason="CUDA builds have a guard")


@NO_GUARD
def test_torch_alone_ends_the_process():
    """What preflight is safe from; if torch mends it, the lent guard can go."""
    program = """
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode():
            w = torch.empty(2, 2, device="cuda", requires_grad=True)
            print("alive", flush=True)
            torch.mm(w, w)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, "alive\n")


@NO_GUARD
def test_the_lent_device_guard_is_taken_back():
    table = _guard_table("cuda")
    at = SIMULATED["cuda"]
    with simulated_device("cuda"):
        assert table[at] is not None
    assert table[at] is None
    with pytest.raises(ZeroDivisionError), simulated_device("cuda"):
        raise ZeroDivisionError
    assert table[at] is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "gpt"}, TypeError, "a torch.nn.Module, got str"),
        ({"device_type": "cuda:0"}, ValueError, "did you mean 'cuda'"),
        ({"device_type": "tpu"}, ValueError, "one of cpu, cuda, got 'tpu'"),
        ({"dtype": "float16"}, TypeError, "must be a torch.dtype"),
        ({"dtype": torch.float32}, ValueError, "float16 or torch.bfloat16, got torch.float32"),
        ({"optimizers": [nn.ReLU()]}, TypeError, "torch optimizers, got ReLU"),
    ],
)
def test_mistakes_are_named(change, error, message):
    arguments = {"model": mlp(), "example_inputs": torch.ones(1, 8)} | change
    with pytest.raises(error, match=message):
        preflight(**arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_the_table_is_that_of_a_real_step_on_a_gpu(name):
    make, shape = MODELS[name]
    model, x = make().cuda(), torch.randn(shape, device="cuda")
    result = preflight(model, x, "cuda", FP16, loss_fn=loss_of, measure=True)
    with precision_report(model) as report:
        with torch.autocast("cuda", FP16):
            loss = loss_of(model(x))
        loss.backward(torch.ones((), device="cuda"))
    simulated, real = result.report.totals, report.totals
    assert (simulated.casts, simulated.hits) == (real.casts, real.hits)
    assert (simulated.bytes_read, simulated.bytes_written) == (real.bytes_read, real.bytes_written)
