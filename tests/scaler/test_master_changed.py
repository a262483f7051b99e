"""Masters where the optimizer trains, or holds, others than when they were made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distamp.scaler import MasterParameters
from tests.scaler.masters import master_scaler


def _trained(parameters: int) -> tuple[list[nn.Parameter], torch.optim.SGD]:
    made = [nn.Parameter(torch.zeros(1 + n, dtype=torch.bfloat16)) for n in range(parameters)]
    return made, torch.optim.SGD(made, lr=1.0)


def _steps(parameters: list[nn.Parameter], optimizer: Any, scaler: Any = None) -> None:
    """Three steps by a gradient of 1, before each of which one of 100 is thrown away."""
    for _ in range(3):
        for factor in (100.0, 1.0):
            optimizer.zero_grad()
            loss = sum(p.float().sum() for p in parameters) * factor
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("parameters", [1, 2])
def test_a_gradient_that_was_zeroed_is_gone_where_all_were_frozen_at_first(parameters):
    made, optimizer = _trained(parameters)
    for each in made:
        each.requires_grad_(False)
    MasterParameters(optimizer)
    for each in made:
        each.requires_grad_(True)
    sum(p.float().sum() for p in made).backward()  # type: ignore[union-attr]
    optimizer.step()
    _steps(made, optimizer)
    assert all((p == -4.0).all() for p in made)


def test_a_gradient_that_was_zeroed_is_gone_where_all_but_one_are_frozen():
    made, optimizer = _trained(3)
    MasterParameters(optimizer)
    _steps(made, optimizer)
    for frozen in made[:-1]:
        frozen.requires_grad_(False)
    _steps(made, optimizer)
    assert [p[0].item() for p in made] == [-3.0, -3.0, -6.0]


def test_a_gradient_that_was_zeroed_is_gone_where_the_optimizer_was_rid_of_others():
    made, optimizer = _trained(4)
    MasterParameters(optimizer)
    scaler = master_scaler()
    _steps(made, optimizer, scaler)
    del optimizer.param_groups[0]["params"][:2]
    for each in made[:2]:
        each.grad = None
    _steps(made[2:], optimizer, scaler)
    assert [p[0].item() for p in made] == [-3.0, -3.0, -6.0, -6.0]
