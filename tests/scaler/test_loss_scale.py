"""Rules of the loss scale: Megatron's and DeepSpeed's hysteresis, and the bounds.

`test_oracle` compares torch's rule with torch. `test_state` has the scalers that skip and update by
a loss scale.
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

few_examples = settings(max_examples=40, deadline=None)
histories = st.lists(st.booleans(), min_size=1, max_size=60)
counts = st.integers(1, 4)


def scales(loss_scale: LossScale, overflows: list[bool], scale: float = 65536.0) -> list[float]:
    """Return the scale after each iteration, and check that no state is overwritten."""
    cpu = torch.device("cpu")
    state = ScaleState.initial(scale, 0, loss_scale.initial_hysteresis, cpu)
    history = []
    for overflow in overflows:
        copied_state = copy.deepcopy(state)
        next_state = loss_scale.next_state(state, torch.tensor(float(overflow)))
        assert state == copied_state
        state = next_state
        assert state.scale.shape == ()
        assert state.scale.dtype == torch.float32
        history.append(state.scale.item())
    return history


def scales_by_iteration_numbers(
    overflows: list[bool], interval: int, hysteresis: int, consecutive: bool
) -> Iterator[float]:
    """Yield the scales of DeepSpeed's rule, or of Megatron's if not `consecutive`.

    DeepSpeed subtracts iteration numbers where `HysteresisLossScale` counts iterations.
    """
    scale = 1.0
    last_overflow = -1
    credit = hysteresis
    for iteration, overflow in enumerate(overflows):
        if overflow:
            last_overflow = iteration
            if credit == 1:
                scale /= 2
            else:
                credit -= 1
            yield scale
            continue
        grows = (iteration - last_overflow) % interval == 0
        if grows:
            scale *= 2
        if grows or consecutive:
            credit = hysteresis
        yield scale


@given(histories, counts, counts, st.booleans())
@few_examples
def test_hysteresis_is_megatrons_and_deepspeeds_rule(overflows, interval, hysteresis, consecutive):
    loss_scale = HysteresisLossScale(
        growth_interval=interval,
        hysteresis=hysteresis,
        consecutive=consecutive,
        min_scale=2.0**-100,
    )
    expected = scales_by_iteration_numbers(overflows, interval, hysteresis, consecutive)
    assert scales(loss_scale, overflows, 1.0) == list(expected)


@pytest.mark.parametrize("kind", [DynamicLossScale, HysteresisLossScale])
def test_the_scale_never_shrinks_below_its_default_minimum(kind):
    loss_scale = kind(growth_interval=1)
    smallest = min(scales(loss_scale, [True] * 100))
    assert smallest == 2.0**-24


@pytest.mark.parametrize("kind", [DynamicLossScale, HysteresisLossScale])
def test_the_scale_never_grows_beyond_float32(kind):
    loss_scale = kind(growth_interval=1)
    largest = max(scales(loss_scale, [False] * 300, 2.0**-13))
    assert largest == 2.0**127


def test_the_scale_stays_within_the_bounds_of_its_user():
    loss_scale = DynamicLossScale(3.0, 0.3, 1, min_scale=100.0, max_scale=1000.0)
    overflows = [False, False, False, True, True, True, False]
    expected = [1000.0, 1000.0, 1000.0, 300.0, 100.0, 100.0, 300.0]
    assert scales(loss_scale, overflows, 500.0) == pytest.approx(expected)
