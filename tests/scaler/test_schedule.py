"""How the loss scale moves: torch's kernel, Megatron's and DeepSpeed's rules on Python numbers."""

from collections.abc import Iterator

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
    """The state after each iteration; none is written to."""
    seen = [ScaleState.initial(scale, 0, schedule.initial_hysteresis, torch.device("cpu"))]
    for overflow in overflows:
        before = seen[-1]
        kept = [t.clone() for t in (before.scale, before.growth_tracker, before.hysteresis_tracker)]
        seen.append(schedule.next_state(before, FOUND[overflow]))
        assert [before.scale, before.growth_tracker, before.hysteresis_tracker] == kept
        assert (seen[-1].scale.shape, seen[-1].scale.dtype) == ((), torch.float32)
    return seen[1:]


def scales(schedule: Schedule, overflows: list[bool], scale: float = 65536.0) -> list[float]:
    return [state.scale.item() for state in states(schedule, overflows, scale)]


@given(histories, st.floats(1.01, 10.0), st.floats(0.01, 0.99), counts)
@few
def test_dynamic_is_torchs_kernel_bit_for_bit(overflows, growth, backoff, interval):
    schedule = DynamicSchedule(growth, backoff, interval)
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for overflow, state in zip(overflows, states(schedule, overflows, 2.0**16), strict=True):
        torch._amp_update_scale_(scale, tracker, FOUND[overflow], growth, backoff, interval)
        # Where the kernel leaves the bounds ours stays; the kernel is put back to go on from there.
        scale.clamp_(schedule.min_scale, schedule.max_scale)
        assert (state.scale, state.growth_tracker) == (scale, tracker)
        assert state.growth_tracker.dtype is torch.int32


def megatron(overflows: list[bool], interval: int, hysteresis: int) -> Iterator[float]:
    """Megatron-LM's rule, from its documented settings."""
    scale, clean, credit = 1.0, 0, hysteresis
    for overflow in overflows:
        clean, credit = (0, credit - 1) if overflow else (clean + 1, credit)
        if overflow and credit <= 0:
            scale /= 2
        elif clean == interval:
            scale, clean, credit = scale * 2, 0, hysteresis
        yield scale


def deepspeed(
    overflows: list[bool], interval: int, hysteresis: int, consecutive: bool
) -> Iterator[float]:
    """DeepSpeed's rule: iterations are numbered, not counted."""
    scale, last_overflow, credit = 1.0, -1, hysteresis
    for now, overflow in enumerate(overflows):
        grows = not overflow and (now - last_overflow) % interval == 0
        if overflow:
            scale, credit = (scale / 2, 1) if credit == 1 else (scale, credit - 1)
            last_overflow = now
        elif consecutive or grows:
            credit = hysteresis
        if grows:
            scale *= 2
        yield scale


@given(histories, counts, counts, st.booleans())
@few
def test_hysteresis_is_megatrons_and_deepspeeds_rule(overflows, interval, hysteresis, consecutive):
    schedule = HysteresisSchedule(
        growth_interval=interval,
        hysteresis=hysteresis,
        consecutive=consecutive,
        min_scale=2.0**-100,
    )
    found = scales(schedule, overflows, 1.0)
    assert found == list(deepspeed(overflows, interval, hysteresis, consecutive))
    assert consecutive or found == list(megatron(overflows, interval, hysteresis))


def test_the_scale_never_leaves_its_bounds():
    for kind in (DynamicSchedule, HysteresisSchedule):
        schedule = kind(growth_interval=1)
        assert min(scales(schedule, [True] * 100)) == 2.0**-24 < 1e-5, "where guards have fired"
        assert max(scales(schedule, [False] * 300, 2.0**-13)) == 2.0**127
    bounded = DynamicSchedule(3.0, 0.3, 1, min_scale=100.0, max_scale=1000.0)
    found = scales(bounded, [False] * 3 + [True] * 3 + [False], 500.0)
    assert found == pytest.approx([1000.0, 1000.0, 1000.0, 300.0, 100.0, 100.0, 300.0])


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
