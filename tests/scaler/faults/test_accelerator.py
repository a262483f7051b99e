"""What shows on a device that is no host alone.

Runs where there is one: a GPU, or the tests' simulated device, whose tests call these functions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distamp import DistGradScaler
from tests.scaler.steps import INF

HERE = torch.accelerator.is_available()
pytestmark = pytest.mark.skipif(not HERE, reason="no accelerator here")


def device() -> str:
    return str(torch.accelerator.current_accelerator())


def momentum_after_a_parameter_came(where: str) -> list[list[float]]:
    """A fused SGD gets a parameter, the next step overflows, and the one after that is clean.

    torch leaves a momentum buffer that was never written uninitialised.
    """
    parameters = [nn.Parameter(torch.ones(4, device=where)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters[:1], lr=1.0, momentum=0.5, fused=True)
    scaler = DistGradScaler(where, init_scale=1024.0)
    garbage = [torch.full((4,), 1e30, device=where) for _ in range(64)]
    for number, gradient in enumerate((0.25, 0.25, INF, 0.25)):
        if number == 2:
            optimizer.add_param_group({"params": parameters[1:]})
            del garbage[:]  # what a new buffer finds
        optimizer.zero_grad()
        for parameter in parameters:
            scaler.scale((parameter * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return [parameter.tolist() for parameter in parameters]


def right_momentum() -> list[list[float]]:
    # 1 - 0.25 - (0.125 + 0.25) - (0.1875 + 0.25), and one step from the start.
    return [[1.0 - 0.25 - 0.375 - 0.4375] * 4, [0.75] * 4]


def test_a_parameter_that_came_later_starts_without_momentum() -> None:
    for _ in range(4):
        assert momentum_after_a_parameter_came(device()) == right_momentum()


def moves_in_between(where: str) -> Any:
    """Two fused optimizers, an update between their steps: no flag and no scale is read."""
    parameters = [nn.Parameter(torch.ones(4, device=where)) for _ in range(2)]
    a, b = (torch.optim.AdamW([p], lr=0.5, weight_decay=0.0, fused=True) for p in parameters)
    scaler = DistGradScaler(where, init_scale=1024.0)
    scaler.scale((parameters[0] * INF).sum()).backward()
    scaler.scale((parameters[1] * 0.25).sum()).backward()
    scaler.step(a)
    scaler.update()
    scaler.unscale_(b)
    gradient = parameters[1].grad
    assert gradient is not None
    return gradient.tolist(), scaler.get_scale()


def test_an_optimizer_after_update_is_unscaled_by_its_own_scale() -> None:
    assert moves_in_between(device()) == ([0.25] * 4, 512.0)
