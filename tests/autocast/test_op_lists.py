"""OpLists choose the precision of single ops, in one region of one thread."""

import copy
import functools
import operator
import pickle
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
X = torch.randn((4, 4), generator=SEED)
W = torch.randn((4, 4), generator=SEED)
B = torch.randn((4,), generator=SEED)
HALF, TARGET = X.bfloat16(), W.bfloat16().float()
IMAGE = X[None, None]


def linear() -> Tensor:
    return F.linear(X, W, B)


def matmul() -> Tensor:
    return X @ W


def mm() -> Tensor:
    return torch.mm(X, W)


def addmm() -> Tensor:
    return torch.addmm(B, X, W)


def bmm() -> Tensor:
    return torch.bmm(X[None], W[None])


def baddbmm() -> Tensor:
    return torch.baddbmm(X[None], X[None], W[None])


def mv() -> Tensor:
    return torch.mv(W, B)


def einsum() -> Tensor:
    return torch.einsum("ij,jk->ik", X, W)


def multi_dot() -> Tensor:
    return torch.linalg.multi_dot([X, W])


def dtypes() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes of a product, a softmax of bfloat16 and a loss of bfloat16."""
    softmax_dtype = F.softmax(HALF, -1).dtype
    loss_dtype = F.mse_loss(HALF, HALF).dtype
    return mm().dtype, softmax_dtype, loss_dtype


# The dtypes with torch's lists.
PLAIN = (BF16, BF16, FP32)


@pytest.mark.parametrize(
    "product", [linear, matmul, mm, addmm, bmm, baddbmm, mv, einsum, multi_dot]
)
@pytest.mark.parametrize("name", ["mm", "linear", "matmul"])
def test_a_name_moves_its_whole_family(name, product):
    with autocast("cpu", ops=OpLists(fp32={name})):
        assert product().dtype is FP32


@pytest.mark.parametrize("name", ["mm", "linear", "matmul"])
def test_a_matrix_product_does_not_move_convolutions(name):
    with autocast("cpu", ops=OpLists(fp32={name})):
        assert F.conv2d(IMAGE, W[None, None]).dtype is BF16


def test_max_pool2d_moves_the_op_that_returns_indices():
    with autocast("cpu", ops=OpLists(lower_precision={"max_pool2d"})):
        out, _ = F.max_pool2d(IMAGE, 2, return_indices=True)
    assert out.dtype is BF16


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Multiply: a function of a user with the name of an op."""
    return query @ key @ value


class Layer(torch.nn.Linear):
    """A module of a user with a method that has the name of an op."""

    def matmul(self, x: Tensor) -> Tensor:
        return x @ self.weight


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


softmax.__module__ = "torch.nn.functional"


@functools.wraps(torch.mm)
def wrapped_mm(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@pytest.mark.parametrize(
    ("function", "name"),
    [
        pytest.param(attention, "attention", id="function"),
        pytest.param(Layer(4, 4).matmul, "Layer.matmul", id="method"),
        pytest.param(softmax, "softmax", id="function that claims torch's module"),
        pytest.param(operator.matmul, "matmul", id="operator"),
        pytest.param(wrapped_mm, "mm", id="wrapper"),
        pytest.param(X.softmax, "softmax", id="bound method"),
    ],
)
@pytest.mark.parametrize("category", ["fp32", "lower_precision", "promote", "unlisted"])
def test_a_function_outside_torch_is_refused_even_with_the_name_of_an_op(function, name, category):
    with pytest.raises(TypeError, match=rf"torch's own functions, and \S*{name} is none"):
        OpLists(**{category: {function}})


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.linear, "linear"),
        (F.softmax, "softmax"),
        (F.max_pool2d, "max_pool2d"),
        (F.scaled_dot_product_attention, "scaled_dot_product_attention"),
        (torch.softmax, "softmax"),
        (torch.linalg.norm, "linalg_norm"),
        (torch.fft.fft, "fft_fft"),
        (torch.special.expit, "special_expit"),
        (Tensor.matmul, "matmul"),
        (Tensor.__matmul__, "matmul"),
        (Tensor.__pow__, "pow"),
        (torch.nn.GRUCell, "gru_cell"),
        (torch.ops.aten.mm, "mm"),
        (torch.ops.aten.mm.default, "mm"),
    ],
)
def test_a_function_of_torch_stands_for_its_op(function, name):
    lists = OpLists(fp32={function}, exact=True)
    assert lists.by_op() == {name: CastPolicy.FP32}


LINEAR = torch.ops.aten.linear


@pytest.mark.parametrize("name", ["torch.nn.functional.linear", "F.linear", "aten::linear"])
def test_an_op_has_several_names(name):
    assert OpLists(fp32=[name]) == OpLists(fp32={"linear"})


@pytest.mark.parametrize("op", ["aten::linear.default", F.linear, LINEAR, LINEAR.default])
def test_an_overload_or_a_function_equals_the_name_of_its_op(op):
    assert OpLists(fp32=[op]) == OpLists(fp32={"linear"})


def test_names_of_functions_become_names_of_ops():
    names = ["torch.linalg.norm", "torch.fft.fft", "cross_entropy", "__rpow__"]
    ops = {"linalg_norm", "fft_fft", "cross_entropy_loss", "pow"}
    assert OpLists(fp32=names).fp32 == ops


def test_torchs_lists_of_a_device_can_be_read():
    lists = OpLists.of_torch("cuda")
    assert lists.fp32 >= {"softmax", "tan"}
    assert lists.lower_precision >= {"linear", "conv2d"}
    assert lists.promote >= {"addcmul", "dot"}


def test_a_misspelled_op_is_refused_with_a_similar_name():
    with pytest.raises(ValueError, match=r"'lineer'. Did you mean 'linear'"):
        OpLists(fp32={"lineer"})


def test_the_name_of_an_in_place_op_is_refused_with_the_name_of_the_op():
    with pytest.raises(ValueError, match="'add'"):
        OpLists(fp32={"add_"})


@pytest.mark.parametrize("name", ["zeros", "transpose", "to"])
def test_an_op_that_computes_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"'{name}'"):
        OpLists(fp32={name})


def test_a_string_is_no_set_of_names():
    with pytest.raises(TypeError, match=r"\{'linear'\}"):
        OpLists(fp32="linear")


def test_a_number_is_no_name():
    with pytest.raises(TypeError, match="got 3"):
        OpLists(fp32=[3])  # type: ignore[list-item]


def test_two_names_of_one_family_in_two_lists_are_refused():
    with pytest.raises(ValueError, match="exact=True"):
        OpLists(fp32={"linear"}, lower_precision={"bmm"})


def test_lists_with_the_same_names_are_equal():
    lists = OpLists(fp32={"mm", "softmax"})
    same_lists = OpLists(fp32=["softmax", "mm"])
    assert lists == same_lists
    assert hash(lists) == hash(same_lists)
    assert lists != OpLists(fp32={"mm", "softmax"}, exact=True)


def test_lists_have_a_repr():
    lists = OpLists(fp32={"mm", "softmax"})
    assert repr(lists) == "OpLists(fp32=['mm', 'softmax'])"


@pytest.mark.parametrize("lists", [OpLists(fp32={"mm"}, exact=True), OpLists.of_torch("cuda")])
def test_copies_of_lists_are_equal(lists):
    assert copy.deepcopy(lists) == lists
    assert pickle.loads(pickle.dumps(lists)) == lists


def dtype_with(function: Callable[[], Tensor], **lists: Any) -> torch.dtype:
    """Call a function in a region with lists; return the dtype of its result."""
    with autocast("cpu", ops=OpLists(**lists)):
        return function().dtype


def test_a_promoted_op_keeps_the_dtype_of_equal_inputs():
    assert dtype_with(lambda: torch.mm(HALF, HALF), promote={"mm"}) is BF16


def test_a_promoted_op_takes_the_wider_dtype():
    assert dtype_with(lambda: torch.mm(HALF, X), promote={"mm"}) is FP32


def test_a_promoted_op_of_two_half_precisions_is_in_float32():
    assert dtype_with(lambda: torch.mm(X.half(), HALF), promote={"mm"}) is FP32


def test_a_list_of_tensors_is_cast():
    assert dtype_with(lambda: torch.stack([HALF, HALF]), fp32={"stack"}) is FP32


def test_an_unlisted_op_keeps_the_dtype_of_its_inputs():
    assert dtype_with(lambda: F.mse_loss(HALF, HALF), unlisted={"mse_loss"}) is BF16


def test_ops_inside_an_unlisted_op_follow_torchs_lists():
    def product() -> Tensor:
        return torch.linalg.multi_dot([X, W, X])

    assert dtype_with(product, unlisted={"multi_dot"}, exact=True) is BF16


def test_an_exact_name_moves_its_op_alone():
    assert dtype_with(linear, fp32={"linear"}, exact=True) is FP32
    assert dtype_with(mm, fp32={"linear"}, exact=True) is BF16


def test_a_composite_op_follows_its_name_and_the_names_of_its_parts():
    assert dtype_with(einsum, fp32={"einsum"}, exact=True) is FP32
    assert dtype_with(einsum, fp32={"mm", "bmm"}, exact=True) is FP32


def test_a_composite_op_that_no_list_names_is_in_the_dtype_of_the_region():
    assert dtype_with(einsum, fp32={"erfc"}) is BF16


def test_only_floating_point_outputs_of_a_listed_op_change():
    assert dtype_with(lambda: torch.topk(HALF, 2).values, fp32={"topk"}) is FP32
    assert dtype_with(lambda: torch.topk(HALF, 2).indices, fp32={"topk"}) is torch.int64


def test_float64_inputs_are_not_cast():
    assert dtype_with(lambda: X.double() @ W.double(), fp32={"matmul"}) is FP64
    assert dtype_with(lambda: torch.tanh(X.double()), lower_precision={"tanh"}) is FP64


def test_integers_are_not_cast():
    assert dtype_with(lambda: torch.arange(3).sum(), fp32={"sum"}) is torch.int64


def test_an_in_place_op_keeps_the_dtype_of_its_tensor():
    assert dtype_with(lambda: HALF.clone().tanh_(), fp32={"tanh"}) is BF16


def test_an_op_with_out_keeps_the_dtype_of_out():
    out = torch.empty_like(HALF)
    assert dtype_with(lambda: torch.tanh(HALF, out=out), fp32={"tanh"}) is BF16


def assert_uncast(function: Callable[[], Tensor], dtype: torch.dtype, **lists: Any) -> None:
    """Assert that a call has a dtype in a region with lists, and its result outside of one."""
    with autocast("cpu", ops=OpLists(**lists)):
        result = function()
    assert result.dtype is dtype
    assert torch.equal(result, function()), "the input must not be cast either"


def test_an_argument_dtype_overrides_the_fp32_list():
    assert_uncast(lambda: F.softmax(HALF, -1, dtype=FP64), FP64, fp32={"softmax"})
    assert_uncast(lambda: torch.softmax(X, -1, FP64), FP64, fp32={"softmax"})


def test_an_argument_dtype_overrides_the_lower_precision_list():
    assert_uncast(lambda: X.sum(dtype=FP64), FP64, lower_precision={"sum"})
    assert_uncast(lambda: F.softmax(X, -1, dtype=FP32), FP32, lower_precision={"softmax"})


def test_an_argument_with_the_dtype_of_the_input_overrides_the_fp32_list():
    assert_uncast(lambda: HALF.sum(0, dtype=BF16), BF16, fp32={"sum"})


def l1_loss(x: Tensor, reduction: str) -> Tensor:
    return F.l1_loss(x, TARGET.to(x.dtype), reduction=reduction)


def mse_loss(x: Tensor, reduction: str) -> Tensor:
    return F.mse_loss(x, TARGET.to(x.dtype), reduction=reduction)


def soft_margin_loss(x: Tensor, reduction: str) -> Tensor:
    signs = TARGET.sign().to(x.dtype)
    return F.soft_margin_loss(x, signs, reduction=reduction)


def cross_entropy(x: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(x, torch.arange(4), reduction=reduction)


def nll_loss(x: Tensor, reduction: str) -> Tensor:
    return F.nll_loss(x, torch.arange(4), reduction=reduction)


POLICIES = [("lower_precision", BF16, BF16), ("fp32", FP32, FP32), ("promote", FP32, BF16)]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", [l1_loss, mse_loss, soft_margin_loss, cross_entropy, nll_loss])
@pytest.mark.parametrize(("policy", "dtype_of_float32", "dtype_of_bfloat16"), POLICIES)
def test_a_listed_loss_keeps_its_reduction(
    loss, reduction, policy, dtype_of_float32, dtype_of_bfloat16
):
    """The dispatcher does not pass on the default reduction of a loss, which is the mean."""
    for x, dtype in ((X, dtype_of_float32), (HALF, dtype_of_bfloat16)):
        if policy == "promote" and loss.__name__.endswith("loss"):
            # The target has the dtype of the input, so there is nothing to promote.
            dtype = x.dtype
        with autocast("cpu", ops=OpLists(**{policy: {loss.__name__}})):
            result = loss(x, reduction)
        torch.testing.assert_close(result, loss(x.to(dtype), reduction))


def mul(x: Tensor) -> Tensor:
    return 2 * x * 2


def add(x: Tensor) -> Tensor:
    return x + 1.5


def rsub(x: Tensor) -> Tensor:
    return 1 - x


def div(x: Tensor) -> Tensor:
    return x / 3


def floor_divide(x: Tensor) -> Tensor:
    return x // 2


def xlogy(x: Tensor) -> Tensor:
    return torch.xlogy(2.0, x.abs())


@pytest.mark.parametrize("function", [mul, add, rsub, div, floor_divide, xlogy])
@pytest.mark.parametrize(("policy", "dtype_of_float32", "dtype_of_bfloat16"), POLICIES)
def test_a_listed_op_takes_a_number_for_a_tensor(
    function, policy, dtype_of_float32, dtype_of_bfloat16
):
    for x, dtype in ((X, dtype_of_float32), (HALF, dtype_of_bfloat16)):
        with autocast("cpu", ops=OpLists(**{policy: {function.__name__}})):
            result = function(x)
        torch.testing.assert_close(result, function(x.to(dtype)))


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=(pytest.mark.gpu, NO_GPU))])
def test_fp32_gradients_equal_those_with_autocast_off(device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
    model.to(device)

    def gradients(ops: OpLists | None, enabled: bool) -> tuple[Tensor, ...]:
        with autocast(device, enabled=enabled, ops=ops):
            loss = model(X.to(device)).float().square().sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    without_autocast = gradients(None, False)
    with_lists = gradients(OpLists(fp32={"linear"}), True)
    with_autocast = gradients(None, True)
    assert all(map(torch.equal, without_autocast, with_lists))
    assert not all(map(torch.equal, without_autocast, with_autocast))


def test_the_lower_precision_is_the_dtype_of_the_innermost_region():
    with autocast("cpu", FP16, ops=OpLists(lower_precision={"tanh"})):
        assert torch.tanh(X).dtype is FP16
        with torch.autocast("cpu", dtype=BF16):
            assert torch.tanh(X).dtype is BF16
        assert torch.tanh(X).dtype is FP16


def test_lists_do_nothing_in_a_disabled_region_inside():
    with autocast("cpu", FP16, ops=OpLists(lower_precision={"tanh"}, fp32={"exp"})):
        with torch.autocast("cpu", enabled=False):
            assert torch.tanh(X).dtype is FP32
            assert torch.exp(HALF).dtype is BF16
        assert torch.tanh(X).dtype is FP16


def test_inner_lists_replace_outer_lists():
    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        with autocast("cpu", ops=OpLists(fp32={"softmax"}, unlisted={"mse_loss"})):
            assert dtypes() == (BF16, FP32, BF16)
        assert dtypes() == (FP32, BF16, FP32)
    assert AutocastState.capture().lists == ()


def test_a_region_without_lists_inherits_the_lists_around_it():
    with autocast("cpu", ops=OpLists(fp32={"softmax"})), autocast("cpu"):
        assert dtypes() == (BF16, FP32, FP32)


def test_empty_lists_restore_torchs_lists():
    with autocast("cpu", ops=OpLists(fp32={"softmax"})):
        with autocast("cpu", ops=OpLists()):
            assert dtypes() == PLAIN
        assert dtypes() == (BF16, FP32, FP32)


def test_errors_inside_leave_the_lists_of_the_region():
    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        with pytest.raises(KeyError), autocast("cpu", ops=OpLists(fp32={"softmax"})):
            raise KeyError
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(X, torch.randn(3, 3))
        assert dtypes() == (FP32, BF16, FP32)


def test_lists_of_another_device_type_leave_the_lists_of_the_region():
    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        with autocast("cuda", enabled=False, ops=OpLists(fp32={"relu"})):
            assert dtypes() == (FP32, BF16, FP32)
        assert dtypes() == (FP32, BF16, FP32)


def test_a_region_after_one_with_lists_follows_torchs_lists():
    lists = OpLists(fp32={"mm"}, unlisted={"mse_loss"})
    with autocast("cpu", ops=lists):
        assert dtypes() == (FP32, BF16, BF16)
    with autocast("cpu", cache_enabled=False):
        assert dtypes() == PLAIN
        assert not torch.is_autocast_cache_enabled()


class RecordDtypes(torch.autograd.Function):
    """An identity that records the dtypes of ops in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorded: set[Any]) -> Tensor:
        ctx.recorded = recorded
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.recorded.add(dtypes())
        return grad, None


def test_a_thread_and_its_backward_pass_follow_the_lists_of_the_thread():
    barrier = threading.Barrier(3)

    def work(lists: OpLists | None) -> set[Any]:
        recorded: set[Any] = set()
        with autocast("cpu", ops=lists):
            barrier.wait()
            for _ in range(100):
                recorded.add(dtypes())
                x = X.clone().requires_grad_()
                RecordDtypes.apply(x, recorded).sum().backward()
        return recorded

    lists_by_thread = [OpLists(fp32={"mm"}), OpLists(fp32={"softmax"}), None]
    with ThreadPoolExecutor(3) as pool:
        fp32_mm, fp32_softmax, plain = pool.map(work, lists_by_thread)
    assert fp32_mm == {(FP32, BF16, FP32)}
    assert fp32_softmax == {(BF16, FP32, FP32)}
    assert plain == {PLAIN}


def test_a_custom_op_can_be_listed_once_its_library_is_there():
    listed = {"lower_precision": {"distamp_test::double"}}
    with pytest.raises(ValueError, match="distamp_test::double"):
        OpLists(**listed)
    with torch.library._scoped_library("distamp_test", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x + x, "CompositeExplicitAutograd")
        with autocast("cpu", ops=OpLists(**listed)):
            assert torch.ops.distamp_test.double(X).dtype is BF16
        with autocast("cpu"):
            assert torch.ops.distamp_test.double(X).dtype is FP32


def test_lists_can_be_merged_and_the_right_operand_wins():
    merged = OpLists.of_torch("cuda") | OpLists(fp32={"linear"}, promote={"exp"})
    policies = merged.by_op()
    assert policies["mm"] is CastPolicy.FP32
    assert policies["addmm"] is CastPolicy.FP32
    assert policies["exp"] is CastPolicy.PROMOTE
    assert policies["conv2d"] is CastPolicy.LOWER_PRECISION
    assert merged | merged == merged


def test_only_lists_can_be_merged():
    merged = OpLists(fp32={"linear"})
    with pytest.raises(TypeError):
        merged | {"linear"}  # type: ignore[operator]


@on_ranks(1)
def test_lists_hold_for_an_op_that_gets_a_kernel_for_autocast_later():
    library = torch.library.Library("late_kernels", "DEF")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x * 1, "CompositeExplicitAutograd")
    op: Any = torch.ops.late_kernels.op
    lists = OpLists(fp32={"late_kernels::op"})
    with autocast("cpu", ops=lists):
        assert op(HALF).dtype is FP32
    with warnings.catch_warnings(action="ignore"):
        library.impl("op", lambda x: x.half(), "AutocastCPU", allow_override=True)
    with autocast("cpu", ops=lists):
        assert op(HALF).dtype is FP32
    with autocast("cpu"):
        assert op(HALF).dtype is FP16


# -- with an out-of-tree accelerator --------------------------------------------------------------

# A backend with all that autocast needs: a name, a module, and kernels at its autocast key.
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
"""


def run_program(text: str) -> bool:
    exec(text, {})
    return True


@pytest.mark.slow
def test_lists_work_in_a_process_with_another_backend(new_ranks):
    process = new_ranks(1)
    assert process.run(run_program, BACKEND + PROGRAM, group="none") == [True]
