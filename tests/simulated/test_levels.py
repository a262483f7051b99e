"""initialize at every level on a simulated device, alone and under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distamp
from distamp.precision import LEVELS

SCHEDULES = [("late", 0), ("late_others", 0), ("random", 13)]
# Relative and absolute. The CPU has autocast lists of its own (O1, bf16), and the norm of a
# gradient is summed in another order there, which float16 weights (O2, O3) show in the last place.
TOLERANCES = {"O0": (1e-6, 1e-7), "O1": (2e-2, 2e-3), "bf16": (2e-2, 2e-3)}
FLOAT16 = (3e-2, 1e-3)


def _train(kind: str, level: str, ddp: bool) -> Any:
    """Six steps, one of which overflows on one rank: the weights, and who stepped."""
    rank = dist.get_rank() if ddp else 0
    last = dist.get_world_size() - 1 if ddp else 0
    device = torch.device(kind, rank) if kind == "sim" else torch.device(kind)
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4)).to(device)
    net = distamp.cast_model(net, level)
    if ddp:
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    amp = distamp.initialize(net, optimizer, level)
    generator = torch.Generator().manual_seed(rank)
    taken = []
    for step in range(6):
        amp.zero_grad()
        x = torch.randn(8, 16, generator=generator).to(device)
        with amp.autocast():
            loss = amp.model(x).float().square().mean()
        # Where no loss is scaled nothing is skipped.
        bad = step == 2 and rank == last and LEVELS[level].loss_scale != 1.0
        amp.backward(loss * (float("inf") if bad else 1.0))
        amp.clip_grad_norm_(1.0)
        taken.append(bool(amp.step()))
    return [p.detach().float().cpu() for p in net.parameters()], taken


def _compare(level: str, found: Any, expected: Any) -> None:
    relative, absolute = TOLERANCES.get(level, FLOAT16)
    torch.testing.assert_close(found[0], expected[0], rtol=relative, atol=absolute)
    assert found[1] == expected[1]


@pytest.mark.parametrize("level", list(LEVELS))
def test_a_level_trains_as_on_the_cpu(sim, level):
    expected = sim.one(_train, "cpu", level, False)
    for schedule, seed in SCHEDULES:
        _compare(
            level, sim.one(_train, "sim", level, False, schedule=schedule, seed=seed), expected
        )


@pytest.mark.parametrize("level", list(LEVELS))
def test_a_level_trains_under_ddp_as_on_the_cpu(sim2, ranks2, level):
    expected = ranks2.run(_train, "cpu", level, True)
    for schedule, seed in SCHEDULES[::2]:
        found = sim2.run(_train, "sim", level, True, schedule=schedule, seed=seed)
        for mine, theirs in zip(found, expected, strict=True):
            _compare(level, mine, theirs)


NORMS = {
    "layer": lambda: nn.LayerNorm(6),
    "layer, no bias": lambda: nn.LayerNorm(6, bias=False),
    "layer, no weight": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "batch": lambda: nn.BatchNorm1d(6),
    "batch, no weight": lambda: nn.BatchNorm1d(6, affine=False),
    "batch, evaluated": lambda: nn.BatchNorm1d(6).eval(),
    "group": lambda: nn.GroupNorm(2, 6),
}


def _normalised(kind: str, norm: str, dtype: torch.dtype) -> list[torch.Tensor]:
    module = NORMS[norm]().to(kind, dtype)
    x = torch.arange(18.0).view(3, 6).sin().to(kind, dtype).requires_grad_()
    y = module(x)
    (y * torch.arange(18, device=kind).view(3, 6)).float().square().mean().backward()
    assert x.grad is not None
    return [t.detach().cpu() for t in (y, x.grad, *(p.grad for p in module.parameters()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_any_level_is_as_on_the_cpu(sim, norm, dtype):
    expected = sim.one(_normalised, "cpu", norm, dtype)
    found = sim.one(_normalised, "sim", norm, dtype)
    assert all(map(torch.equal, found, expected))
