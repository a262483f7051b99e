"""Random programs on real ranks: which calls, in which order, which rank is hit by what.

Two kinds: symmetric ones, which spread a model in every layout (`programs`), and asymmetric ones,
in which ranks, threads and iterations do not do the same (`asymmetric_programs`).

``python -m tests.scaler.test_random_programs DRAWS SEED`` draws so many of the first outside
pytest, ``python -m tests.scaler.test_random_programs asymmetric DRAWS SEED`` of the second; each
prints every program that breaks the invariant and counts them.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests.ranks import RankPool
from tests.scaler.asymmetric_draws import draw_programs
from tests.scaler.asymmetric_judge import AsymmetricJudge, new_pool
from tests.scaler.asymmetric_programs import Event, Setting
from tests.scaler.asymmetric_programs import Program as AsymmetricProgram
from tests.scaler.judge import Judge
from tests.scaler.layouts import LAYOUTS, WORLD
from tests.scaler.programs import Fault, Iteration, Program
from tests.scaler.reference import KINDS

DRAWS = 25
ALL_DRAWS = 10_000
PARTS = 20
ASYMMETRIC_DRAWS = 80
ALL_ASYMMETRIC_DRAWS = 2_000
# Programs that ranks are sent at once; after one that breaks the invariant they start anew.
CHUNK = 20

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
    astray = None
    if draw(st.integers(0, 9)) == 9:
        what = ["scale"]
        if iterations[-1].order == "step":
            what.append("call")
        # At first sight nothing tells two optimizers from each other, and an unpickled scaler sees
        # each for the first time.
        if optimizers == 2 and len(iterations) > 1 and iterations[-2].then != "repickle":
            what.append("swap")
        astray = (draw(st.sampled_from(what)), draw(RANK))
    kinds = list(KINDS)
    # torch refuses "capturable" in a step that has gradients. Ranks whose experts got none go on,
    # and only a message after every step could tell them.
    if layout == "DDP, idle experts" and optimizers == 2:
        kinds.remove("Adam capturable")
    return Program(
        layout,
        draw(st.sampled_from(kinds)),
        iterations,
        optimizers,
        # From near the lower bound to where the squares of scaled gradients overflow.
        init_scale=draw(st.sampled_from([2.0**16, 1.0, 2.0**-10, 31622.75, 2.0**24, 2.0**100])),
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


def _check(ranks, draws: int, seed: int | None) -> None:
    judge = Judge(ranks(WORLD))

    def holds(program: Program) -> None:
        assert judge.judge(program) == [[]]

    _draw(holds, draws, seed)


def test_invariant_holds_in_random_programs(ranks):
    _check(ranks, DRAWS, None)


def test_a_step_taken_before_another_optimizer_refuses_its_own_is_no_fault(ranks):
    """torch's fused Adagrad refuses plain tensors beside DTensors, after the other has stepped."""
    iterations = (Iteration("grouped", reverse=True),)
    program = Program("plain and DTensor", "Adagrad fused", iterations, optimizers=2)
    assert Judge(ranks(WORLD)).judge(program) == [[]]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_invariant_holds_in_ten_thousand_random_programs(ranks, part):
    _check(ranks, ALL_DRAWS // PARTS, part)


def _broken(programs: list[AsymmetricProgram]) -> dict[AsymmetricProgram, list[str]]:
    """The programs that break the invariant, and how."""
    with new_pool() as pool:
        judge = AsymmetricJudge(pool)
        chunks = [programs[start : start + CHUNK] for start in range(0, len(programs), CHUNK)]
        found = [wrong for chunk in chunks for wrong in judge.judge(*chunk)]
    return {each: wrong for each, wrong in zip(programs, found, strict=True) if wrong}


def test_ranks_agree_in_asymmetric_programs():
    assert _broken(draw_programs(ASYMMETRIC_DRAWS, seed=0)) == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(1, 5))
def test_ranks_agree_in_two_thousand_asymmetric_programs(part):
    assert _broken(draw_programs(ALL_ASYMMETRIC_DRAWS // 4, seed=part)) == {}


@pytest.mark.parametrize("what", ["plain", "inf", "late everywhere", "optimizer raises"])
def test_the_asymmetric_judge_sees_a_value_that_is_off(what, monkeypatch):
    from tests.scaler import asymmetric_judge, asymmetric_reference

    right = asymmetric_reference.initial_values
    monkeypatch.setattr(
        asymmetric_reference, "initial_values", lambda *args: [v + 1 for v in right(*args)]
    )
    program = AsymmetricProgram(Setting(), (Event(what),))
    with new_pool() as pool:
        assert asymmetric_judge.AsymmetricJudge(pool).judge(program) != [[]]


def main() -> None:
    if sys.argv[1] == "asymmetric":
        draws, seed = map(int, sys.argv[2:])
        start = time.monotonic()
        broken = _broken(draw_programs(draws, seed))
        for program, wrong in broken.items():
            print(program, *wrong, sep="\n    ", flush=True)
        _summary(draws, "asymmetric programs", seed, len(broken), start)
        return
    draws, seed = map(int, sys.argv[1:])
    seen = [0, 0]
    start = time.monotonic()
    with RankPool(WORLD) as pool:
        judge = Judge(pool)

        def tell(program: Program) -> None:
            wrong = judge.judge(program)[0]
            seen[0] += 1
            seen[1] += bool(wrong)
            if wrong:
                print(program, *wrong, sep="\n    ", flush=True)

        _draw(tell, draws, seed)
    _summary(seen[0], "programs", seed, seen[1], start)


def _summary(draws: int, what: str, seed: int, broken: int, start: float) -> None:
    print(
        f"{datetime.date.today()}, torch {torch.__version__}: {draws} {what} drawn from seed "
        f"{seed}, {broken} broke the invariant; {time.monotonic() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
