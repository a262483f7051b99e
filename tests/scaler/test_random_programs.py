"""Random programs on real ranks: calls, their order, and the ranks that have a fault.

`test_lost_ranks` has ranks that are lost.
"""

from dataclasses import replace

import hypothesis
import pytest

from tests.scaler.matrix.drawn import hold, programs
from tests.scaler.matrix.judge import Judge
from tests.scaler.matrix.layouts import WORLD

# Shrinking a program takes hundreds of runs on real ranks, and a drawn program is small already.
WITHOUT_SHRINKING = [hypothesis.Phase.generate]


def check_programs(judge: Judge, draws: int, seed: int | None) -> None:
    """Judge so many random programs."""

    def invariant_holds(program):
        if judge.scaler == "guard" and program.deviation == "scale":
            # A guard loads no scale.
            program = replace(program, astray=None)
        assert judge.judge(program) == [], program

    hold(invariant_holds, draws, seed, programs(), phases=WITHOUT_SHRINKING)


@pytest.mark.parametrize("scaler", ["distamp", pytest.param("guard", marks=pytest.mark.slow)])
def test_invariant_holds_in_a_few_random_programs(ranks, scaler):
    """Steps taken together by a scaler, and by a StepGuard, which also clips as it steps."""
    check_programs(Judge(ranks(WORLD), scaler), draws=2, seed=None)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("scaler", ["distamp", "guard"])
def test_invariant_holds_in_ten_thousand_random_programs(ranks, scaler, seed):
    check_programs(Judge(ranks(WORLD), scaler), draws=500, seed=seed)
