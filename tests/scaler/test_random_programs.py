"""Random programs on real ranks: which calls, in which order, which rank is hit by what.

Ranks that are lost are in `test_lost_ranks`.
"""

from dataclasses import replace

import hypothesis
import pytest

from tests.scaler.matrix.drawn import hold, programs
from tests.scaler.matrix.judge import Judge
from tests.scaler.matrix.layouts import WORLD

TEN_THOUSAND = [
    pytest.param(500, seed, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])
    for seed in range(20)
]


@pytest.mark.parametrize(("draws", "seed"), [pytest.param(12, None, id="few"), *TEN_THOUSAND])
@pytest.mark.parametrize("form", ["distamp", "guard"])
def test_invariant_holds_in_random_programs(ranks, form, draws, seed):
    """Steps taken together by a scaler, and by a StepGuard, which also clips as it steps."""
    judge = Judge(ranks(WORLD), form)

    def holds(program):
        if form == "guard" and program.astray is not None and program.astray[0] == "scale":
            program = replace(program, astray=None)  # a guard loads no scale
        assert judge.judge(program) == [], program

    # A draw is small as it is, and shrinking one takes hundreds of runs on real ranks.
    hold(holds, draws, seed, programs(), phases=[hypothesis.Phase.generate])
