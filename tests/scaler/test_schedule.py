"""How the loss scale moves: torch's kernel, Megatron's and DeepSpeed's rules on Python numbers."""

from __future__ import annotations

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

FOUND = {flag: torch.full((), float(flag)) for flag in (False, True)}
few = settings(max_examples=40, deadline=None)
histories = st.lists(st.booleans(), min_size=1, max_size=60)
counts = st.integers(1, 4)


def states(schedule: Schedule, overflows: list[bool], scale: float) -> list[ScaleState]:
    """The state before the first and after each iteration; none is written to."""
    device = torch.device("cpu")
    seen = [ScaleState.initial(scale, 0, schedule.initial_hysteresis, device)]
    for overflow in overflows:
        before = seen[-1]
        kept = [t.clone() for t in (before.scale, before.growth_tracker, before.hysteresis_tracker)]
        seen.append(schedule.next_state(before, FOUND[overflow]))
        assert [before.scale, before.growth_tracker, before.hysteresis_tracker] == kept
        after = seen[-1]
        assert (after.scale.shape, after.scale.dtype) == ((), torch.float32)
        assert (after.growth_tracker.shape, after.growth_tracker.dtype) == ((), torch.int32)
    return seen


def scales(schedule: Schedule, overflows: list[bool], scale: float = 65536.0) -> list[float]:
    return [state.scale.item() for state in states(schedule, overflows, scale)[1:]]


@given(histories, st.floats(1.01, 10.0), st.floats(0.01, 0.99), counts)
@few
def test_dynamic_is_torchs_kernel_bit_for_bit(overflows, growth, backoff, interval):
    schedule = DynamicSchedule(growth, backoff, interval)
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    found = states(schedule, overflows, 2.0**16)[1:]
    for overflow, state in zip(overflows, found, strict=True):
        torch._amp_update_scale_(scale, tracker, FOUND[overflow], growth, backoff, interval)
        # Where the kernel leaves the bounds ours stays; the kernel is put back to go on from there.
        scale.clamp_(schedule.min_scale, schedule.max_scale)
        assert (state.scale, state.growth_tracker) == (scale, tracker)


@dataclass
class MegatronRule:
    """Megatron-LM's rule on Python numbers, from its documented settings."""

    interval: int
    hysteresis: int
    scale: float = 1.0
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

    interval: int
    hysteresis: int
    consecutive: bool
    scale: float = 1.0
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


@given(histories, counts, counts, st.booleans())
@few
def test_hysteresis_is_megatrons_and_deepspeeds_rule(overflows, interval, hysteresis, consecutive):
    rules: list[MegatronRule | DeepSpeedRule] = [DeepSpeedRule(interval, hysteresis, consecutive)]
    if not consecutive:
        rules.append(MegatronRule(interval, hysteresis))
    schedule = HysteresisSchedule(
        growth_interval=interval,
        hysteresis=hysteresis,
        consecutive=consecutive,
        min_scale=2.0**-100,
    )
    found = scales(schedule, overflows, 1.0)
    for rule in rules:
        assert found == [rule.after(overflow) for overflow in overflows], rule
    if hysteresis == 1:
        torchs = DynamicSchedule(growth_interval=interval, min_scale=2.0**-100)
        assert found == scales(torchs, overflows, 1.0)


def test_the_scale_never_leaves_its_bounds():
    for kind in (DynamicSchedule, HysteresisSchedule):
        schedule = kind(growth_interval=1)
        assert min(scales(schedule, [True] * 100)) == 2.0**-24
        assert max(scales(schedule, [False] * 300, 2.0**-13)) == 2.0**127
    bounded = DynamicSchedule(3.0, 0.3, 1, min_scale=100.0, max_scale=1000.0)
    found = scales(bounded, [False] * 3 + [True] * 3 + [False], 500.0)
    assert found == pytest.approx([1000.0, 1000.0, 1000.0, 300.0, 100.0, 100.0, 300.0])
    assert set(scales(StaticSchedule(growth_interval=1), [False, True, True], 8.0)) == {8.0}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (HysteresisSchedule(hysteresis=2), [8.0, 8.0, 4.0, 2.0]),
        (StaticSchedule(), [8.0] * 4),
        (DynamicSchedule(growth_interval=1), [4.0, 8.0, 4.0, 2.0]),
    ],
    ids=["hysteresis", "static", "dynamic"],
)
def test_a_scaler_moves_by_its_schedule_and_skips_what_is_forgiven_too(schedule, expected):
    parameter, optimizer = sgd()
    scaler, trace = cpu_scaler(8.0, schedule=schedule), []
    for gradient in (INF, 0.0, INF, INF):
        iteration(scaler, optimizer, parameter, gradient)
        trace.append(scaler.get_scale())
    assert (trace, parameter.item()) == (expected, 1.0)


def test_after_any_number_of_overflows_a_clean_batch_is_stepped_and_guards_have_fired():
    """icefall ends a run below 1e-5, fairseq below 1e-4."""
    (parameter, optimizer), scaler = sgd(), cpu_scaler()
    for _ in range(100):
        iteration(scaler, optimizer, parameter, INF)
    assert scaler.get_scale() == 2.0**-24 < 1e-5
    iteration(scaler, optimizer, parameter, 0.25)
    assert parameter.item() == 0.75


def test_settings_and_setters_of_the_scaler_are_those_of_its_schedule():
    scaler = DistGradScaler(
        "cpu", growth_factor=4.0, backoff_factor=0.25, growth_interval=2, max_scale=2.0**18
    )
    (parameter, optimizer), seen = sgd(), []
    for number, gradient in enumerate((0.0, 0.0, INF, INF, 0.0, INF)):
        if number == 4:
            scaler.set_growth_interval(1)
            scaler.set_growth_factor(8.0)
            scaler.set_backoff_factor(0.5)
        iteration(scaler, optimizer, parameter, gradient)
        seen.append(scaler.get_scale())
    assert seen == [2.0**16, 2.0**18, 2.0**16, 2.0**14, 2.0**17, 2.0**16]
    got = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    assert got == (8.0, 0.5, 1)
