"""Ops that take functions, inside a region with lists: what they contain follows the lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from distamp import OpLists, autocast

BF16, FP32 = torch.bfloat16, torch.float32
LISTS = OpLists(fp32={"matmul"})
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 1e6, lambda x: x @ x, lambda x: (x @ x).sin(), (x,))


def loop(x: Tensor) -> Tensor:
    def more(count: Tensor, x: Tensor) -> Tensor:
        return count < 2

    def step(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, (x @ x).float()

    return while_loop(more, step, (torch.tensor(0), x))[1]


def scanned(x: Tensor) -> Tensor:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return (carry @ x).float() + row, carry.clone()

    return scan(step, torch.zeros(4), x)[0]


def compiled(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.compile(fn, backend="aot_eager", fullgraph=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize(
    ("fn", "lists"),
    [(branches, LISTS), (loop, LISTS), (scanned, LISTS)],
)
def test_what_a_function_contains_follows_the_lists(fn: Any, lists: OpLists, how: str) -> None:
    run = fn if how == "eager" else compiled(fn)
    with autocast("cpu", enabled=False):
        want = fn(X)
    with autocast("cpu", ops=lists):
        got = run(X)
    # In fp32 to the last bits; in bf16 it would differ by about one part in a hundred.
    torch.testing.assert_close(got.float(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_a_branch_follow_the_lists() -> None:
    grads = []
    for region in (autocast("cpu", enabled=False), autocast("cpu", ops=LISTS)):
        x = X.clone().requires_grad_()
        with region:
            branches(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)
