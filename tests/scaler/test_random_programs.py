"""Random programs on real ranks: which calls, in which order, which rank is hit by what.

Ranks that are lost are in `test_lost_ranks`.
"""

from dataclasses import replace

import hypothesis
import pytest

from tests.scaler.matrix.drawn import hold, programs
from tests.scaler.matrix.judge import Judge
from tests.scaler.matrix.layouts import WORLD

# Steps taken together by a scaler, and by a StepGuard, which also clips as it steps.
FORMS = pytest.mark.parametrize("form", ["distamp", "guard"])


def _check(ranks, draws, seed, form):
    judge = Judge(ranks(WORLD), form)

    def holds(program):
        if form == "guard" and program.astray is not None and program.astray[0] == "scale":
            program = replace(program, astray=None)  # a guard loads no scale
        assert judge.judge(program) == [], program

    # A draw is small as it is, and shrinking one takes hundreds of runs on real ranks.
    hold(holds, draws, seed, programs(), phases=[hypothesis.Phase.generate])


@FORMS
def test_invariant_holds_in_random_programs(ranks, form):
    _check(ranks, 12, None, form)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@FORMS
@pytest.mark.parametrize("seed", range(20))
def test_invariant_holds_in_ten_thousand_random_programs(ranks, seed, form):
    _check(ranks, 500, seed, form)
