"""OpLists: which op runs in which precision, in one region of one thread."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distamp import autocast
from distamp.autocast import AutocastState, OpLists
from distamp.autocast.op_names import FAMILIES, overloads
from tests.ranks import RankPool

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
SEED = torch.Generator().manual_seed(0)
X, W, B = (torch.randn(shape, generator=SEED) for shape in ((4, 4), (4, 4), (4,)))

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
    "nn.Linear": lambda: torch.nn.Linear(4, 4)(X),
}


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    assert AutocastState.capture().lists == ()
    yield
    assert AutocastState.capture().lists == ()


def dtypes(calls: dict[str, Callable[[], Tensor]]) -> dict[str, torch.dtype]:
    return {name: call().dtype for name, call in calls.items()}


@pytest.mark.parametrize("name", ["mm", "linear", "matmul", "aten::mm", "torch.matmul"])
def test_a_name_moves_its_whole_family(name: str) -> None:
    with autocast("cpu", ops=OpLists(fp32={name})):
        assert set(dtypes(MATMULS).values()) == {FP32}
        assert F.conv2d(X[None, None], W[None, None]).dtype is BF16


def test_exact_moves_one_op_alone() -> None:
    with autocast("cpu"):
        plain = dtypes(MATMULS)
    with autocast("cpu", ops=OpLists(fp32={"linear"}, exact=True)):
        moved = dtypes(MATMULS)
    assert plain["linear"] is plain["mm"] is BF16
    assert moved == plain | {"linear": FP32, "nn.Linear": FP32}


def test_every_family_holds_ops_of_this_torch() -> None:
    for family in FAMILIES:
        assert sum(bool(overloads(op)) for op in family) >= 2, family
    assert len({op for family in FAMILIES for op in family}) == sum(map(len, FAMILIES))


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "torch.nn.functional.linear",
        "F.linear",
        "aten::linear",
        "aten::linear.default",
        F.linear,
        torch.ops.aten.linear,
        torch.ops.aten.linear.default,
    ],
    ids=str,
)
def test_names_of_one_op(name: object) -> None:
    assert OpLists(fp32=[name]) == OpLists(fp32={"linear"})


def test_namespaced_and_python_only_names() -> None:
    given = OpLists(fp32=["torch.linalg.norm", "torch.fft.fft", "cross_entropy", "__rpow__"])
    assert given.fp32 == {"linalg_norm", "fft_fft", "cross_entropy_loss", "pow"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lineer", "no op is called 'lineer'; did you mean 'linear'"),
        ("add_", "works in place.*name 'add'"),
        ("mm.out", "out="),
        ("zeros", "autocast cannot change 'zeros'"),
        ("transpose", "autocast cannot change 'transpose'"),
        ("to", "autocast cannot change 'to'"),
        ("mylib::nothing", "no op is called"),
    ],
)
def test_unknown_and_ineligible_names_raise(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpLists(fp32={name})


def test_an_op_that_was_unknown_is_found_once_a_library_defines_it() -> None:
    with pytest.raises(ValueError, match="no op is called"):
        OpLists(fp32={"mylater::doubled"})
    library = torch.library.Library("mylater", "DEF")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
    with autocast("cpu", ops=OpLists(fp32={"mylater::doubled"})):
        assert torch.ops.mylater.doubled(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.float32


def test_argument_mistakes() -> None:
    with pytest.raises(TypeError, match=r"got the string 'linear'; write \{'linear'\}"):
        OpLists(fp32="linear")
    with pytest.raises(TypeError, match="got 3"):
        OpLists(fp32=[3])
    with pytest.raises(ValueError, match=r"one family.*exact=True"):
        OpLists(fp32={"linear"}, lower_precision={"bmm"})
    with pytest.raises(TypeError, match="ops must be an OpLists"):
        autocast("cpu", ops={"linear"})  # type: ignore[arg-type]


def test_a_value_like_any_other() -> None:
    one, same = OpLists(fp32={"mm", "softmax"}), OpLists(fp32=["softmax", "mm"])
    assert one == same
    assert hash(one) == hash(same)
    assert one != OpLists(fp32={"mm", "softmax"}, exact=True)
    assert repr(one) == "OpLists(fp32=['mm', 'softmax'])"


def test_lists_survive_pickle_and_copy() -> None:
    for lists in (OpLists(fp32={"mm"}, exact=True), OpLists.of_torch("cuda")):
        assert pickle.loads(pickle.dumps(lists)) == copy.deepcopy(lists) == lists


def test_lower_precision_and_its_gradient() -> None:
    x = torch.randn(3, requires_grad=True)
    with autocast("cpu", ops=OpLists(lower_precision={"tanh"})):
        y = torch.tanh(x)
    assert y.dtype is BF16
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is FP32
    reference = 1 - torch.tanh(x.detach().double()) ** 2
    torch.testing.assert_close(x.grad.double(), reference, atol=2e-2, rtol=2e-2)


def test_fp32_gradients_equal_those_with_autocast_off() -> None:
    def grads(region: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        with region:
            loss = model(torch.randn(4, 8)).square().sum()
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    off = grads(autocast("cpu", enabled=False))
    pinned = grads(autocast("cpu", ops=OpLists(fp32={"linear"})))
    plain = grads(autocast("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(off, pinned, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(off, plain, strict=True))


def test_promote_takes_the_widest_of_its_inputs() -> None:
    half, full = torch.randn(3, 3).bfloat16(), torch.randn(3, 3)
    with autocast("cpu", ops=OpLists(promote={"mm"})):
        assert torch.mm(half, half).dtype is BF16
        assert torch.mm(half, full).dtype is FP32
        assert torch.mm(half.half(), half).dtype is FP32
    with autocast("cpu"):
        assert torch.mm(half, full).dtype is BF16


def test_unlisted_runs_in_the_dtype_of_its_inputs() -> None:
    with autocast("cpu", ops=OpLists(unlisted={"mse_loss"})):
        assert F.mse_loss(X.bfloat16(), W.bfloat16()).dtype is BF16
    with autocast("cpu"):
        assert F.mse_loss(X.bfloat16(), W.bfloat16()).dtype is FP32


def test_ops_inside_an_unlisted_op_keep_their_own_lists() -> None:
    with autocast("cpu", ops=OpLists(unlisted={"multi_dot"}, exact=True)):
        assert torch.linalg.multi_dot([X, W, X]).dtype is BF16


def test_float64_and_integers_are_left_alone() -> None:
    lists = OpLists(fp32={"matmul", "sum"}, lower_precision={"tanh", "gelu"})
    with autocast("cpu", ops=lists):
        assert (X.double() @ W.double()).dtype is FP64
        assert torch.tanh(X.double()).dtype is FP64
        assert F.gelu(X.double()).dtype is FP64
        assert torch.sum(torch.arange(3)).dtype is torch.int64
        assert (torch.arange(4).view(2, 2) @ torch.arange(4).view(2, 2)).dtype is torch.int64


def test_in_place_and_out_are_left_alone() -> None:
    half = X.bfloat16()
    with autocast("cpu", ops=OpLists(fp32={"tanh", "addmm"})):
        assert half.clone().tanh_().dtype is BF16
        assert torch.tanh(half, out=torch.empty_like(half)).dtype is BF16
        assert torch.tanh(half).dtype is FP32
        with pytest.raises(RuntimeError):
            half.clone().addmm_(X, W)


@pytest.mark.parametrize("category", ["fp32", "lower_precision"])
def test_an_explicit_dtype_is_respected(category: str) -> None:
    lists = OpLists(**{category: {"softmax", "sum"}})  # type: ignore[arg-type]
    with autocast("cpu", ops=lists):
        assert F.softmax(X.bfloat16(), -1, dtype=FP64).dtype is FP64
        assert torch.softmax(X, -1, FP64).dtype is FP64
        assert torch.sum(X, dtype=FP64).dtype is FP64
        assert torch.sum(X.bfloat16(), 0, dtype=BF16).dtype is BF16
        assert F.softmax(X.bfloat16(), -1).dtype is (FP32 if category == "fp32" else BF16)


def test_keyword_arguments_and_defaults_arrive() -> None:
    conv_input, kernel, bias = torch.randn(1, 2, 5, 5), torch.randn(2, 1, 3, 3), torch.randn(2)
    calls = [
        lambda: F.conv2d(conv_input, kernel, bias, stride=2, padding=1, groups=2),
        lambda: F.conv2d(conv_input, kernel, padding="same", groups=2),
        lambda: torch.addmm(X, X, W, beta=0.5, alpha=2),
        lambda: F.layer_norm(X, (4,), bias=B, weight=None, eps=0.1),
        lambda: F.gelu(X, approximate="tanh"),
        lambda: torch.sum(X, (0, 1), keepdim=True),
        lambda: torch.stack([X, W], dim=1),
        lambda: torch.var(X, dim=1, correction=0),
        lambda: F.scaled_dot_product_attention(X[None], X[None], X[None], is_causal=True),
    ]
    lists = OpLists(
        fp32={"conv2d", "addmm", "layer_norm", "gelu", "sum", "stack", "var", "attention"}
    )
    for call in calls:
        with autocast("cpu", ops=lists):
            assert torch.equal(call(), call_off(call))


def call_off(call: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return call()


def test_several_outputs() -> None:
    with autocast("cpu", ops=OpLists(fp32={"topk", "svd"})):
        values, indices = torch.topk(X.bfloat16(), 2)
        assert values.dtype is FP32
        assert indices.dtype is torch.int64
        assert torch.svd(X.bfloat16()).S.dtype is FP32


def test_inside_a_disabled_region_nothing_is_cast() -> None:
    with autocast("cpu", ops=OpLists(lower_precision={"tanh"}, fp32={"exp"})):
        with torch.autocast("cpu", enabled=False):
            assert torch.tanh(X).dtype is FP32
            assert torch.exp(X.bfloat16()).dtype is BF16
            assert (X @ W).dtype is FP32
        assert torch.tanh(X).dtype is BF16


def test_the_regions_dtype_is_the_lower_precision() -> None:
    with autocast("cpu", dtype=torch.float16, ops=OpLists(lower_precision={"tanh"})):
        assert torch.tanh(X).dtype is torch.float16
        with torch.autocast("cpu", dtype=BF16):
            assert torch.tanh(X).dtype is BF16


def test_an_inner_regions_lists_take_the_place_of_the_outer_ones() -> None:
    calls = {"mm": lambda: torch.mm(X, W), "softmax": lambda: F.softmax(X.bfloat16(), -1)}
    outer, inner = OpLists(fp32={"mm"}), OpLists(fp32={"softmax"})
    with autocast("cpu", ops=outer):
        assert dtypes(calls) == {"mm": FP32, "softmax": BF16}
        with autocast("cpu", ops=inner):
            assert dtypes(calls) == {"mm": BF16, "softmax": FP32}
            with autocast("cpu"):
                assert dtypes(calls) == {"mm": BF16, "softmax": FP32}
            with autocast("cpu", ops=OpLists()):
                assert dtypes(calls) == {"mm": BF16, "softmax": BF16}
        assert dtypes(calls) == {"mm": FP32, "softmax": BF16}
    with autocast("cpu"):
        assert dtypes(calls) == {"mm": BF16, "softmax": BF16}


def test_lists_end_with_the_region_when_it_raises() -> None:
    with pytest.raises(KeyError), autocast("cpu", ops=OpLists(fp32={"mm"})):
        raise KeyError
    with autocast("cpu"):
        assert (X @ W).dtype is BF16


def test_an_error_inside_a_listed_op_leaves_the_lists_as_they_were() -> None:
    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(X, torch.randn(3, 3))
        assert dtypes(MATMULS)["mm"] is FP32
    assert (X @ W).dtype is FP32


def test_ops_that_only_other_lists_name_run_as_torch_has_them() -> None:
    with autocast("cpu", ops=OpLists(fp32={"mm", "softmax"}, unlisted={"mse_loss"})):
        pass
    with autocast("cpu"):
        plain = dtypes(MATMULS)
    with autocast("cpu", ops=OpLists(fp32={"erfc"})):
        assert dtypes(MATMULS) == plain
        assert F.softmax(X.bfloat16(), -1).dtype is BF16
        assert F.mse_loss(X.bfloat16(), X.bfloat16()).dtype is FP32


def test_a_composite_op_that_only_other_lists_name_hands_on_to_ours() -> None:
    with autocast("cpu", ops=OpLists(lower_precision={"einsum"}, exact=True)):
        pass
    with autocast("cpu", ops=OpLists(fp32={"mm", "bmm"}, exact=True)):
        assert torch.einsum("ij,jk->ik", X, W).dtype is FP32
    with autocast("cpu", ops=OpLists(fp32={"erfc"})):
        assert torch.einsum("ij,jk->ik", X, W).dtype is BF16


def test_threads_follow_their_own_lists() -> None:
    lists = [OpLists(fp32={"mm"}), OpLists(lower_precision={"tanh"}), None]
    want = [(FP32, FP32), (BF16, BF16), (BF16, FP32)]
    seen: list[set[tuple[torch.dtype, torch.dtype]]] = [set(), set(), set()]
    barrier = threading.Barrier(3)

    def work(i: int) -> None:
        with autocast("cpu", ops=lists[i]):
            barrier.wait()
            for _ in range(200):
                seen[i].add(((X @ W).dtype, torch.tanh(X).dtype))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [{pair} for pair in want]


def _two_threads_under_a_mode() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with autocast("cpu", ops=OpLists(fp32={"addmm", "linear"})):
        F.linear(X, W, B)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(20)))

    def work() -> None:
        for _ in range(50):
            with Mode(), torch.autocast("cpu", dtype=BF16):
                model(X)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_under_a_dispatch_mode_do_not_wait_for_each_other(ranks1: RankPool) -> None:
    """torch casts weights under a lock, and the mode takes the GIL there."""
    ranks1.run(_two_threads_under_a_mode, timeout=40)


def test_backward_inside_the_region_follows_the_lists() -> None:
    """Autograd's formulas call listed ops too, in whatever thread they run."""
    x, w = X.bfloat16().requires_grad_(), W.bfloat16().requires_grad_()
    seen: list[torch.dtype] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            return a.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(torch.mm(grad, grad).dtype)
            return grad

    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        Watch.apply(torch.mm(x, w)).sum().backward()
    assert seen == [FP32]


def test_a_custom_op_can_be_listed() -> None:
    with torch.library._scoped_library("distamp_test", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x + x, "CompositeExplicitAutograd")
        op = torch.ops.distamp_test.double
        with autocast("cpu", ops=OpLists(lower_precision={"distamp_test::double"})):
            assert op(X).dtype is BF16
        with autocast("cpu"):
            assert op(X).dtype is FP32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_lists_on_a_gpu() -> None:
    x = torch.randn(4, 4, device="cuda")
    weight = torch.randn(4, 4, device="cuda", requires_grad=True)
    seen: list[torch.dtype] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            return a.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(torch.mm(grad.half(), grad.half()).dtype)  # In autograd's own thread.
            return grad

    with autocast("cuda", ops=OpLists(fp32={"mm"}, lower_precision={"softmax"})):
        y = Watch.apply(F.linear(x, weight))
        assert y.dtype is FP32
        assert F.softmax(y, -1).dtype is torch.float16
        y.sum().backward()
    assert seen == [FP32]
    assert F.linear(x, weight).dtype is FP32
    with torch.autocast("cuda"):
        assert F.linear(x, weight).dtype is torch.float16


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "x * 2": lambda x: x * 2,
    "2 * x": lambda x: 2 * x,
    "x + 1.5": lambda x: x + 1.5,
    "1 - x": lambda x: 1 - x,
    "x / 3": lambda x: x / 3,
    "x // 2": lambda x: x // 2,
    "xlogy": lambda x: torch.xlogy(2.0, x),
    "sparse": lambda x: (x.to_sparse() * 2).to_dense(),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    ("category", "of_fp32", "of_bf16"),
    [("lower_precision", BF16, BF16), ("fp32", FP32, FP32), ("promote", FP32, BF16)],
)
def test_an_op_with_a_number_for_a_tensor(
    name: str, category: str, of_fp32: torch.dtype, of_bf16: torch.dtype
) -> None:
    listed = {"mul", "add", "sub", "rsub", "div", "floor_divide", "xlogy"}
    compute, x = NUMBERS[name], torch.tensor([1.0, 2.0])
    with autocast("cpu", ops=OpLists(**{category: listed})):  # type: ignore[arg-type]
        got = compute(x), compute(x.bfloat16())
    for result, dtype in zip(got, (of_fp32, of_bf16), strict=True):
        assert result.dtype is dtype
        assert torch.equal(result, compute(x.to(dtype)))


LOSSES: dict[str, Callable[..., Tensor]] = {
    "l1_loss": lambda x, y, r: F.l1_loss(x, y, reduction=r),
    "mse_loss": lambda x, y, r: F.mse_loss(x, y, reduction=r),
    "soft_margin_loss": lambda x, y, r: F.soft_margin_loss(x, y.sign(), reduction=r),
    "triplet_margin_loss": lambda x, y, r: F.triplet_margin_loss(x, y, y.flip(0), reduction=r),
    "binary_cross_entropy_with_logits": lambda x, y, r: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), reduction=r
    ),
    "cross_entropy": lambda x, y, r: F.cross_entropy(x, torch.arange(4), reduction=r),
    "nll_loss": lambda x, y, r: F.nll_loss(x, torch.arange(4), reduction=r),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_listed_loss_keeps_its_reduction(name: str, reduction: str) -> None:
    """The mean is the op's default, which the dispatcher does not hand on."""
    for category, dtype in (("lower_precision", BF16), ("promote", FP32)):
        with autocast("cpu", ops=OpLists(**{category: {name}})):  # type: ignore[arg-type]
            got = LOSSES[name](X, W, reduction)
        want = LOSSES[name](X.to(dtype), W.to(dtype), reduction)
        assert got.dtype is dtype
        torch.testing.assert_close(got, want)


def test_pooling_that_gives_indices_is_of_one_family_with_pooling() -> None:
    image = X[None, None]
    with autocast("cpu", ops=OpLists(lower_precision={"max_pool2d"})):
        for indices in (False, True):
            out = F.max_pool2d(image, 2, return_indices=indices)
            assert (out[0] if indices else out).dtype is BF16
