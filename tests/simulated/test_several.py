"""Several on simulated devices: a model over two, more optimizers than one message has."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import DistGradScaler, host
from distamp.errors import LockstepError
from distamp.masters import MasterParameters
from tests.scaler.steps import error_of


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


def _shared_error(how: str) -> tuple[float, float, bool]:
    """An error that every rank has, at a step whose reply the host reads late."""
    weight = torch.ones(1, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=True)
    scaler = DistGradScaler("sim", init_scale=2.0)
    refused = False
    for number in range(3):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        try:
            if number == 1:
                scaler.clip_grad_norm_(optimizer, -1.0 if how == "max_norm" else 1.0, norm_type=-1)
            scaler.step(optimizer)
        except ValueError:
            refused = True
        gradient = weight.grad.item()
        scaler.update()
        if refused:
            break
    return weight.item(), gradient, refused


@pytest.mark.parametrize("how", ["max_norm", "norm_type"])
def test_an_error_that_all_ranks_share_steps_nothing(sim2, how):
    assert sim2.run(_shared_error, how) == [(0.75, 1.0, True)] * 2


def _clips_without_a_scale() -> int:
    """How many copies are on their way to the host after many clips."""
    weight = torch.ones(1, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=True)
    scaler = DistGradScaler("sim", enabled=False)
    made = []
    real = host.HostCopy.__init__

    def counting(copy: host.HostCopy, source: torch.Tensor) -> None:
        made.append(weakref.ref(copy))
        real(copy, source)

    host.HostCopy.__init__ = counting
    try:
        for _ in range(20):
            optimizer.zero_grad()
            weight.sum().backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
    finally:
        host.HostCopy.__init__ = real
    return sum(copy() is not None for copy in made)


def test_a_disabled_scalers_clips_keep_no_copies(sim2):
    assert max(sim2.run(_clips_without_a_scale)) <= 1


def _not_finite_over_two() -> list[float]:
    """One norm over two optimizers, one of which is not finite on one rank."""
    weights = [torch.ones(1, device="sim", requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0, fused=True) for weight in weights]
    scaler = DistGradScaler("sim", init_scale=2.0)
    scaler.add_optimizer(*optimizers)
    for bad in (False, True):
        for weight in weights:
            weight.grad = None
        scaler.scale(torch.stack(weights).sum() * 100.0).backward()
        if bad and dist.get_rank():
            weights[1].grad.fill_(torch.nan)
        scaler.clip_grad_norm_(weights, 2.0**0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return [round(weight.item(), 4) for weight in weights]


def test_all_skip_that_a_norm_was_measured_over_where_it_is_not_finite(sim2):
    assert sim2.run(_not_finite_over_two) == [[0.0, 0.0]] * 2


def _one_rank_asks() -> str | None:
    """Rank 0 reads late what others read at their next message."""
    weight = torch.ones(1, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler = DistGradScaler("sim", max_consecutive_skips=2)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale((weight * torch.inf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    error = error_of(scaler.step_counts, optimizer) if dist.get_rank() == 0 else None
    scaler.scale((weight * 0.25).sum()).backward()
    error = error or error_of(scaler.step, optimizer)
    return error and error[0]


def test_one_rank_may_ask_for_the_counts_of_fused_steps(sim2):
    assert sim2.run(_one_rank_asks, schedule="late") == ["LossScaleCollapse"] * 2
