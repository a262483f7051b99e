"""Masters and ``zero_grad(set_to_none=False)``: an unused layer moves as in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp import cast_model, initialize
from distamp.scaler import MasterParameters
from tests.scaler.masters import ByHand, half_mlp, local, spread

BF16 = torch.bfloat16
SPLIT = pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
}


def _loss(model: Any, batch: int, skip_last: bool) -> Tensor:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(batch)).to(BF16)
    hidden = model[2](model[1](model[0](inputs)))
    return (hidden if skip_last else model[3](hidden)).float().square().mean()


def _train(name: str, split: bool, set_to_none: bool, layout: str = "") -> None:
    """Leave the last layer out from the third step on, beside a loop by hand over zeros."""
    make = OPTIMIZERS[name]
    rank = dist.get_rank() if layout else 0
    models = [half_mlp(dtype=BF16) for _ in range(2)]
    for model in models:
        for layer in model if layout else ():
            spread(layer, layout)
    optimizer = make(list(models[0].parameters()))
    hand = ByHand(models[1].parameters(), make, split)
    MasterParameters(optimizer, split=split)
    before = None
    for step in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        models[1].zero_grad(set_to_none=set_to_none)
        for model in models:
            _loss(model, 10 * step + rank, skip_last=step >= 2).backward()
        optimizer.step()
        hand.unscale(1.0)
        hand.step()
        if step == 1:
            before = local(models[0][3].weight.detach()).clone()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(local(ours), local(theirs))
    assert torch.equal(local(models[0][3].weight), before) is set_to_none


@SPLIT
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_layer_that_is_not_used_moves_as_without_masters(name, split, set_to_none):
    _train(name, split, set_to_none)


@SPLIT
def test_a_sharded_layer_that_is_not_used_moves_as_without_masters(ranks2, split):
    ranks2.run(_train, "SGD", split, False, "FSDP2")


def test_amp_keeps_zeros_as_well_and_none_clears_them():
    model = cast_model(nn.Linear(2, 2), "bf16-O2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = initialize(model, optimizer, "bf16-O2")
    assert model.weight.grad is None
    amp.zero_grad(set_to_none=False)
    assert model.weight.grad is None, "as in torch, there is no gradient to keep"
    amp.backward(amp.model(torch.ones(1, 2)).sum())
    amp.step()
    amp.zero_grad(set_to_none=False)
    assert model.weight.grad.tolist() == [[0.0] * 2] * 2
    amp.zero_grad()
    amp.zero_grad(set_to_none=False)
    assert model.weight.grad is None
