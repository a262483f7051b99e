"""A disabled scaler does what torch's does; parameters without gradients are no obstacle."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.scaler.steps import INF, backward, cpu_scaler, leaf, sgd, torch_scaler

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
