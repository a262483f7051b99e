"""clip_grad_norm_ with uneven inputs; references are roots that can be taken by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler
from tests.ranks import RankPool


class _Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def _joined(batches: tuple[int, int]) -> Any:
    """Clips inside Join, and once afterwards, on all ranks."""
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(_Line())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scaler = DistGradScaler("cpu", init_scale=4.0)
    norms = []

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1)).sum()).backward()
        norms.append(scaler.clip_grad_norm_(optimizer, 1e6).item())
        scaler.step(optimizer)
        scaler.update()

    with Join([model, scaler]):
        for _ in range(batches[dist.get_rank()]):
            step()
    step()
    return norms


# DDP divides by the ranks that there were at first: a batch of one rank alone has half the norm.
@pytest.mark.parametrize("batches", [(1, 3), (2, 2), (0, 2)])
def test_clips_inside_join_are_of_the_whole_gradient(
    pair: RankPool, batches: tuple[int, int]
) -> None:
    results = pair.run(_joined, batches)
    both = min(batches)
    for count, norms in zip(batches, results, strict=True):
        assert norms == pytest.approx([1.0] * both + [0.5] * (count - both) + [1.0], rel=1e-6)
