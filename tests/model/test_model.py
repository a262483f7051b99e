"""The models hold, each planted fault is found, and real ranks do what the model's do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.model.check import MISSING, RUNS, Run, check
from tests.model.programs import draw, run
from tests.ranks import RankPool

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not found: {', '.join(MISSING)}")

HELD = [each for each in RUNS if not each.breaks]
# Of faults that one assertion sees, every test run plants one; `python -m tests.model` all.
FAULTS = ["OWN_FLAG", "WITHOUT_SCALE", "WITHOUT_CALLS", "GATHERS", "FLAGS_NOT_SET", "MEMORY"]


@pytest.mark.parametrize("each", [r for r in HELD if r.quick], ids=lambda r: r.name)
def test_a_model_holds(each: Run) -> None:
    assert check(each).found == ""


@pytest.mark.parametrize(
    "each", [r for r in RUNS if r.breaks and r.defines.endswith(tuple(FAULTS))], ids=lambda r: r.name
)
def test_a_planted_fault_is_found(each: Run) -> None:
    assert each.breaks in check(each).found


@pytest.mark.slow
@pytest.mark.parametrize("each", [r for r in RUNS if not r.quick], ids=lambda r: r.name)
def test_a_large_model_holds(each: Run) -> None:
    assert check(each).found == ""


@pytest.mark.parametrize(
    ("size", "defines"),
    [(2, ("CALLS=9",)), (2, ("CALLS=9", "ERROR")), (3, ("CALLS=9", "ERROR"))],
)
def test_real_ranks_do_what_the_model_does(
    ranks: Callable[[int], RankPool], size: int, defines: tuple[str, ...]
) -> None:
    programs = draw(size, 6, defines)
    on_ranks = ranks(size).run(run, programs, timeout=30)
    for rank, results in enumerate(on_ranks):
        for program, (steps, raised) in zip(programs, results, strict=True):
            assert (steps, raised) == (program[rank].steps, program[rank].raises), program
