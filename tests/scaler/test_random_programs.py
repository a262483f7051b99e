"""Random programs on real ranks: which calls, in which order, which rank is hit by what.

``python -m tests.scaler.test_random_programs DRAWS SEED [FORM]`` draws so many outside pytest,
prints every program that breaks the invariant and counts them. Ranks that are lost are in
`test_lost_ranks`.
"""

import datetime
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests.ranks import RankPool
from tests.scaler.matrix.judge import Judge
from tests.scaler.matrix.layouts import LAYOUTS, WORLD
from tests.scaler.matrix.programs import Fault, Iteration, Program
from tests.scaler.matrix.reference import KINDS

DRAWS = 12
ALL_DRAWS = 10_000
PARTS = 20
# Steps taken together by a scaler, and by a StepGuard, which also clips as it steps.
FORMS = ["distamp", "guard"]

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
def programs(draw) -> Program:
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
    return Program(
        layout,
        kind,
        iterations,
        optimizers,
        init_scale=init_scale,
        growth_interval=draw(st.integers(1, 3)),
        astray=astray,
    )


def _draw(check: Callable[[Program], None], draws: int, seed: int | None) -> None:
    @hypothesis.settings(
        max_examples=draws,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
        # A draw is small as it is, and shrinking one takes hundreds of runs on real ranks.
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(programs())
    def each(program: Program) -> None:
        check(program)

    (each if seed is None else hypothesis.seed(seed)(each))()


def _fitted(program: Program, form: str) -> Program:
    """A program as this form of taking steps together has it: a guard loads no scale."""
    if form == "guard" and program.astray is not None and program.astray[0] == "scale":
        return replace(program, astray=None)
    return program


def _check(ranks, draws: int, seed: int | None, form: str = "distamp") -> None:
    judge = Judge(ranks(WORLD), form)

    def holds(program: Program) -> None:
        assert judge.judge(_fitted(program, form)) == [[]]

    _draw(holds, draws, seed)


@pytest.mark.parametrize("form", FORMS)
def test_invariant_holds_in_random_programs(ranks, form):
    _check(ranks, DRAWS, None, form)


def test_a_step_taken_before_another_optimizer_refuses_its_own_is_no_fault(ranks):
    """torch's fused Adagrad refuses plain tensors beside DTensors, after the other has stepped."""
    iterations = (Iteration("grouped", reverse=True),)
    program = Program("plain and DTensor", "Adagrad fused", iterations, optimizers=2)
    assert Judge(ranks(WORLD)).judge(program) == [[]]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", range(PARTS))
def test_invariant_holds_in_ten_thousand_random_programs(ranks, part, form):
    _check(ranks, ALL_DRAWS // PARTS, part, form)


def main() -> None:
    draws, seed = map(int, sys.argv[1:3])
    form = sys.argv[3] if len(sys.argv) > 3 else FORMS[0]
    broke: list[bool] = []
    start = time.monotonic()
    with RankPool(WORLD) as pool:
        judge = Judge(pool, form)

        def tell(program: Program) -> None:
            wrong = judge.judge(_fitted(program, form))[0]
            broke.append(bool(wrong))
            if wrong:
                print(program, *wrong, sep="\n    ", flush=True)

        _draw(tell, draws, seed)
    print(
        f"{datetime.date.today()}, torch {torch.__version__}: {len(broke)} programs drawn from "
        f"seed {seed}, {sum(broke)} broke the invariant; {time.monotonic() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
