"""Programs drawn at random: layout, optimizers, orders of calls, scales, and faults of ranks."""

from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import strategies as st

from tests.scaler.matrix.layouts import LAYOUTS, WORLD
from tests.scaler.matrix.programs import Fault, Iteration, Program
from tests.scaler.matrix.reference import KINDS

__all__ = ["hold", "programs"]

RANK = st.integers(0, WORLD - 1)
FAULT_VALUE = st.sampled_from(["inf", "-inf", "nan", "loss"])
FAULT = st.builds(
    Fault,
    rank=RANK,
    value=FAULT_VALUE,
    optimizer=st.integers(0, 1),
    position=st.integers(0, 63),
)
AT_MOST_TWO_FAULTS = st.lists(FAULT, max_size=2).map(tuple)
ORDER = st.sampled_from(["step", "unscale", "clip", "grouped"])
# The empty text is there twice, so that a third of the iterations change nothing.
CHANGE = st.sampled_from(["", "", "reload", "repickle", "new scale", "interval"])
ITERATION = st.builds(
    Iteration,
    order=ORDER,
    micro=st.integers(1, 2),
    faults=AT_MOST_TWO_FAULTS,
    reverse=st.booleans(),
    change=CHANGE,
)
ITERATIONS = st.lists(ITERATION, min_size=1, max_size=4)
LAYOUT = st.sampled_from(list(LAYOUTS))
# The inverse of this scale is rounded.
INEXACT_SCALE = 31622.75
# From near the lower bound to a scale at which the squares of scaled gradients overflow.
SMALL_SCALES = [1.0, 2.0**-10]
LARGE_SCALES = [2.0**24, 2.0**100]
INIT_SCALE = st.sampled_from([2.0**16, *SMALL_SCALES, INEXACT_SCALE, *LARGE_SCALES])
ZERO_TO_NINE = st.integers(0, 9)


@st.composite
def programs(draw: Any) -> Program:
    """Draw a program; in one of ten a rank deviates in the last iteration."""
    layout = draw(LAYOUT)
    iterations = draw(ITERATIONS)
    optimizers = draw(st.integers(1, 2))
    kinds = _kinds_in(layout, optimizers)
    kind = draw(st.sampled_from(kinds))
    init_scale = draw(INIT_SCALE)
    astray = None
    if draw(ZERO_TO_NINE) == 9:
        is_rounded = "fused" in kind and init_scale == INEXACT_SCALE
        deviations = _deviations_in(iterations, optimizers, is_rounded)
        deviation = draw(st.sampled_from(deviations))
        astray = (deviation, draw(RANK))
    interval = draw(st.integers(1, 3))
    return Program(layout, kind, tuple(iterations), optimizers, init_scale, interval, astray)


def _kinds_in(layout: str, optimizers: int) -> list[str]:
    """Return the optimizers that a program of this layout may have."""
    kinds = list(KINDS)
    # torch refuses "capturable" in a step that has gradients. Ranks without gradients for their
    # experts go on, and only a message after every step could stop them.
    if layout == "DDP, idle experts" and optimizers == 2:
        kinds.remove("Adam capturable")
    return kinds


def _deviations_in(iterations: list[Iteration], optimizers: int, is_rounded: bool) -> list[str]:
    """Return the deviations of one rank that a program may have in its last iteration.

    Args:
        iterations: The iterations of the program.
        optimizers: The number of its optimizers.
        is_rounded: Whether step and unscale_ may round differently, because a fused optimizer
            divides by the scale and unscale_ multiplies by its inverse.
    """
    deviations = ["scale"]
    if iterations[-1].order == "step" and not is_rounded:
        deviations.append("call")
    # Ranks can only tell two optimizers apart after an iteration of the same scaler object.
    if optimizers == 2 and len(iterations) > 1:
        previous = iterations[-2]
        if previous.change != "repickle":
            deviations.append("swap")
    return deviations


def hold(
    check: Callable[..., None],
    draws: int,
    seed: int | None,
    *strategies: Any,
    **settings: Any,
) -> None:
    """Call a check with values that are drawn from strategies.

    Args:
        check: A function that raises if the values are wrong.
        draws: The number of calls.
        seed: The seed of the draws. None draws the same values in every run.
        strategies: A strategy for each argument of the check.
        settings: As of `hypothesis.settings`.
    """
    all_health_checks = list(hypothesis.HealthCheck)
    is_always_the_same = seed is None
    with_settings = hypothesis.settings(
        max_examples=draws,
        deadline=None,
        database=None,
        derandomize=is_always_the_same,
        suppress_health_check=all_health_checks,
        print_blob=False,
        **settings,
    )
    with_draws = hypothesis.given(*strategies)
    test = with_settings(with_draws(check))
    if seed is not None:
        test = hypothesis.seed(seed)(test)
    test()
