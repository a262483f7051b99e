"""initialize at every level on a simulated device, alone and under DDP, with and without masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distamp

SCHEDULES = [("late", 0), ("late_others", 0), ("random", 13)]
LEVELS = ["O0", "O1", "O2", "O3"]


def _train(kind: str, level: str, ddp: bool) -> Any:
    """Six steps, one of which overflows: the weights, and who stepped."""
    rank = dist.get_rank() if ddp else 0
    device = torch.device(kind, rank) if kind == "sim" else torch.device(kind)
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 4))
    net = distamp.cast_model(net.to(device), level)
    if ddp:
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True)
    amp = distamp.initialize(net, optimizer, level, init_scale=2.0**8)
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        x = torch.randn(8, 16, generator=generator).to(device)
        with amp.autocast():
            loss = net(x).float().square().mean()
        bad = float("inf") if step == 2 and rank == dist_last(ddp) else 1.0
        amp.backward(loss * bad)
        amp.step(optimizer)
        optimizer.zero_grad()
    return [p.detach().float().cpu() for p in net.parameters()]


def dist_last(ddp: bool) -> int:
    """The rank that overflows."""
    return dist.get_world_size() - 1 if ddp else 0
