"""Several on simulated devices: a model over two, more optimizers than one message has."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import DistGradScaler
from distamp.errors import LockstepError
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


def _which_of_nine_step() -> list[bool]:
    weights = [torch.zeros(1, device="sim", requires_grad=True) for _ in range(9)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    scaler = DistGradScaler("sim", init_scale=2.0)
    for number in range(3):
        scaler.scale(torch.stack(weights).sum()).backward()
        if number and dist.get_rank():
            weights[7].grad.fill_(torch.inf)
        scaler.step_all(optimizers)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [bool(weight.cpu() == -3.0) for weight in weights]


def test_each_of_nine_optimizers_is_skipped_by_its_own_overflow(sim2):
    assert sim2.run(_which_of_nine_step) == [[True] * 7 + [False, True]] * 2


def _out_of_lockstep() -> tuple[list[float], str]:
    weight = torch.ones(1, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=True)
    scaler = DistGradScaler("sim", init_scale=2.0)
    seen, raised = [], ""
    for _ in range(3):
        try:
            scaler.scale(weight.sum()).backward()
            scaler.step(optimizer)
            scaler.update(4.0 if dist.get_rank() else 8.0)
        except LockstepError:
            raised = "refused"
        optimizer.zero_grad()
        seen.append(weight.item())
    return seen, raised


def test_a_fused_step_out_of_lockstep_is_taken_by_nobody(sim2):
    assert sim2.run(_out_of_lockstep) == [([0.75, 0.75, 0.75], "refused")] * 2
