"""Whatever goes wrong, all ranks end equal and right, or all with an error that names the cause."""

import pytest

from tests.faults.declared import Fault, Program, draw
from tests.faults.run import Judge, complaints, run_on_rank

# The others, and thousands more, in long runs.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_are_equal_or_all_say_what_went_wrong(seed):
    with Judge() as judge:
        assert judge.wrong(draw(50, seed)) == {}


def test_the_judge_sees_what_is_not_as_declared(ranks4):
    trained = Program("DDP", "SGD for-loop", "unscale", 1, 3)
    (seen,) = zip(*ranks4.run(run_on_rank, [trained]), strict=True)
    assert complaints(trained, seen) == []
    for fault in (Fault("inf_at", 1, 1), Fault("scale", 1, 1), Fault("kill", 1, 1, "step")):
        program = Program("DDP", "SGD for-loop", "unscale", 1, 3, (fault,))
        assert complaints(program, seen) != []
