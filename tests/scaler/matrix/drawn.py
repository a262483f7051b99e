"""Programs drawn at random: layout, optimizers, orders of calls, scales, and which rank is hit."""

from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import strategies as st

from tests.scaler.matrix.layouts import LAYOUTS, WORLD
from tests.scaler.matrix.programs import Fault, Iteration, Program
from tests.scaler.matrix.reference import KINDS

__all__ = ["hold", "programs"]

RANK = st.integers(0, WORLD - 1)
FAULT = st.builds(
    Fault,
    rank=RANK,
    value=st.sampled_from(["inf", "-inf", "nan", "loss"]),
    optimizer=st.integers(0, 1),
    where=st.integers(0, 63),
)
ITERATION = st.builds(
    Iteration,
    order=st.sampled_from(["step", "unscale", "clip", "grouped"]),
    micro=st.integers(1, 2),
    faults=st.lists(FAULT, max_size=2).map(tuple),
    reverse=st.booleans(),
    then=st.sampled_from(["", "", "reload", "repickle", "new scale", "interval"]),
)


@st.composite
def programs(draw: Any) -> Program:
    layout = draw(st.sampled_from(list(LAYOUTS)))
    iterations = tuple(draw(st.lists(ITERATION, min_size=1, max_size=4)))
    optimizers = draw(st.integers(1, 2))
    kinds = list(KINDS)
    # torch refuses "capturable" in a step that has gradients. Ranks whose experts got none go on,
    # and only a message after every step could tell them.
    if layout == "DDP, idle experts" and optimizers == 2:
        kinds.remove("Adam capturable")
    kind = draw(st.sampled_from(kinds))
    # From near the lower bound to where the squares of scaled gradients overflow.
    init_scale = draw(st.sampled_from([2.0**16, 1.0, 2.0**-10, 31622.75, 2.0**24, 2.0**100]))
    astray = None
    if draw(st.integers(0, 9)) == 9:
        what = ["scale"]
        # A fused optimizer divides by the scale, unscale_ multiplies by its inverse.
        rounds_alike = "fused" not in kind or init_scale != 31622.75
        if iterations[-1].order == "step" and rounds_alike:
            what.append("call")
        # At first sight nothing tells two optimizers from each other, and an unpickled scaler sees
        # each for the first time.
        if optimizers == 2 and len(iterations) > 1 and iterations[-2].then != "repickle":
            what.append("swap")
        astray = (draw(st.sampled_from(what)), draw(RANK))
    interval = draw(st.integers(1, 3))
    return Program(layout, kind, iterations, optimizers, init_scale, interval, astray)


def hold(
    check: Callable[..., None], draws: int, seed: int | None, *drawn: Any, **settings: Any
) -> None:
    """Call ``check`` with so many draws of these strategies: without a seed always the same."""
    given = hypothesis.settings(
        max_examples=draws,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
        **settings,
    )(hypothesis.given(*drawn)(check))
    (given if seed is None else hypothesis.seed(seed)(given))()
