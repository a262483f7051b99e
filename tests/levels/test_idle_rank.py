"""A rank that trains nothing, while other ranks train."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import initialize
from distamp.errors import CallOrderError
from distamp.levels import Amp
from tests.on_ranks import on_ranks


def stage(level: str, num_optimizers: int = 1, idle_rank: int = 0) -> Amp:
    """Return an Amp over a layer; the idle rank has frozen it, and has no optimizer."""
    model = nn.Linear(8, 8)
    is_idle = dist.get_rank() == idle_rank
    model.requires_grad_(not is_idle)
    optimizers = []
    if not is_idle:
        params = list(model.parameters())[:num_optimizers]
        optimizers = [torch.optim.AdamW([param], eps=1e-3) for param in params]
    settings: dict[str, Any] = {"init_scale": 64.0} if level in ("fp16", "fp16-O2") else {}
    return initialize(model, optimizers, level, **settings)


def backward(amp: Amp, fault: bool = False) -> None:
    """Pass a gradient through the stage, to its inputs too."""
    inputs = torch.ones(2, 8, requires_grad=True)
    with amp.autocast():
        loss = amp.model(inputs).float().square().mean()
    amp.backward(loss * (torch.inf if fault else 1.0))


@on_ranks(2)
@pytest.mark.parametrize("idle_rank", [0, 1])
@pytest.mark.parametrize(("level", "num_optimizers"), [("bf16", 2), ("fp16", 1), ("fp16-O2", 1)])
def test_an_idle_rank_steps_and_skips_with_the_others(level, num_optimizers, idle_rank):
    amp = stage(level, num_optimizers, idle_rank)
    is_idle = dist.get_rank() == idle_rank
    for fault in (False, True, False):
        amp.zero_grad()
        backward(amp, fault and not is_idle)
        result = amp.step()
        assert bool(result) is not fault
        assert len(result.optimizers) == (0 if is_idle else num_optimizers)


def is_sharded(param: nn.Parameter) -> bool:
    return True


@on_ranks(2)
@pytest.mark.parametrize("level", ["bf16", "fp16"])
def test_an_idle_rank_takes_part_in_a_clip(level):
    amp = stage(level)
    backward(amp)
    norm = amp.clip_grad_norm_(1.0, shard_group_fn=is_sharded).item()
    assert amp.step()
    norms: list[Any] = [None, None]
    dist.all_gather_object(norms, norm)
    assert norms[0] == norms[1]
    assert norm > 0


@on_ranks(2)
@pytest.mark.parametrize("level", ["bf16", "fp16"])
def test_an_idle_rank_takes_part_in_a_step_by_the_norm(level):
    amp = stage(level)
    backward(amp)
    assert amp.step(max_norm=1.0, shard_group_fn=is_sharded)


@on_ranks(2)
def test_ranks_that_all_train_nothing_raise():
    model = nn.Linear(8, 8).requires_grad_(False)
    amp = initialize(model, [], "bf16")
    with pytest.raises(CallOrderError, match="no optimizer on any rank"):
        amp.step()
