"""clip_grad_norm_ where ranks come to differ after their first clip: plans made at different times.

References are roots that can be taken by hand.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler
from tests.ranks import RankPool


def _grown_beside_a_tied_embedding(grows: int) -> list[float]:
    """Pipeline stages that both hold an embedding; after three steps one of them adds a layer."""
    rank = dist.get_rank()
    embedding = nn.Parameter(torch.ones(4))
    parameters = [embedding, nn.Parameter(torch.full((6 + rank,), 2.0))]
    optimizer = torch.optim.SGD(parameters, lr=0.125)
    scaler = DistGradScaler("cpu", init_scale=4.0)
    norms = []
    for step in range(6):
        if step == 3 and rank == grows:
            parameters.append(nn.Parameter(torch.full((9,), 3.0)))
            optimizer.add_param_group({"params": parameters[-1:]})
        optimizer.zero_grad()
        scaler.scale(torch.stack([p.sum() for p in parameters]).sum()).backward()
        norms.append(scaler.clip_grad_norm_(optimizer, 1e6).item())
        scaler.step(optimizer)
        scaler.update()
    return norms


@pytest.mark.parametrize("grows", [0, 1])
def test_a_tied_embedding_counts_once_after_one_stage_has_grown(
    ranks2: RankPool, grows: int
) -> None:
    expected = [math.sqrt(4 + 6 + 7)] * 3 + [math.sqrt(4 + 6 + 7 + 9)] * 3
    for norms in ranks2.run(_grown_beside_a_tied_embedding, grows):
        assert norms == pytest.approx(expected, rel=1e-6)


class _Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def _joined(batches: tuple[int, int], plain_before: int, anew: bool) -> Any:
    """Clips inside Join, after steps that do not clip; and once afterwards, on all ranks."""
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(_Line())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scaler = DistGradScaler("cpu", init_scale=4.0)
    norms = []

    def step(clips: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1)).sum()).backward()
        if clips:
            norms.append(scaler.clip_grad_norm_(optimizer, 1e6).item())
        scaler.step(optimizer)
        scaler.update()

    for _ in range(plain_before):
        step(clips=False)
    with Join([model, scaler]):
        for _ in range(batches[dist.get_rank()]):
            step(clips=True)
    if anew:
        scaler = DistGradScaler("cpu", init_scale=4.0)
    step(clips=True)
    return norms


# DDP divides by the ranks that there were at first: a batch of one rank alone has half the norm.
@pytest.mark.parametrize(
    ("plain_before", "anew"), [(0, False), (12, False), (12, True)], ids=["", "late", "anew"]
)
@pytest.mark.parametrize("batches", [(1, 3), (3, 1), (2, 2), (0, 2)])
def test_clips_inside_join_are_of_the_whole_gradient(
    pair: RankPool, batches: tuple[int, int], plain_before: int, anew: bool
) -> None:
    results = pair.run(_joined, batches, plain_before, anew)
    both = min(batches)
    for count, norms in zip(batches, results, strict=True):
        assert norms == pytest.approx([1.0] * both + [0.5] * (count - both) + [1.0], rel=1e-6)
