"""What a precision report counts: as an independent dispatch mode does, and where it happened."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import distamp
from distamp import precision_report
from distamp.autocast import OpLists
from distamp.autocast.report import OUTSIDE

BF16, FP16 = torch.bfloat16, torch.float16


class Independent(TorchDispatchMode):
    """The reference: kernels by name and dtypes, and casts with their bytes, in a few lines."""

    def __init__(self):
        super().__init__()
        self.kernels = Counter()
        self.casts = self.read = self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        got = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        dtypes = tuple(frozenset(str(t.dtype)[6:] for t in tensors) for tensors in (given, got))
        self.kernels[(name.removeprefix("aten::"), *dtypes)] += 1
        pairs = []
        if name in ("aten::_to_copy", "aten::to"):
            pairs = [(given[0], got[0])]
        elif name == "aten::copy_":
            pairs = [(given[1], given[0])]
        elif name == "aten::_foreach_copy_":
            pairs = zip(args[1], args[0], strict=True)
        for source, result in pairs:
            if source.dtype != result.dtype:
                self.casts += 1
                self.read += source.nbytes
                self.written += result.nbytes
        return out


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v)).float()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 8, 2), nn.Linear(8, 8)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 8))


def transformer():
    return nn.Sequential(Block(), Block())


def conv():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 3))


MODELS = {
    "mlp": (mlp, (4, 8)),
    "transformer": (transformer, (2, 5, 8)),
    "conv": (conv, (2, 1, 8, 8)),
    "lstm": (Recurrent, (3, 2, 8)),
}


def needs(make, shape, dtype):
    """Skip where this CPU has no kernel for the model in the dtype: asked by running it once."""
    model = make()
    try:
        with torch.autocast("cpu", dtype=dtype):
            model(torch.randn(shape)).sum().backward()
    except RuntimeError as error:
        pytest.skip(f"this CPU cannot run it in {dtype}: {str(error).splitlines()[0]}")


def train(model, shape, dtype=BF16, autocast=torch.autocast, cache=True, step=True):
    """Two microbatches in one region, and an optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters())
    with autocast("cpu", dtype=dtype, cache_enabled=cache):
        losses = [model(torch.randn(shape)).square().mean() for _ in range(2)]
    sum(losses).backward()
    if step:
        optimizer.step()


def kernels(report):
    counts = Counter()
    for row in report.rows:
        counts[(row.op, frozenset(row.inputs), frozenset(row.outputs))] += row.calls
    return counts


@pytest.mark.parametrize("autocast", [torch.autocast, distamp.autocast], ids=["torch", "distamp"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_totals_equal_an_independent_count(name, dtype, autocast):
    make, shape = MODELS[name]
    needs(make, shape, dtype)
    model = make()
    with Independent() as count, precision_report(model) as report:
        train(model, shape, dtype, autocast)
    assert kernels(report) == count.kernels
    totals = report.totals
    assert (totals.casts, totals.bytes_read, totals.bytes_written) == (
        count.casts,
        count.read,
        count.written,
    )
    assert totals.casts > 4


def test_a_users_cast_is_told_from_autocasts():
    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    with precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16):
            x.to(torch.float64)
            model(x).float().half()
            torch.softmax(x, -1, dtype=torch.float64)
            torch.empty(2).copy_(torch.ones(2, dtype=torch.int64))
        x.bfloat16()
    causes = Counter()
    for row in report.rows:
        causes[row.cause, row.function] += row.casts
    assert +causes == {
        ("autocast", "linear"): 3,
        ("explicit", "to"): 1,
        ("explicit", "float"): 1,
        ("explicit", "half"): 1,
        ("explicit", "softmax"): 1,
        ("explicit", "copy"): 1,
        ("explicit", "bfloat16"): 1,
    }


def test_the_gradient_of_a_cast_has_the_cast_s_cause_and_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x).float())

    model = Net()
    with precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16):
            out = model(torch.randn(2, 4))
        out.float().sum().backward()
    casts = Counter()
    for row in report.rows:
        if row.phase == "backward" and row.casts:
            casts[row.module, row.cause] += row.casts
    assert casts == {
        ("a", "autocast"): 2,
        ("b", "autocast"): 3,
        ("", "explicit"): 1,
        (OUTSIDE, "explicit"): 1,
    }


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Sigmoid()))
        self.again = self.outer[0]

    def forward(self, x):
        return self.again(self.outer(x).exp())


def modules_of(report, phase):
    return {row.op: row.module for row in report.rows if row.phase == phase}


def test_forward_ops_belong_to_the_innermost_module():
    model = Nested()
    with precision_report(model) as report:
        model(torch.ones(2)).exp2()
    found = modules_of(report, "forward")
    assert found.pop("exp2") == found.pop("ones") == OUTSIDE
    assert found == {"tanh": "outer.0", "sigmoid": "outer.1.0", "exp": ""}


def test_a_shared_module_is_counted_once_for_each_use():
    model = Nested()
    with precision_report(model) as report:
        model(torch.ones(2))
    assert [row.calls for row in report.rows if row.op == "tanh"] == [2]


def test_backward_ops_belong_to_the_module_whose_forward_made_them():
    model = Nested()
    x = torch.ones(2, requires_grad=True)
    with precision_report(model) as report:
        model(x).sum().backward()
    found = modules_of(report, "backward")
    assert found["tanh_backward"] == "outer.0"
    assert found["sigmoid_backward"] == "outer.1.0"
    assert found["mul"] == "", "the gradient of exp"
    assert found["expand"] == OUTSIDE, "the gradient of the sum"


def test_backward_of_a_forward_before_the_block_is_nobodys():
    model = Nested()
    out = model(torch.ones(2, requires_grad=True))
    with precision_report(model) as report:
        out.sum().backward()
    assert set(modules_of(report, "backward").values()) == {OUTSIDE}


def test_the_gradient_of_a_custom_function_belongs_to_its_module():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad.double().sin().float()

    class Net(nn.Module):
        def forward(self, x):
            return Twice.apply(x)

    model = nn.Sequential(nn.Identity(), Net())
    with precision_report(model) as report:
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert modules_of(report, "backward")["sin"] == "1"
    assert report.totals.explicit_casts == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_forward_is_counted_again_as_recompute(reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=reentrant)

    model = Net()
    x = torch.randn(2, 8, requires_grad=True)
    with Independent() as count, precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16):
            out = model(x)
        out.float().sum().backward()
    assert kernels(report) == count.kernels
    assert modules_of(report, "recompute")["tanh"] == "body.1"
    assert modules_of(report, "backward")["tanh_backward"] == "body.1"
    again = [row for row in report.rows if row.phase == "recompute" and row.op == "addmm"]
    # Without reentry the second time stops at the last tensor that backward needs.
    assert [row.module for row in again] == ["body.0", "body.2"][: 2 if reentrant else 1]
    assert {row.outputs for row in again} == {("bfloat16",)}


def hooks_of(model):
    return [
        hook
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    ]


def test_no_hook_is_left_however_the_block_ends():
    model = mlp()

    def fail():
        with precision_report(model):
            assert len(hooks_of(model)) == 2 * 5
            model(torch.randn(4, 8))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert hooks_of(model) == []


def test_a_module_that_raises_is_left_again():
    class Bad(nn.Module):
        def forward(self, x):
            raise ValueError

    model = nn.Sequential(Bad())
    with precision_report(model) as report:
        with pytest.raises(ValueError):
            model(torch.ones(2))
        torch.ones(2).exp()
    assert modules_of(report, "forward")["exp"] == OUTSIDE


def test_another_thread_that_runs_the_model_is_followed():
    model = mlp()
    outputs = []

    def work():
        for _ in range(3):
            with torch.autocast("cpu", dtype=BF16):
                outputs.append(model(torch.randn(4, 8)))
        torch.ones(2).exp()

    with precision_report(model) as report:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sum(out.float().sum() for out in outputs).backward()
    by_module = Counter()
    for row in report.rows:
        if row.op == "addmm":
            by_module[row.module, row.phase] += row.calls
    assert by_module == {("0", "forward"): 6, ("3", "forward"): 6}
    found = modules_of(report, "backward")
    assert found["threshold_backward"] == "1"
    assert found["native_layer_norm_backward"] == "2"
    assert "exp" not in modules_of(report, "forward"), "the thread itself was not asked about"


def test_replicas_of_data_parallel_have_the_names_of_the_model():
    model = mlp()
    with precision_report(model) as report:
        replica = model[0]._replicate_for_data_parallel()
        replica.weight, replica.bias = model[0].weight, model[0].bias
        replica(torch.randn(4, 8))
    assert modules_of(report, "forward")["addmm"] == "0"


def test_a_copy_or_a_file_made_inside_the_block_carries_no_recorder():
    model = mlp()
    with precision_report(model) as report:
        copied = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        calls = report.totals.calls
        copied(torch.randn(4, 8))
    assert {row.module for row in report.rows if row.op == "addmm"} == {OUTSIDE}
    assert report.totals.calls > calls
    buffer.seek(0)
    torch.load(buffer, weights_only=False)(torch.randn(4, 8))


def test_inference_mode_casts_are_counted():
    model = nn.Linear(8, 8)
    region = torch.autocast("cpu", dtype=BF16)
    with Independent() as count, precision_report(model) as report, torch.inference_mode(), region:
        model(torch.randn(4, 8))
    assert report.totals.casts == count.casts == 3
    assert report.totals.autocast_casts == 3


def test_outside_every_region_nothing_is_cast():
    model = mlp()
    with precision_report(model) as report:
        model(torch.randn(4, 8)).sum().backward()
    assert report.totals.casts == 0
    assert report.totals.calls > 0


def test_nested_reports_of_one_model_agree():
    model = mlp()
    with precision_report(model) as outer, precision_report(model) as inner:
        train(model, (4, 8))
    assert outer.rows == inner.rows


def test_the_report_can_be_read_inside_the_block():
    model = mlp()
    with precision_report(model) as report:
        assert report.rows == ()
        model(torch.randn(4, 8))
        assert report.totals.calls > 0


def test_numbers_do_not_change_while_recording():
    torch.manual_seed(0)
    model, x = transformer(), torch.randn(2, 5, 8)
    grads = []
    for context in (nullcontext(), precision_report(model)):
        model.zero_grad()
        with context:
            with torch.autocast("cpu", dtype=BF16):
                out = model(x)
            out.float().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["mlp", "transformer", "conv"])
def test_totals_equal_an_independent_count_on_a_gpu(name):
    """Backward runs in a thread of autograd's own there."""
    make, shape = MODELS[name]
    model = make().cuda()
    with Independent() as count, precision_report(model) as report:
        with distamp.autocast("cuda", FP16):
            out = model(torch.randn(shape, device="cuda"))
        out.float().sum().backward()
    assert kernels(report) == count.kernels
    assert report.totals.casts == count.casts > 0
    backward = {row.module for row in report.rows if row.phase == "backward"}
    assert backward >= {row.module for row in report.rows if row.op == "addmm"}


def test_only_a_module_can_be_reported_on():
    optimizer = torch.optim.SGD([torch.ones(1)])
    with pytest.raises(TypeError, match=r"the model, a torch\.nn\.Module, got SGD"):
        precision_report(optimizer).__enter__()


def four_microbatches(region, model):
    """A step of a four-layer MLP as accumulation has it: one region for each microbatch."""
    with precision_report(model) as report:
        for _ in range(4):
            with region():
                out = model(torch.randn(4, 8))
            out.float().sum().backward()
    return report


def test_casts_of_a_region_with_op_lists_are_autocasts():
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    lists = OpLists(fp32={"linear"}, lower_precision={"softmax"})
    with precision_report(model) as report, distamp.autocast("cpu", BF16, ops=lists):
        model(torch.randn(4, 8))
    ran = {(row.op, row.outputs) for row in report.rows if row.op in ("addmm", "_softmax")}
    assert ran == {("addmm", ("float32",)), ("_softmax", ("bfloat16",))}
    assert {r.cause for r in report.rows if r.casts} == {"autocast"}


def test_higher_order_operators_are_one_kernel():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    x = torch.randn(2, 2, 16, 8)
    with precision_report() as report, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = flex.flex_attention(x, x, x)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(x, x, x))
    (row,) = [row for row in report.rows if row.op == "flex_attention"]
    assert (row.calls, row.outputs[0]) == (1, "float32")
