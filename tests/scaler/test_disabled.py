"""A disabled scaler does what torch's does; parameters without gradients are no obstacle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp import DistGradScaler
from tests.collectives import count_collectives
from tests.scaler.steps import INF, backward, cpu_scaler, leaf, sgd, torch_scaler

# -- disabled --------------------------------------------------------------------------------------


def calls_of_a_disabled_scaler(scaler: Any) -> list[Any]:
    parameter, optimizer = sgd(1.0)
    seen: list[Any] = []
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * 0.25).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
        seen.append(scaler.step(optimizer))
        seen.append(scaler.step(optimizer, None))
        scaler.update()
        scaler.update(4.0)
        seen.append((parameter.item(), scaler.get_scale(), scaler._get_growth_tracker()))
    seen.append(scaler.step(optimizer, lambda: torch.tensor(3.0)))
    seen.append((scaler.state_dict(), scaler.is_enabled(), parameter.item()))
    return seen


def test_a_disabled_scaler_does_what_torchs_does():
    ours = calls_of_a_disabled_scaler(cpu_scaler(enabled=False))
    assert ours == calls_of_a_disabled_scaler(torch_scaler(enabled=False))


def test_a_disabled_scaler_answers_what_only_ours_is_asked():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler(enabled=False)
    parameter.grad = torch.tensor([3.0])
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 3.0
    assert parameter.grad.item() == pytest.approx(1.0)
    assert scaler.step_all([optimizer]) == [None]
    assert scaler.stepped(optimizer) is True
    assert scaler.found_inf(optimizer).item() == 0.0
    assert parameter.item() == pytest.approx(0.0, abs=1e-5)


def test_a_disabled_scaler_steps_inf_as_torchs_does():
    parameter, optimizer = sgd(1.0)
    parameter.grad = torch.tensor([INF])
    DistGradScaler("cpu", enabled=False).step(optimizer)
    assert parameter.item() == -INF


def disabled_traffic() -> tuple[int, int]:
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler(enabled=False)
    counts = []
    for _ in range(2):
        with count_collectives() as counted:
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        counts.append(counted.count)
    return tuple(counts)


def test_a_disabled_scaler_in_a_group_sends_nothing(ranks2):
    assert ranks2.run(disabled_traffic) == [(0, 0)] * 2


# -- gradients of none -----------------------------------------------------------------------------


def test_torch_asserts_where_there_is_no_gradient_and_ours_steps():
    _, optimizer = sgd(1.0)
    scaler = torch_scaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match=r"No inf checks were recorded"):
        scaler.step(optimizer)
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler(growth_interval=1)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.item(), scaler.get_scale(), scaler.stepped(optimizer)) == (1.0, 2048.0, True)


def no_gradient_on(empty: int, inf: bool, fused: bool) -> tuple[float, float, bool]:
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scaler = cpu_scaler()
    scaler.scale(torch.ones(()))
    if dist.get_rank() != empty:
        backward(scaler, parameter, INF if inf else 0.25)
    scaler.step(optimizer)
    scaler.update()
    return parameter.item(), scaler.get_scale(), scaler.stepped(optimizer)


@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
def test_a_rank_without_gradients_agrees_with_the_rest(ranks2, fused):
    assert ranks2.run(no_gradient_on, 1, True, fused) == [(1.0, 512.0, False)] * 2
    assert ranks2.run(no_gradient_on, 1, False, fused) == [
        (0.75, 1024.0, True),
        (1.0, 1024.0, True),
    ]


def test_gradients_of_a_tensor_subclass_are_read():
    class Tagged(Tensor):
        pass

    parameter = nn.Parameter(torch.ones(1).as_subclass(Tagged))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = cpu_scaler()
    scaler.scale((parameter * 0.25).sum()).backward()
    scaler.step(optimizer)
    assert parameter.item() == 0.75
