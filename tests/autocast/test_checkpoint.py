"""Activation checkpointing: recomputation in the whole state of the forward pass, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from distamp import OpLists, autocast, checkpoint, checkpoint_contexts
from tests.ranks import RankPool

LISTS = OpLists(fp32={"linear"}, lower_precision={"softmax"})
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def block() -> nn.Sequential:
    torch.manual_seed(0)
    # A sum saves nothing: were it recomputed in another dtype, torch's check would not see it.
    return nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8), nn.Tanh())


def gradients(run: Callable[..., Tensor], model: nn.Module) -> list[Any]:
    model.zero_grad()
    x = X.clone().requires_grad_()
    with autocast("cpu", ops=LISTS):
        out = run(model, x)
    out.float().square().sum().backward()
    return [x.grad, *(each.grad for each in model.parameters())]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_are_bit_for_bit_those_without_checkpointing(use_reentrant: bool) -> None:
    model = block()
    want = gradients(lambda model, x: model(x), model)
    got = gradients(lambda model, x: checkpoint(model, x, use_reentrant=use_reentrant), model)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_torchs_own_with_our_contexts_carries_the_lists() -> None:
    model = block()

    def run(model: nn.Module, x: Tensor) -> Tensor:
        return torchs.checkpoint(model, x, use_reentrant=False, context_fn=checkpoint_contexts)

    want = gradients(lambda model, x: model(x), model)
    assert all(torch.equal(a, b) for a, b in zip(gradients(run, model), want, strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_region_inside_the_checkpointed_function_is_entered_again(use_reentrant: bool) -> None:
    model = block()
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))

    def forward(x: Tensor) -> Tensor:
        with autocast("cpu", ops=LISTS):
            return model(x).float()

    x = X.clone().requires_grad_()
    torchs.checkpoint(forward, x, use_reentrant=use_reentrant).sum().backward()
    assert seen == [torch.float32] * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_nest(use_reentrant: bool) -> None:
    model = block()

    def inner(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=use_reentrant)

    def run(_: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(inner, x, use_reentrant=use_reentrant)

    want = gradients(lambda model, x: model(x), model)
    assert all(torch.equal(a, b) for a, b in zip(gradients(run, model), want, strict=True))


def test_arguments_are_torchs() -> None:
    def fn(x: Tensor, *, scale: float) -> Tensor:
        return (x @ x.t()).float() * scale

    x = X.clone().requires_grad_()
    out = checkpoint(fn, x, use_reentrant=False, preserve_rng_state=False, scale=2.0)
    assert torch.equal(out, fn(X, scale=2.0))


def _sum_of_weights(use_reentrant: bool | None) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(2)))
    for each in (*model, model):
        fully_shard(each)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        with autocast("cpu", ops=LISTS):
            out = X.clone().requires_grad_()
            for each in model:
                if use_reentrant is None:
                    out = each(out)
                else:
                    out = checkpoint(each, out, use_reentrant=use_reentrant)
        out.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(each.full_tensor().detach().double().sum().item() for each in model.parameters())  # type: ignore[attr-defined]


def test_fsdp2_trains_to_the_same_weights(ranks2: RankPool) -> None:
    plain, *checkpointed = [ranks2.run(_sum_of_weights, kind) for kind in (None, True, False)]
    assert checkpointed == [plain, plain]
