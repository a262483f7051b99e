"""How the loss scale moves: torch's kernel, float32 arithmetic and written-out tables agree."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distamp import DistGradScaler
from distamp.scaler import (
    DynamicSchedule,
    HysteresisSchedule,
    ScaleState,
    Schedule,
    StaticSchedule,
)
from tests.scaler.steps import INF, cpu_scaler, iteration, sgd

CPU = torch.device("cpu")
FOUND = {flag: torch.full((), float(flag)) for flag in (False, True)}


def start(schedule: Schedule, scale: float = 65536.0, tracker: int = 0) -> ScaleState:
    return ScaleState.initial(scale, tracker, schedule.initial_hysteresis, CPU)


def scales(schedule: Schedule, overflows: list[bool], scale: float = 65536.0) -> list[float]:
    """The scale after each iteration."""
    state, seen = start(schedule, scale), []
    for overflow in overflows:
        state = schedule.next_state(state, FOUND[overflow])
        seen.append(state.scale.item())
    return seen


def flags(pattern: str) -> list[bool]:
    """``"..x"`` is two clean iterations and an overflow."""
    return [mark == "x" for mark in pattern]


histories = st.lists(st.booleans(), min_size=1, max_size=60)
growth_factors = st.floats(1.01, 10.0)
backoff_factors = st.floats(0.01, 0.99)


@given(histories, growth_factors, backoff_factors, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_dynamic_is_torchs_kernel_bit_for_bit(overflows, growth, backoff, interval):
    schedule = DynamicSchedule(growth, backoff, interval)
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    state = start(schedule)
    for overflow in overflows:
        state = schedule.next_state(state, FOUND[overflow])
        torch._amp_update_scale_(scale, tracker, FOUND[overflow], growth, backoff, interval)
        # Where the kernel leaves the bounds ours stays; the kernel is put back to go on from there.
        scale.clamp_(schedule.min_scale, schedule.max_scale)
        assert (state.scale, state.growth_tracker) == (scale, tracker)


def test_next_state_leaves_the_state_it_was_given_as_it_was():
    for schedule in (DynamicSchedule(growth_interval=1), HysteresisSchedule(growth_interval=1)):
        for overflow in (False, True):
            state = start(schedule)
            before = [t.clone() for t in (state.scale, state.growth_tracker)]
            credit = state.hysteresis_tracker.clone()
            schedule.next_state(state, FOUND[overflow])
            assert [state.scale, state.growth_tracker] == before
            assert state.hysteresis_tracker == credit


def test_next_state_keeps_shapes_and_dtypes():
    for schedule, overflow in itertools.product(
        (DynamicSchedule(), HysteresisSchedule(), StaticSchedule()), (False, True)
    ):
        state = schedule.next_state(start(schedule), FOUND[overflow])
        tensors = (state.scale, state.growth_tracker, state.hysteresis_tracker)
        assert [(t.shape, t.dtype) for t in tensors] == [
            ((), torch.float32),
            ((), torch.int32),
            ((), torch.int32),
        ]


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DynamicSchedule, HysteresisSchedule])
def test_the_scale_never_leaves_its_default_bounds(kind):
    schedule = kind(growth_interval=1)
    down = scales(schedule, [True] * 100)
    up = scales(schedule, [False] * 300)
    assert down[-1] == 2.0**-24 == min(down)
    assert up[-1] == 2.0**127 == max(up)
    assert scales(schedule, [True] * 3 + [False] * 200, 2.0**-13)[-1] == 2.0**127


def test_the_scale_never_leaves_bounds_of_the_users():
    schedule = DynamicSchedule(3.0, 0.3, 1, min_scale=100.0, max_scale=1000.0)
    assert scales(schedule, flags("...xxx."), 500.0) == [
        *(1000.0, 1000.0, 1000.0),
        pytest.approx(300.0),
        *(100.0, 100.0, 300.0),
    ]


def test_after_any_number_of_overflows_a_clean_batch_is_stepped_right():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    for _ in range(200):
        iteration(scaler, optimizer, parameter, INF)
    assert (scaler.get_scale(), parameter.item()) == (2.0**-24, 1.0)
    iteration(scaler, optimizer, parameter, 0.25)
    assert parameter.item() == 0.75


# -- static ----------------------------------------------------------------------------------------


def test_a_static_scale_never_moves():
    assert set(scales(StaticSchedule(growth_interval=1), flags("..xx..x"), 128.0)) == {128.0}


def test_a_static_scale_still_skips():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler(128.0, schedule=StaticSchedule())
    iteration(scaler, optimizer, parameter, INF)
    assert (parameter.item(), scaler.get_scale()) == (1.0, 128.0)
    iteration(scaler, optimizer, parameter, 0.25)
    assert (parameter.item(), scaler.get_scale()) == (0.75, 128.0)


# -- hysteresis ------------------------------------------------------------------------------------


@dataclass
class MegatronRule:
    """Megatron-LM's rule on Python numbers, from its documented settings."""

    scale: float
    interval: int
    hysteresis: int
    clean: int = 0
    credit: int = field(init=False)

    def __post_init__(self) -> None:
        self.credit = self.hysteresis

    def after(self, overflow: bool) -> float:
        if overflow:
            self.clean, self.credit = 0, self.credit - 1
            if self.credit <= 0:
                self.scale /= 2
        else:
            self.clean += 1
            if self.clean == self.interval:
                self.scale, self.clean, self.credit = self.scale * 2, 0, self.hysteresis
        return self.scale


@dataclass
class DeepSpeedRule:
    """DeepSpeed's rule on Python numbers: iterations are numbered, not counted."""

    scale: float
    interval: int
    hysteresis: int
    consecutive: bool
    now: int = 0
    last_overflow: int = -1
    credit: int = field(init=False)

    def __post_init__(self) -> None:
        self.credit = self.hysteresis

    def after(self, overflow: bool) -> float:
        if overflow:
            if self.credit == 1:
                self.scale /= 2
            else:
                self.credit -= 1
            self.last_overflow = self.now
        else:
            grows = (self.now - self.last_overflow) % self.interval == 0
            if self.consecutive or grows:
                self.credit = self.hysteresis
            if grows:
                self.scale *= 2
        self.now += 1
        return self.scale


@given(histories, st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_hysteresis_is_megatrons_rule(overflows, interval, hysteresis):
    rule = MegatronRule(1.0, interval, hysteresis)
    schedule = HysteresisSchedule(
        growth_interval=interval, hysteresis=hysteresis, min_scale=2.0**-100
    )
    assert scales(schedule, overflows, 1.0) == [rule.after(overflow) for overflow in overflows]


@pytest.mark.parametrize("consecutive", [False, True])
@given(overflows=histories, interval=st.integers(1, 4), hysteresis=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_hysteresis_is_deepspeeds_rule(consecutive, overflows, interval, hysteresis):
    rule = DeepSpeedRule(1.0, interval, hysteresis, consecutive)
    schedule = HysteresisSchedule(
        growth_interval=interval,
        hysteresis=hysteresis,
        consecutive=consecutive,
        min_scale=2.0**-100,
    )
    assert scales(schedule, overflows, 1.0) == [rule.after(overflow) for overflow in overflows]


@given(histories, st.booleans())
@settings(max_examples=30, deadline=None)
def test_hysteresis_of_one_is_torchs_rule(overflows, consecutive):
    one = HysteresisSchedule(growth_interval=3, hysteresis=1, consecutive=consecutive)
    assert scales(one, overflows) == scales(DynamicSchedule(growth_interval=3), overflows)


def test_a_forgiven_overflow_is_still_skipped_and_a_scaler_carries_the_credit():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler(8.0, schedule=HysteresisSchedule(hysteresis=2))
    trace = []
    for gradient in (INF, 0.0, INF, INF):
        iteration(scaler, optimizer, parameter, gradient)
        trace.append((scaler.get_scale(), parameter.item()))
    assert trace == [(8.0, 1.0), (8.0, 1.0), (4.0, 1.0), (2.0, 1.0)]


# -- starts and setters ----------------------------------------------------------------------------


def test_settings_of_the_scaler_are_settings_of_its_schedule():
    scaler = DistGradScaler(
        "cpu", growth_factor=4.0, backoff_factor=0.25, growth_interval=2, min_scale=1.0
    )
    parameter, optimizer = sgd(1.0)
    seen = []
    for gradient in (0.0, 0.0, INF, INF):
        iteration(scaler, optimizer, parameter, gradient)
        seen.append(scaler.get_scale())
    assert seen == [65536.0, 262144.0, 65536.0, 16384.0]


def test_setters_move_the_scale_from_the_next_update():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    scaler.set_growth_interval(1)
    scaler.set_growth_factor(8.0)
    iteration(scaler, optimizer, parameter, 0.0)
    assert scaler.get_scale() == 8192.0
    scaler.set_backoff_factor(0.125)
    iteration(scaler, optimizer, parameter, INF)
    assert scaler.get_scale() == 1024.0
    assert (
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    ) == (8.0, 0.125, 1)
