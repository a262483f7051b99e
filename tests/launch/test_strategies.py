"""The model spread over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from launch.config import ModelConfig
from launch.models import init_model, next_byte_loss
from launch.ranks import Ranks
from launch.strategies import last_microbatch_syncs, spread

CPU = torch.device("cpu")


def _gradients(model: torch.nn.Module, tokens: torch.Tensor, *, sync: bool) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    with last_microbatch_syncs(model, sync):
        next_byte_loss(model(tokens), tokens).backward()
    return [p.grad.clone() for p in model.parameters()]


def _spread(config: ModelConfig) -> tuple[torch.nn.Module, torch.Tensor]:
    ranks = Ranks(rank=dist.get_rank(), local_rank=0, world_size=dist.get_world_size())
    model = spread(init_model(config, 0, CPU), ranks, CPU, torch.zeros(1, 1, dtype=torch.long))
    generator = torch.Generator().manual_seed(ranks.rank)
    return model, torch.randint(256, (1, config.block), generator=generator)


def _first_and_second_pass_agree() -> bool:
    # Larger than DDP's first bucket of 1 MiB, so that there is a layout to change.
    model, tokens = _spread(ModelConfig(layers=3, heads=4, width=128, block=16))
    first = _gradients(model, tokens, sync=True)
    return all(map(torch.equal, first, _gradients(model, tokens, sync=True)))


def test_gradients_of_the_first_step_are_added_as_those_of_any_later_one(ranks4):
    # Else the first step after a resume would differ from the same step of a run never stopped.
    assert ranks4.run(_first_and_second_pass_agree) == [True] * 4


def _agree_with_rank_0(sync: bool) -> bool:
    model, tokens = _spread(ModelConfig(layers=1, heads=2, width=8, block=4))
    mine = torch.cat([g.flatten() for g in _gradients(model, tokens, sync=sync)])
    theirs = mine.clone()
    dist.broadcast(theirs, src=0)
    return torch.equal(mine, theirs)


def test_gradients_travel_in_the_last_microbatch_alone(ranks2):
    assert ranks2.run(_agree_with_rank_0, True) == [True, True]
    assert ranks2.run(_agree_with_rank_0, False) == [True, False]


def test_one_process_needs_no_wrapper():
    model = init_model(ModelConfig(layers=1, heads=2, width=8, block=4), 0, CPU)
    alone = Ranks(rank=0, local_rank=0, world_size=1)
    assert spread(model, alone, CPU, torch.zeros(1, 1, dtype=torch.long)) is model
