"""Preflight's table: that of a real step, with no device, no weights, and nothing changed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from distamp import precision_report, preflight
from distamp.autocast import PrecisionReport
from distamp.autocast.preflight.device import SIMULATED, _guard_table, simulated_device
from distamp.autocast.preflight.simulate import Job, simulate
from tests.autocast.report.test_report import BF16, FP16, MODELS, mlp

simulating = import_module("distamp.autocast.preflight.simulate")


def loss_of(output):
    return output.float().square().mean()


def real_rows(model, x, dtype=BF16):
    with precision_report(model) as report:
        with torch.autocast("cpu", dtype):
            loss = loss_of(model(x))
        loss.backward(torch.ones(()))
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
def test_the_table_is_that_of_a_real_step(name, request):
    if name == "lstm" and torch.__version__ < "2.13":
        # mkldnn_rnn_layer_backward gives fp32 in every version; torch 2.13's meta kernel says so.
        reason = "the fake kernel of an LSTM's backward gives bf16 in torch 2.11, the real one fp32"
        strict = torch.__version__.startswith("2.11.")
        request.applymarker(pytest.mark.xfail(reason=reason, strict=strict))
    make, shape = MODELS[name]
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


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x.sin()

    @staticmethod
    def backward(ctx, a, b):
        return a * 2 + b.cos()


class Scaled(torch.autograd.Function):
    """Arguments that are no tensors, or need no gradient, before and after those that do."""

    @staticmethod
    def forward(ctx, factor, x, mask, y, name):
        ctx.factor = factor
        return x * factor + y * mask

    @staticmethod
    def backward(ctx, grad):
        return None, grad * ctx.factor, None, grad.sin(), None


class Everything(nn.Module):
    """Branches, an unused output, custom functions, a checkpoint."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        z = checkpoint(self.b, y, use_reentrant=False)
        doubled, _ = Twice.apply(z)
        doubled = Scaled.apply(2.0, doubled, torch.ones_like(z), self.b(y), "name")
        return self.c(doubled + y.expand(3, *y.shape).sum(0)) + self.c(x)


class Reentrant(nn.Module):
    """Torch's older checkpoint, which runs a backward of its own inside backward."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), mlp()

    def forward(self, x):
        return checkpoint(self.b, self.a(x), use_reentrant=True).softmax(-1)


class InPlace(nn.Module):
    """A write to a view, whose autograd nodes torch makes anew for tensor subclasses."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        y[:, :2] = y[:, 2:4] * 2
        return y.relu_()


def by_either_engine(model, x, monkeypatch):
    job = Job(model, (x,), {}, "cpu", BF16, loss_of)
    ours = simulate(job, lambda call: None)
    monkeypatch.setattr(simulating, "engine_without_device", nullcontext)
    return simulate(job, lambda call: None), ours


OWN_ENGINE = {**MODELS, "everything": (Everything, (4, 8)), "in place": (InPlace, (4, 8))}
OWN_ENGINE["reentrant"] = (Reentrant, (4, 8))


@pytest.mark.parametrize("name", OWN_ENGINE)
def test_backward_without_the_device_is_what_torchs_engine_does(name, monkeypatch):
    make, shape = OWN_ENGINE[name]
    x = torch.randn(shape, requires_grad=True)
    torchs, ours = by_either_engine(make(), x, monkeypatch)
    assert torchs.backward
    assert ours.backward
    assert torchs.findings == ours.findings == []
    assert sorted(map(str, ours.rows)) == sorted(map(str, torchs.rows))
    assert any(row.phase == "backward" for row in ours.rows)


@pytest.mark.parametrize("make", [Everything, Reentrant])
def test_a_real_step_with_checkpointing_is_the_simulated_one(make):
    model, x = make(), torch.randn(4, 8, requires_grad=True)
    ours = simulate(Job(model, (x,), {}, "cpu", BF16, loss_of), lambda call: None)
    assert not ours.findings
    assert counted(ours.rows) == counted(real_rows(model, x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_module_is_recomputed_in_the_same_dtypes_on_a_gpu(reentrant):
    model = nn.Sequential(nn.Linear(8, 8), Calls(None), nn.Linear(8, 8))
    model[1].body = mlp()
    model[1].what = lambda x: checkpoint(model[1].body, x, use_reentrant=reentrant)
    result = preflight(model, torch.randn(4, 8), "cuda", FP16, measure=False)
    assert result.finished
    assert not result.findings
    rows = [row for row in result.report.rows if row.module.startswith("1.body") and not row.view]
    forward, again = (
        {(row.module, row.op, row.inputs, row.outputs) for row in rows if row.phase == phase}
        for phase in ("forward", "recompute")
    )
    assert again <= forward
    assert {op for _, op, inputs, _ in again if inputs[0] == "float16"} >= {"addmm", "relu"}


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
    assert phases == {"forward", "backward"}, result.findings
    assert not result.errors
    assert result.report.totals.autocast_casts > 0


class Attends(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, **self.options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch chooses the kernel itself")
@pytest.mark.parametrize(
    ("options", "shape", "kernel"),
    [
        ({"is_causal": True}, (2, 4, 16, 8), "flash"),
        ({"attn_mask": True}, (2, 4, 16, 8), "efficient"),
        ({}, (2, 4, 16, 12), "flash"),
        ({}, (2, 16, 8), None),
    ],
    ids=["causal", "mask", "padded head", "no heads"],
)
def test_attention_is_the_fused_kernel_of_a_gpu(options, shape, kernel):
    x = torch.randn(shape, requires_grad=True)
    if options.get("attn_mask"):
        options = {"attn_mask": torch.ones(16, 16, dtype=torch.bool)}
        model, x = nn.Module(), (x, options["attn_mask"])
        model.forward = lambda x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    else:
        model = Attends(**options)
    result = preflight(model, x, "cuda", FP16, measure=False)
    assert not result.errors
    rows = [row for row in result.report.rows if row.function == "scaled_dot_product_attention"]
    fused = {(row.op, row.phase, row.outputs[0]) for row in rows if "_scaled" in row.op}
    name = f"_scaled_dot_product_{kernel}_attention"
    assert fused == (
        {(name, "forward", "float16"), (f"{name}_backward", "backward", "float16")}
        if kernel
        else set()
    )
    casts = [row for row in rows if row.casts and row.phase == "forward"]
    assert casts
    assert {row.cause for row in casts} == {"autocast"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_what_needs_the_device_itself_is_an_error_unless_allowed():
    model = nn.Sequential(nn.Linear(8, 8), Calls(lambda x: torch.cuda.current_stream() and x))
    result = preflight(model, torch.randn(4, 8), "cuda", FP16, measure=False)
    (found,) = result.errors
    assert (found.rule, found.module) == ("not-simulated", "1")
    assert "needs the device itself" in found.what
    assert (result.forward, result.backward, result.finished) == (False, False, False)
    assert "forward NOT FINISHED, backward NOT FINISHED" in str(result)
    allowed = preflight(model, torch.randn(4, 8), measure=False, allow_unfinished=True)
    assert not allowed.errors
    assert not allowed.finished
    (found,) = allowed.findings
    assert (found.severity, found.rule) == ("warning", "not-simulated")


def test_a_step_that_would_fail_on_the_device_too_is_an_error_even_if_allowed():
    model = Calls(lambda x: x + torch.ones(8))
    (found,) = preflight(model, torch.ones(4, 8), measure=False, allow_unfinished=True).errors
    assert "same device" in found.what


def test_an_output_without_a_gradient_is_an_error_where_parameters_wait_for_one():
    detached = nn.Sequential(nn.Linear(8, 8), Calls(torch.detach))
    result = preflight(detached, torch.randn(4, 8), measure=False)
    assert (result.forward, result.backward) == (True, False)
    assert [f.op for f in result.errors] == ["backward"]
    frozen = preflight(detached.requires_grad_(False), torch.randn(4, 8), measure=False)
    assert (frozen.backward, frozen.finished, frozen.errors) == (None, True, ())


def test_modules_alike_that_took_no_part_are_named_as_one():
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(9))})
    model.forward = lambda x: model["layers"][0](x)
    result = preflight(model, torch.randn(4, 8), measure=False)
    assert result.summary.endswith("2 of 10 modules visited; not: layers.* x8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch chooses the kernel itself")
def test_flex_attention_is_one_kernel():
    flex = import_module("torch.nn.attention.flex_attention")

    def attend(x):
        mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, x.device)
        return flex.flex_attention(x, x, x, lambda score, b, h, q, k: score + q, mask)

    model = nn.Sequential(nn.Linear(8, 8), Calls(attend))
    result = preflight(model, torch.randn(2, 2, 16, 8), "cuda", FP16, measure=False)
    assert result.finished, result.findings
    ran = {(row.op, row.phase, row.compute) for row in result.report.rows if "flex" in row.op}
    assert ran == {
        ("flex_attention", "forward", "float16"),
        ("flex_attention_backward", "backward", "float16"),
    }


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


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_grad_sees_backward_too(context):
    with context():
        result = preflight(mlp(), torch.randn(4, 8), measure=False)
    assert {row.phase for row in result.report.rows} == {"forward", "backward"}


def test_forward_alone_can_be_asked_for():
    result = preflight(mlp(), torch.randn(4, 8), backward=False, measure=False)
    assert {row.phase for row in result.report.rows} == {"forward"}


def test_a_policy_s_parameter_dtype_is_simulated():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=FP16)
    result = preflight(mlp(), torch.randn(4, 8), mixed_precision=policy, measure=False)
    forward = [row for row in result.report.rows if row.phase == "forward"]
    linear = [row for row in forward if row.function == "linear"]
    assert sum(row.casts for row in linear if row.weight) == 0, "FSDP has cast them"
    assert {row.inputs for row in forward if row.op == "addmm"} == {("float16",)}


HARMFUL = {
    "requires_grad_": "y = x.clone().requires_grad_(); return (y * self.w).sum()",
    "enable_grad": "with torch.enable_grad():\n            return (self.w * x).sum()",
    "autograd.grad": (
        "y = x.clone().requires_grad_()\n"
        "        return torch.autograd.grad((y * self.w).sum(), y, create_graph=True)[0]"
    ),
    "item": "return self.w * x.sum().item()",
    "nonzero": "return self.w * x[x.nonzero()[:, 0]]",
    "copy": "y = torch.zeros_like(x); y.copy_(x); y[0] = self.w; return y.contiguous()",
    "cuda": "return torch.ones(4, device='cuda') * self.w + torch.ones(4).to('cuda')",
    "raises": "raise KeyError('no')",
    "inner region": "with torch.autocast('cuda', torch.float16):\n            return x @ self.w",
    "reentrant": (
        "return torch.utils.checkpoint.checkpoint(lambda t: (t * self.w).sin(), x * self.w, "
        "use_reentrant=True)"
    ),
}


def test_nothing_a_model_does_ends_the_process():
    """In a process of its own, as the fault is an abort that no test could survive."""
    bodies = json.dumps(HARMFUL)
    program = f"""
        import json, sys, torch, torch.utils.checkpoint, warnings
        from torch import nn
        from distamp import preflight
        for name, body in json.loads({bodies!r}).items():
            space = dict(torch=torch)
            exec("def forward(self, x):\\n        " + body, space)
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.w = nn.Parameter(torch.ones(4))
            Net.forward = space["forward"]
            result = preflight(Net(), torch.ones(4, 4), "cuda", torch.float16, measure=False)
            print(json.dumps([name, [f.rule for f in result.findings]]), flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert found == {name: ["step-fails"] if name == "raises" else [] for name in HARMFUL}


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
