"""Rules in place of memories: what waits is carried over, flags are exact, names are ours."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from distamp import DistGradScaler
from distamp.errors import GradientError
from distamp.scaler import StepCounts
from tests.ranks import RankPool
from tests.scaler.steps import INF, backward, cpu_scaler, leaf, sgd


def test_an_optimizer_that_waits_is_carried_over_a_change_of_the_scale():
    (first, one), (second, other) = sgd(1.0), sgd(1.0)
    scaler = cpu_scaler(64.0)
    scaler.add_optimizer(one, other)
    backward(scaler, first, INF)
    backward(scaler, second, 0.25)
    scaler.step(one)
    scaler.update()  # the scale halves
    backward(scaler, second, 0.125)  # accumulates at the new scale
    scaler.step(other)
    scaler.update()
    assert (first.item(), second.item()) == (1.0, 0.625)


def test_an_optimizer_seen_after_an_update_is_carried_over_too():
    (first, one), (second, other) = sgd(1.0), sgd(1.0)
    scaler = cpu_scaler(64.0)
    backward(scaler, first, INF)
    backward(scaler, second, 0.25)
    scaler.step(one)
    scaler.update()
    scaler.step(other)
    assert second.item() == 0.75


def test_unscaled_gradients_stay_so_until_a_loss_is_scaled():
    """As Accelerate clips: all are unscaled, then stepped and updated one by one."""
    trained = [sgd(1.0) for _ in range(3)]
    scaler = cpu_scaler(64.0, growth_interval=1)
    for parameter, _ in trained:
        backward(scaler, parameter, 0.25)
    scaler.unscale_(*(optimizer for _, optimizer in trained))
    for _, optimizer in trained:
        assert scaler.is_unscaled(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert [parameter.item() for parameter, _ in trained] == [0.75] * 3
    scaler.scale(torch.zeros(()))
    assert not any(scaler.is_unscaled(optimizer) for _, optimizer in trained)


def test_parameters_of_two_optimizers_that_wait_are_carried_over_once():
    shared, alone = leaf(1.0), leaf(1.0)
    both = torch.optim.SGD([shared, alone], lr=1.0)
    one = torch.optim.SGD([shared], lr=1.0)
    other, driver = sgd(1.0)
    scaler = cpu_scaler(64.0)
    scaler.add_optimizer(both, one, driver)
    for parameter in (shared, alone, other):
        backward(scaler, parameter, 0.25)
    scaler.step(driver)
    scaler.update(256.0)
    scaler.step(both)
    assert (shared.item(), alone.item()) == (0.75, 0.75)


@pytest.mark.parametrize("again", ["stage", "pop"])
def test_a_step_is_done_again_where_its_record_is_set_back(again: str):
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler(64.0)
    for _ in range(2):
        optimizer.zero_grad()
        backward(scaler, parameter, 0.25)
        scaler.unscale_(optimizer)
        if again == "stage":
            scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
        else:
            scaler._per_optimizer_states.pop(id(optimizer), None)
    optimizer.zero_grad()
    backward(scaler, parameter, 0.25)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.75


@pytest.mark.parametrize("fused", [False, True])
def test_a_flag_that_a_trainer_sums_is_one_overflow(fused: bool):
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scaler = cpu_scaler(64.0)
    for gradient in (0.25, INF, 0.25):
        optimizer.zero_grad()
        backward(scaler, parameter, gradient)
        scaler.unscale_(optimizer)
        for flag in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            flag.mul_(2.0)  # as an all-reduce of two ranks
        scaler.step(optimizer)
        scaler.update()
    assert parameter.item() == 0.5
    assert scaler.step_counts(optimizer) == StepCounts(taken=2, skipped=1)


class Clips:
    """A wrapper around a fused optimizer that clips in its own step, and does not say more."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        self.optimizer.step()


def test_a_wrapper_that_clips_in_its_own_step_is_given_unscaled_gradients():
    parameter = leaf(1.0)
    optimizer: Any = Clips(torch.optim.SGD([parameter], lr=1.0, fused=True))
    scaler = cpu_scaler(1024.0)
    backward(scaler, parameter, 0.25)
    scaler.step(optimizer)
    assert parameter.item() == 0.75


class OwnNames(DistGradScaler):
    """As NeMo's, with private names of its own."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=64.0)
        self._hysteresis_tracker = 2
        self._ranks = self._states = self._settings = 0


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_subclass_has_private_names_of_its_own(twin: Any):
    for scaler in (OwnNames(), twin(OwnNames())):
        parameter, optimizer = sgd(1.0)
        backward(scaler, parameter, 0.25)
        scaler.step(optimizer)
        scaler.update()
        assert (parameter.item(), scaler._hysteresis_tracker) == (0.75, 2)


def test_guards_against_a_falling_scale_fire():
    """icefall ends a run below 1e-5, fairseq below 1e-4."""
    scaler = cpu_scaler(2.0**-10)
    parameter, optimizer = sgd(1.0)
    for _ in range(20):
        optimizer.zero_grad()
        backward(scaler, parameter, INF)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**-24 < 1e-5


def _parts(declared: str | None) -> Any:
    import torch.distributed as dist

    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = DistGradScaler("cpu", init_scale=4.0)
    backward(scaler, parameter, 3.0 + dist.get_rank())
    sharded: Any = {None: None, "part": lambda _: True, "group": lambda _: dist.group.WORLD}
    try:
        return scaler.clip_grad_norm_(optimizer, 1e6, sharded=sharded[declared]).item()
    except GradientError as error:
        return str(error)


@pytest.mark.parametrize("declared", [None, "part", "group"])
def test_parts_are_declared_or_refused_with_what_to_declare(ranks2: RankPool, declared: Any):
    for found in ranks2.run(_parts, declared):
        assert "sharded=" in found if declared is None else found == pytest.approx(5.0)


def _accumulates_over_a_change() -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), gradient_as_bucket_view=True)
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = DistGradScaler("cpu", init_scale=64.0)
    scaler.add_optimizer(optimizer)
    inputs: Tensor = torch.full((1, 1), 0.25)
    with model.no_sync():
        scaler.scale(model(inputs).sum()).backward()
    scaler.update(256.0)
    scaler.scale(model(inputs).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return [p.item() for p in model.parameters()]


def test_gradients_accumulate_over_a_change_of_the_scale_under_ddp(ranks2: RankPool):
    assert ranks2.run(_accumulates_over_a_change) == [[0.5]] * 2
