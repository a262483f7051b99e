"""A model spread over two simulated devices: an overflow on either of them skips the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distamp import DistGradScaler
from distamp.masters import MasterParameters


def _moved_by(half: bool, overflowing: int | None) -> list[float]:
    """By how much a step moves a weight on each device."""
    model = nn.ModuleList([nn.Linear(2, 2, bias=False, device=f"sim:{i}") for i in range(2)])
    if half:
        model.half()
    weights = [*model.parameters()]
    for weight in weights:
        nn.init.ones_(weight).grad = torch.full_like(weight, 4.0)
    if overflowing is not None:
        weights[overflowing].grad[0, 0] = torch.inf
    optimizer = torch.optim.SGD(weights, lr=0.25)
    if half:
        MasterParameters(optimizer)
    scaler = DistGradScaler("sim", init_scale=8.0, fp16_grads="master" if half else "error")
    scaler.scale(torch.ones((), device="sim:0"))
    scaler.step(optimizer)
    return [1.0 - weight[1, 1].item() for weight in weights]


@pytest.mark.parametrize("half", [False, True])
def test_an_overflow_on_either_device_skips_the_step(sim, half):
    moved = [sim.one(_moved_by, half, overflowing) for overflowing in (None, 0, 1)]
    assert moved == [[0.125, 0.125], [0.0, 0.0], [0.0, 0.0]]
