"""How the loss scale moves: Megatron's and DeepSpeed's rules; torch's is in `test_oracle`.

That a scaler moves by its schedule, and skips what is forgiven, `test_state` has.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distamp.scaler import (
    DynamicLossScale,
    HysteresisLossScale,
    LossScale,
    ScaleState,
)

few = settings(max_examples=40, deadline=None)
histories = st.lists(st.booleans(), min_size=1, max_size=60)
counts = st.integers(1, 4)


def scales(schedule: LossScale, overflows: list[bool], scale: float = 65536.0) -> list[float]:
    """The scale after each iteration; no state is written to."""
    state, seen = ScaleState.initial(scale, 0, schedule.initial_hysteresis, torch.device("cpu")), []
    for overflow in overflows:
        before, kept = state, copy.deepcopy(state)
        state = schedule.next_state(before, torch.tensor(float(overflow)))
        assert before == kept
        assert (state.scale.shape, state.scale.dtype) == ((), torch.float32)
        seen.append(state.scale.item())
    return seen


def deepspeed(
    overflows: list[bool], interval: int, hysteresis: int, consecutive: bool
) -> Iterator[float]:
    """DeepSpeed's rule: iterations are numbered, not counted. Not consecutive it is Megatron's."""
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
    schedule = HysteresisLossScale(
        growth_interval=interval,
        hysteresis=hysteresis,
        consecutive=consecutive,
        min_scale=2.0**-100,
    )
    found = scales(schedule, overflows, 1.0)
    assert found == list(deepspeed(overflows, interval, hysteresis, consecutive))


def test_the_scale_never_leaves_its_bounds():
    for kind in (DynamicLossScale, HysteresisLossScale):
        schedule = kind(growth_interval=1)
        assert min(scales(schedule, [True] * 100)) == 2.0**-24 < 1e-5, "where guards have fired"
        assert max(scales(schedule, [False] * 300, 2.0**-13)) == 2.0**127
    bounded = DynamicLossScale(3.0, 0.3, 1, min_scale=100.0, max_scale=1000.0)
    found = scales(bounded, [False] * 3 + [True] * 3 + [False], 500.0)
    assert found == pytest.approx([1000.0, 1000.0, 1000.0, 300.0, 100.0, 100.0, 300.0])
