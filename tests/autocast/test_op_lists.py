"""OpLists: which op runs in which precision, in one region of one thread."""

import copy
import functools
import operator
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from distamp import autocast
from distamp.autocast import AutocastState, OpLists
from distamp.autocast.op_kernels import CastPolicy
from tests.on_ranks import on_ranks

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SEED = torch.Generator().manual_seed(0)
X, W, B = (torch.randn(shape, generator=SEED) for shape in ((4, 4), (4, 4), (4,)))
HALF, TARGET = X.bfloat16(), W.bfloat16().float()

MATMULS: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: F.linear(X, W, B),
    "matmul": lambda: X @ W,
    "mm": lambda: torch.mm(X, W),
    "addmm": lambda: torch.addmm(B, X, W),
    "bmm": lambda: torch.bmm(X[None], W[None]),
    "baddbmm": lambda: torch.baddbmm(X[None], X[None], W[None]),
    "mv": lambda: torch.mv(W, B),
    "einsum": lambda: torch.einsum("ij,jk->ik", X, W),
    "multi_dot": lambda: torch.linalg.multi_dot([X, W]),
}


def dtypes() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Of a product, a softmax of bf16 and a loss of bf16: in torch's lists bf16, bf16, fp32."""
    return torch.mm(X, W).dtype, F.softmax(HALF, -1).dtype, F.mse_loss(HALF, HALF).dtype


PLAIN = (BF16, BF16, FP32)


@pytest.mark.parametrize("name", ["mm", "linear", "matmul"])
def test_a_name_moves_its_whole_family(name):
    with autocast("cpu", ops=OpLists(fp32={name})):
        assert {call().dtype for call in MATMULS.values()} == {FP32}
        assert F.conv2d(X[None, None], W[None, None]).dtype is BF16
    with autocast("cpu", ops=OpLists(lower_precision={"max_pool2d"})):
        assert F.max_pool2d(X[None, None], 2, return_indices=True)[0].dtype is BF16


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Stands for a user's function that has the name of an op."""
    return query @ key @ value


class Layer(torch.nn.Linear):
    """Stands for a user's module with a method that has the name of an op."""

    def matmul(self, x: Tensor) -> Tensor:
        return x @ self.weight


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


softmax.__module__ = "torch.nn.functional"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (attention, "attention"),
        (Layer(4, 4).matmul, "Layer.matmul"),
        (softmax, "softmax"),
        (operator.matmul, "matmul"),
        (functools.wraps(torch.mm)(lambda x, y: x @ y), "mm"),
        (X.softmax, "softmax"),
    ],
)
@pytest.mark.parametrize("category", ["fp32", "lower_precision", "promote", "unlisted"])
def test_a_function_that_is_not_torchs_is_refused_although_an_op_has_its_name(
    function, name, category
):
    with pytest.raises(TypeError, match=rf"torch's own functions, and \S*{name} is none"):
        OpLists(**{category: {function}})


def test_every_function_of_torch_stands_for_its_op():
    """Functions, methods and modules, wherever torch keeps them and whatever it wraps them in."""
    functions = {
        F.linear: "linear",
        F.softmax: "softmax",
        F.max_pool2d: "max_pool2d",
        F.scaled_dot_product_attention: "scaled_dot_product_attention",
        torch.softmax: "softmax",
        torch.linalg.norm: "linalg_norm",
        torch.fft.fft: "fft_fft",
        torch.special.expit: "special_expit",
        Tensor.matmul: "matmul",
        Tensor.__matmul__: "matmul",
        Tensor.__pow__: "pow",
        torch.nn.GRUCell: "gru_cell",
        torch.ops.aten.mm: "mm",
        torch.ops.aten.mm.default: "mm",
    }
    for function, name in functions.items():
        assert OpLists(fp32={function}, exact=True).by_op() == {name: CastPolicy.FP32}


def test_an_op_has_the_names_that_torch_has_for_it():
    aten = torch.ops.aten.linear
    names = ["torch.nn.functional.linear", "F.linear", "aten::linear", "aten::linear.default"]
    for name in (*names, F.linear, aten, aten.default):
        assert OpLists(fp32=[name]) == OpLists(fp32={"linear"})
    given = OpLists(fp32=["torch.linalg.norm", "torch.fft.fft", "cross_entropy", "__rpow__"])
    assert given.fp32 == {"linalg_norm", "fft_fft", "cross_entropy_loss", "pow"}
    listed = OpLists.of_torch("cuda")
    assert listed.fp32 >= {"softmax", "tan"}
    assert listed.lower_precision >= {"linear", "conv2d"}
    assert listed.promote >= {"addcmul", "dot"}


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"fp32": {"lineer"}}, ValueError, "'lineer'. Did you mean 'linear'"),
        ({"fp32": {"add_"}}, ValueError, "'add'"),
        ({"fp32": {"zeros"}}, ValueError, "'zeros'"),
        ({"fp32": {"transpose"}}, ValueError, "'transpose'"),
        ({"fp32": {"to"}}, ValueError, "'to'"),
        ({"fp32": "linear"}, TypeError, r"\{'linear'\}"),
        ({"fp32": [3]}, TypeError, "got 3"),
        ({"fp32": {"linear"}, "lower_precision": {"bmm"}}, ValueError, "exact=True"),
    ],
)
def test_mistakes_are_named(arguments, error, says):
    with pytest.raises(error, match=says):
        OpLists(**arguments)


def test_lists_are_values():
    one, same = OpLists(fp32={"mm", "softmax"}), OpLists(fp32=["softmax", "mm"])
    assert (one, hash(one)) == (same, hash(same))
    assert one != OpLists(fp32={"mm", "softmax"}, exact=True)
    assert repr(one) == "OpLists(fp32=['mm', 'softmax'])"
    for lists in (OpLists(fp32={"mm"}, exact=True), OpLists.of_torch("cuda")):
        assert pickle.loads(pickle.dumps(lists)) == copy.deepcopy(lists) == lists


# An op, the lists, and the dtype that comes out of it.
RESULTS: dict[str, tuple[Callable[[], Any], dict[str, Any], torch.dtype]] = {
    "promoted alone": (lambda: torch.mm(HALF, HALF), {"promote": {"mm"}}, BF16),
    "promoted to fp32": (lambda: torch.mm(HALF, X), {"promote": {"mm"}}, FP32),
    "promoted from two halves": (lambda: torch.mm(X.half(), HALF), {"promote": {"mm"}}, FP32),
    "a list of tensors": (lambda: torch.stack([HALF, HALF]), {"fp32": {"stack"}}, FP32),
    "unlisted": (lambda: F.mse_loss(HALF, HALF), {"unlisted": {"mse_loss"}}, BF16),
    "inside an unlisted op": (
        lambda: torch.linalg.multi_dot([X, W, X]),
        {"unlisted": {"multi_dot"}, "exact": True},
        BF16,
    ),
    "exact": (MATMULS["linear"], {"fp32": {"linear"}, "exact": True}, FP32),
    "beside an exact one": (MATMULS["mm"], {"fp32": {"linear"}, "exact": True}, BF16),
    # What only other lists name hands on to these.
    "a composite op alone": (MATMULS["einsum"], {"fp32": {"einsum"}, "exact": True}, FP32),
    "what it is made of": (MATMULS["einsum"], {"fp32": {"mm", "bmm"}, "exact": True}, FP32),
    "neither": (MATMULS["einsum"], {"fp32": {"erfc"}}, BF16),
    "several outputs": (lambda: torch.topk(HALF, 2).values, {"fp32": {"topk"}}, FP32),
    "indices": (lambda: torch.topk(HALF, 2).indices, {"fp32": {"topk"}}, torch.int64),
    "float64": (lambda: X.double() @ W.double(), {"fp32": {"matmul"}}, FP64),
    "float64, lower": (lambda: torch.tanh(X.double()), {"lower_precision": {"tanh"}}, FP64),
    "integers": (lambda: torch.arange(3).sum(), {"fp32": {"sum"}}, torch.int64),
    "in place": (lambda: HALF.clone().tanh_(), {"fp32": {"tanh"}}, BF16),
    "out": (lambda: torch.tanh(HALF, out=torch.empty_like(HALF)), {"fp32": {"tanh"}}, BF16),
    "dtype": (lambda: F.softmax(HALF, -1, dtype=FP64), {"fp32": {"softmax"}}, FP64),
    "dtype by position": (lambda: torch.softmax(X, -1, FP64), {"fp32": {"softmax"}}, FP64),
    "dtype over its kernel's": (
        lambda: F.softmax(X, -1, dtype=FP32),
        {"lower_precision": {"softmax"}},
        FP32,
    ),
    "dtype, lower": (lambda: X.sum(dtype=FP64), {"lower_precision": {"sum"}}, FP64),
    "dtype of the input": (lambda: HALF.sum(0, dtype=BF16), {"fp32": {"sum"}}, BF16),
}


@pytest.mark.parametrize("case", RESULTS)
def test_the_dtype_that_comes_out(case):
    call, lists, wanted = RESULTS[case]
    with autocast("cpu", ops=OpLists(**lists)):
        got = call()
    assert got.dtype is wanted
    if case.startswith("dtype"):
        assert torch.equal(got, call()), "the input was not cast either"


LOSSES: dict[str, Callable[..., Tensor]] = {
    "l1_loss": lambda x, r: F.l1_loss(x, TARGET.to(x.dtype), reduction=r),
    "mse_loss": lambda x, r: F.mse_loss(x, TARGET.to(x.dtype), reduction=r),
    "soft_margin_loss": lambda x, r: F.soft_margin_loss(x, TARGET.sign().to(x.dtype), reduction=r),
    "cross_entropy": lambda x, r: F.cross_entropy(x, torch.arange(4), reduction=r),
    "nll_loss": lambda x, r: F.nll_loss(x, torch.arange(4), reduction=r),
}
NUMBERS: dict[str, Callable[..., Tensor]] = {
    "mul": lambda x, r: 2 * x * 2,
    "add": lambda x, r: x + 1.5,
    "rsub": lambda x, r: 1 - x,
    "div": lambda x, r: x / 3,
    "floor_divide": lambda x, r: x // 2,
    "xlogy": lambda x, r: torch.xlogy(2.0, x.abs()),
}


@pytest.mark.parametrize("name", [*LOSSES, *NUMBERS])
@pytest.mark.parametrize(
    ("category", "of_fp32", "of_bf16"),
    [("lower_precision", BF16, BF16), ("fp32", FP32, FP32), ("promote", FP32, BF16)],
)
def test_losses_keep_their_reduction_and_numbers_stand_for_tensors(
    name, category, of_fp32, of_bf16
):
    """A mean is a loss's default, which the dispatcher does not hand on."""
    call = (LOSSES | NUMBERS)[name]
    for reduction in ("none", "mean", "sum"):
        for x, dtype in ((X, of_fp32), (HALF, of_bf16)):
            if category == "promote" and name.endswith("loss"):
                dtype = x.dtype
            with autocast("cpu", ops=OpLists(**{category: {name}})):
                got = call(x, reduction)
            torch.testing.assert_close(got, call(x.to(dtype), reduction))


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=(pytest.mark.gpu, NO_GPU))])
def test_fp32_gradients_equal_those_with_autocast_off(device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
    model.to(device)
    found = []
    for ops, enabled in ((None, False), (OpLists(fp32={"linear"}), True), (None, True)):
        with autocast(device, enabled=enabled, ops=ops):
            loss = model(X.to(device)).float().square().sum()
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    off, listed, plain = found
    assert all(map(torch.equal, off, listed))
    assert not all(map(torch.equal, off, plain))


def test_the_regions_dtype_is_the_lower_precision_and_off_is_off():
    with autocast("cpu", FP16, ops=OpLists(lower_precision={"tanh"}, fp32={"exp"})):
        found = [torch.tanh(X).dtype]
        with torch.autocast("cpu", dtype=BF16):
            found.append(torch.tanh(X).dtype)
        with torch.autocast("cpu", enabled=False):
            found += [torch.tanh(X).dtype, torch.exp(HALF).dtype]
        found.append(torch.tanh(X).dtype)
    assert found == [FP16, BF16, FP32, BF16, FP16]


def test_inner_lists_take_the_place_of_the_outer_ones():
    inner = OpLists(fp32={"softmax"}, unlisted={"mse_loss"})
    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        with autocast("cpu", ops=inner):
            assert dtypes() == (BF16, FP32, BF16)
            with autocast("cpu"):
                assert dtypes() == (BF16, FP32, BF16)
            with autocast("cpu", ops=OpLists()):
                assert dtypes() == PLAIN
            with pytest.raises(KeyError), autocast("cpu", ops=OpLists(fp32={"mm"})):
                raise KeyError
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(X, torch.randn(3, 3))
        assert dtypes() == (FP32, BF16, FP32)
        with autocast("cuda", enabled=False, ops=OpLists(fp32={"relu"})):
            assert dtypes() == (FP32, BF16, FP32)
    with autocast("cpu", cache_enabled=False):
        assert dtypes() == PLAIN
        assert not torch.is_autocast_cache_enabled()
    assert AutocastState.capture().lists == ()


class Watch(torch.autograd.Function):
    """Notes what its backward pass follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: set[Any]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen.add(dtypes())
        return grad, None


def test_threads_follow_their_own_lists_and_backward_its_threads():
    lists = [OpLists(fp32={"mm"}), OpLists(fp32={"softmax"}), None]
    barrier = threading.Barrier(3)
    seen: list[set[Any]] = [set(), set(), set()]

    def work(i: int) -> None:
        with autocast("cpu", ops=lists[i]):
            barrier.wait()
            for _ in range(100):
                seen[i].add(dtypes())
                Watch.apply(X.clone().requires_grad_(), seen[i]).sum().backward()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert seen == [{(FP32, BF16, FP32)}, {(BF16, FP32, FP32)}, {PLAIN}]


def test_a_custom_op_can_be_listed_once_its_library_is_there():
    listed = {"lower_precision": {"distamp_test::double"}}
    with pytest.raises(ValueError, match="distamp_test::double"):
        OpLists(**listed)
    with torch.library._scoped_library("distamp_test", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x + x, "CompositeExplicitAutograd")
        for ops, wanted in ((OpLists(**listed), BF16), (None, FP32)):
            with autocast("cpu", ops=ops):
                assert torch.ops.distamp_test.double(X).dtype is wanted


def test_lists_are_laid_over_others():
    merged = OpLists.of_torch("cuda") | OpLists(fp32={"linear"}, promote={"exp"})
    found = merged.by_op()
    assert found["mm"] is found["addmm"] is CastPolicy.FP32
    assert (found["exp"], found["conv2d"]) == (CastPolicy.PROMOTE, CastPolicy.LOWER_PRECISION)
    assert merged == merged | merged
    with pytest.raises(TypeError):
        merged | {"linear"}  # type: ignore[operator]


@on_ranks(1)
def test_lists_hold_for_an_op_that_gets_a_kernel_for_autocast_later():
    library = torch.library.Library("late_kernels", "DEF")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x * 1, "CompositeExplicitAutograd")
    op: Any = torch.ops.late_kernels.op
    lists = OpLists(fp32={"late_kernels::op"})
    for late in (False, True):
        if late:
            with warnings.catch_warnings(action="ignore"):
                library.impl("op", lambda x: x.half(), "AutocastCPU", allow_override=True)
        with autocast("cpu", ops=lists):
            assert op(HALF).dtype is FP32
    with autocast("cpu"):
        assert op(HALF).dtype is FP16


# -- beside an out-of-tree accelerator ------------------------------------------------------------

# A backend as far as autocast knows it: a name, a module, kernels of its own at its autocast key.
BACKEND = """
import types, warnings
import torch, torch.nn.functional as F
from torch._subclasses import FakeTensorMode

torch.utils.rename_privateuse1_backend("npu")
npu = types.ModuleType("torch.npu")
npu.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
npu.is_available = lambda: True
npu.device_count = lambda: 1
npu.current_device = lambda: 0
npu.is_initialized = lambda: True
npu._is_in_bad_fork = lambda: False
torch._register_device_module("npu", npu)

key = "AutocastPrivateUse1"
fallback = torch.library.Library("_", "IMPL")
fallback.fallback(torch.library.fallthrough_kernel, key)
library = torch.library.Library("aten", "IMPL")
def lower(op):
    def kernel(*args):
        to = torch.get_autocast_dtype("npu")
        excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(*(a.to(to) if isinstance(a, torch.Tensor) else a for a in args))
    return kernel
library.impl("mm", lower(torch.mm), key)
library.impl("linear", lower(F.linear), key)
"""

PROGRAM = """
from distamp import AutocastState, OpLists, autocast
x = torch.randn(4, 4)
lists = OpLists(fp32={"mm"}, lower_precision={"tanh"})
with autocast("cpu", ops=lists):
    assert (x @ x).dtype is F.linear(x, x).dtype is torch.float32
    assert torch.tanh(x).dtype is F.conv2d(x[None, None], x[None, None]).dtype is torch.bfloat16
    state = AutocastState.capture()
with autocast("cpu"):
    assert (x @ x).dtype is torch.bfloat16
with state.apply():
    assert (x @ x).dtype is torch.float32
assert "npu" in [name for name, _, _ in state.devices]
with FakeTensorMode():
    y = torch.empty(4, 4, device="npu")
    with autocast("npu", torch.bfloat16):
        assert torch.mm(y, y).dtype is torch.bfloat16
    with autocast("npu", torch.bfloat16, ops=lists):
        assert torch.mm(y, y).dtype is F.linear(y, y).dtype is torch.float32
        assert torch.tanh(y).dtype is torch.bfloat16
        with autocast("npu", enabled=False):
            assert torch.tanh(y).dtype is torch.float32

torch.accelerator.is_available = lambda: False  # torch.compile asks a backend for its stream
compiled = torch.compile(lambda x: x @ x, backend="eager")
for ops in (None, lists, OpLists(fp32={"erf"})) * 2:
    with autocast("cpu", ops=ops):
        assert compiled(x).dtype is (x @ x).dtype
print("done")
"""


def test_lists_work_beside_such_a_backend() -> None:
    command = [sys.executable, "-c", BACKEND + PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr[-3000:]
