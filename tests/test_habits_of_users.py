"""Mistakes in the arguments of one rank, which a job script makes easily.

A script that reads a configuration file, the time or the host name may pass other arguments on one
rank. Every rank has to raise, because a rank that goes on alone leaves the others in a collective.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, StepGuard
from tests.on_ranks import on_ranks


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def make_ddp() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(make_model())
    return model, torch.optim.AdamW(model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"skip_if": True}])
@pytest.mark.parametrize("guard_class", [StepGuard, DistGradScaler])
def test_step_all_without_an_optimizer_raises_on_every_rank(guard_class, settings):
    """A rank without an optimizer would send no message, and the others would wait for it."""
    model, optimizer = make_ddp()
    guard = StepGuard() if guard_class is StepGuard else DistGradScaler("cpu")
    guard.scale(model(torch.ones(2, 4)).sum()).backward()
    optimizers: list[Any] = [] if dist.get_rank() == 1 else [optimizer]

    with pytest.raises(TypeError, match="at least one optimizer"):
        guard.step_all(optimizers, **settings)
