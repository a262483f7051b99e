"""A rank that trains nothing, beside ranks that train."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import initialize
from distamp.errors import CallOrderError
from distamp.levels import Amp
from tests.on_ranks import on_ranks


def stage(level: str, optimizers: int = 1, frozen: int = 0) -> Amp:
    """An Amp over a layer, which one rank has frozen and without an optimizer."""
    model = nn.Linear(8, 8)
    model.requires_grad_(dist.get_rank() != frozen)
    trained = [torch.optim.AdamW([param], eps=1e-3) for param in model.parameters()][:optimizers]
    settings: dict[str, Any] = {"init_scale": 64.0} if level in ("fp16", "fp16-O2") else {}
    given = [] if dist.get_rank() == frozen else trained
    return initialize(model, given, level, **settings)


def backward(amp: Amp, fault: bool = False) -> None:
    """Pass a gradient through the stage, to its inputs too."""
    inputs = torch.ones(2, 8, requires_grad=True)
    with amp.autocast():
        loss = amp.model(inputs).float().square().mean()
    amp.backward(loss * (torch.inf if fault else 1.0))


@on_ranks(2)
@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize(("level", "optimizers"), [("bf16", 2), ("fp16", 1), ("fp16-O2", 1)])
def test_it_steps_and_skips_with_the_others(level, optimizers, frozen):
    amp = stage(level, optimizers, frozen)
    idle = dist.get_rank() == frozen
    for fault in (False, True, False):
        amp.zero_grad()
        backward(amp, fault and not idle)
        result = amp.step()
        assert bool(result) is not fault
        assert len(result.optimizers) == (0 if idle else optimizers)


@on_ranks(2)
@pytest.mark.parametrize("level", ["bf16", "fp16"])
def test_it_takes_part_in_a_clip_and_in_a_step_by_the_norm(level):
    amp = stage(level)
    norms = []
    for clips in (True, False):
        amp.zero_grad()
        backward(amp)
        if clips:
            norms.append(amp.clip_grad_norm_(1.0, shard_group_fn=lambda param: True).item())
        else:
            assert amp.step(max_norm=1.0, shard_group_fn=lambda param: True)
            continue
        assert amp.step()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, norms)
    assert everyone[0] == everyone[1]
    assert norms[0] > 0


@on_ranks(2)
def test_ranks_that_all_train_nothing_raise():
    model = nn.Linear(8, 8).requires_grad_(False)
    amp = initialize(model, [], "bf16")
    with pytest.raises(CallOrderError, match="no optimizer on any rank"):
        amp.step()
