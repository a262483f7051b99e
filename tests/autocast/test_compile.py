"""Regions, op lists and states in compiled, exported, traced and transformed functions."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from distamp import autocast
from distamp.autocast import AutocastState, OpLists
from distamp.errors import ConfigError

SLOW = pytest.mark.slow
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),
]
BF16, FP32 = torch.bfloat16, torch.float32
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
LISTS = OpLists(fp32={"matmul", "linear"}, lower_precision={"layer_norm"})


class Subclass(autocast):
    """A subclass, as frameworks have one."""


class Regions(nn.Module):
    """Products in a region of ``forward``, in a region of ``__init__``, and outside."""

    def __init__(self, region_class: Any, **options: Any) -> None:
        super().__init__()
        self.new_region = lambda: region_class("cpu", **options)
        self.region = region_class("cpu", **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with self.new_region():
            in_new_region = x @ x
        with self.region:
            in_region = x @ x
        return in_new_region, in_region, x @ x


def compile_whole(module: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(module, backend="aot_eager", fullgraph=True)


def export(module: nn.Module) -> Callable[..., Any]:
    return torch.export.export(module, (X,)).module()


def export_strictly(module: nn.Module) -> Callable[..., Any]:
    return torch.export.export(module, (X,), strict=True).module()


def trace(module: nn.Module) -> Callable[..., Any]:
    return torch.jit.trace(module, X)  # type: ignore[no-any-return]


SLOW_TRANSFORM = pytest.param(compile_whole, marks=SLOW)


@pytest.mark.parametrize("transform", [SLOW_TRANSFORM, export, export_strictly, trace])
def test_regions_are_part_of_the_graph(transform):
    if torch.__version__ < "2.12" and transform in (compile_whole, export_strictly):
        pytest.skip("torch 2.11 breaks the graph where a subclass of its region is made")
    in_new_region, in_region, outside = transform(Regions(autocast))(X)
    assert in_new_region.dtype is BF16
    assert in_region.dtype is BF16
    assert outside.dtype is FP32


def test_a_region_goes_on_after_a_graph_break():
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        with autocast("cpu"):
            first = x @ x
            torch._dynamo.graph_break()
            second = x @ x
        return first, second, x @ x

    first, second, outside = torch.compile(fn, backend="eager")(X)
    assert first.dtype is BF16
    assert second.dtype is BF16
    assert outside.dtype is FP32


def apply_state(x: Tensor) -> Tensor:
    with STATE.apply():
        return x @ x


with autocast("cpu", ops=LISTS):
    STATE = AutocastState.capture()
    PROPAGATED = AutocastState.wrap(lambda x: x @ x)
#: Functions that change the op lists of the thread while they run.
LIST_USERS = [
    pytest.param(Regions(autocast, ops=LISTS), id="regions with lists"),
    pytest.param(Regions(Subclass, ops=LISTS), id="a subclass"),
    pytest.param(apply_state, id="a state"),
    pytest.param(PROPAGATED, id="a propagated function", marks=SLOW),
]


@pytest.mark.parametrize("function", LIST_USERS)
def test_a_change_of_lists_in_a_compiled_function_breaks_its_graph(function):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Guards may run slower")
        out = torch.compile(function, backend="eager")(X)
    products = [out] if isinstance(out, Tensor) else out[:2]
    for product in products:
        assert product.dtype is FP32


@pytest.mark.parametrize("function", LIST_USERS)
def test_a_change_of_lists_in_a_whole_graph_is_refused(function):
    with pytest.raises(torch._dynamo.exc.Unsupported, match="around the call"):
        torch.compile(function, backend="eager", fullgraph=True)(X)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(F.linear(x, weight), (4,))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SLOW)])
def test_a_change_of_lists_never_runs_a_stale_graph(backend):
    compiled = torch.compile(normed, backend=backend, fullgraph=True)
    lists = (None, OpLists(fp32={"linear"}), LISTS, OpLists(fp32={"layer_norm"}))
    # Inductor would leave out the rounding to bfloat16 between fused ops.
    with torch._inductor.config.patch(emulate_precision_casts=True):
        for ops in lists * 2:
            outcomes = []
            for run in (compiled, normed):
                weight = X.clone().requires_grad_()
                with autocast("cpu", ops=ops):
                    out = run(X, weight)
                out[:, 0].float().sum().backward()
                outcomes.append((out, weight.grad))
            torch.testing.assert_close(*outcomes)


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 1e6, lambda x: x @ x, lambda x: (x @ x).sin(), (x,))


def batched_linear(x: Tensor) -> Tensor:
    return torch.vmap(F.linear, (0, None))(x, x)


def gradient_of_linear(x: Tensor) -> Tensor:
    return torch.func.grad(lambda weight: F.linear(x, weight).sum())(x)  # type: ignore[no-any-return]


def gradient_of_branches(x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(branches(leaf).sum(), leaf)
    return grad


@pytest.mark.parametrize(
    ("function", "compiled"),
    [
        pytest.param(branches, False, id="cond", marks=SLOW),
        pytest.param(batched_linear, False, id="vmap"),
        pytest.param(gradient_of_linear, False, id="grad"),
        pytest.param(gradient_of_branches, False, id="gradient of cond", marks=SLOW),
        pytest.param(branches, True, id="compiled cond", marks=SLOW),
    ],
)
def test_functions_inside_torchs_transforms_follow_the_lists(function, compiled):
    with autocast("cpu", enabled=False):
        expected = function(X)
    call = compile_whole(function) if compiled else function
    with autocast("cpu", ops=LISTS):
        out = call(X)
    # A result in bf16 would differ by about one part in a hundred.
    torch.testing.assert_close(out.float(), expected, rtol=1e-5, atol=1e-5)


def test_an_export_that_would_drop_the_lists_of_a_region_is_refused():
    with pytest.raises(ConfigError, match="no place for op lists"):
        torch.export.export(Regions(autocast, ops=LISTS), (X,))
