"""Uneven inputs on the simulated device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from distamp import DistGradScaler
from tests.scaler.steps import INF


def _epochs(epochs: list[tuple[int, ...]]) -> Any:
    """A parameter that begins each epoch the same; the last rank's first step overflows."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    parameter = nn.Parameter(torch.ones((), device="sim"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = DistGradScaler("sim", init_scale=1024.0)
    values = []
    for counts in epochs:
        nn.init.ones_(parameter)
        with Join([scaler]):
            for number in range(counts[rank]):
                optimizer.zero_grad()
                factor = INF if rank == last and number == 0 else 0.25
                scaler.scale(parameter * factor).backward()
                scaler.step(optimizer)
                scaler.update()
        values.append(parameter.item())
    return values, scaler.get_scale()


def test_an_epoch_that_some_ranks_take_no_part_in(sim_ranks):
    """A rank that ran out of inputs, and one that did not, begin the next without the third."""
    results = sim_ranks(3).run(_epochs, [(1, 3, 3), (2, 2, 0), (1, 1, 1)])
    assert [scale for _, scale in results] == [256.0] * 3
    # Without the first steps of the first epoch and of the last, which all ranks skipped.
    assert [values for values, _ in results] == [[1.0, 0.5, 1.0], [0.5, 0.5, 1.0], [0.5, 1.0, 1.0]]
