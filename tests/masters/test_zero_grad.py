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
    generator = torch.Generator().manual_seed(batch)
    inputs = torch.randn(4, 8, generator=generator).to(BF16)
    hidden = model[2](model[1](model[0](inputs)))
    if not skip_last:
        hidden = model[3](hidden)
    return hidden.float().square().mean()


def _train(name: str, split: bool, set_to_none: bool, layout: str = "") -> None:
    """Leave the last layer out from the third step on, and compare with a loop by hand."""
    make = OPTIMIZERS[name]
    rank = dist.get_rank() if layout else 0
    model = half_mlp(dtype=BF16)
    model_by_hand = half_mlp(dtype=BF16)
    if layout:
        for layer in (*model, *model_by_hand):
            spread(layer, layout)
    optimizer = make(list(model.parameters()))
    hand = ByHand(model_by_hand.parameters(), make, split)
    MasterParameters(optimizer, split=split)
    last_weight = None
    for step in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        model_by_hand.zero_grad(set_to_none=set_to_none)
        is_unused = step >= 2
        if step == 2:
            last_weight = local(model[3].weight.detach()).clone()
        _loss(model, 10 * step + rank, is_unused).backward()
        _loss(model_by_hand, 10 * step + rank, is_unused).backward()
        optimizer.step()
        hand.unscale(1.0)
        hand.step()
    for param, expected in zip(model.parameters(), model_by_hand.parameters(), strict=True):
        assert torch.equal(local(param), local(expected))
    assert torch.equal(local(model[3].weight), last_weight) is set_to_none


@SPLIT
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_layer_that_is_not_used_moves_as_without_masters(name, split, set_to_none):
    _train(name, split, set_to_none)


@pytest.mark.parametrize(
    "split",
    [pytest.param(True, id="split"), pytest.param(False, id="whole", marks=pytest.mark.slow)],
)
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
