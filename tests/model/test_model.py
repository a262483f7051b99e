"""The models hold, each planted fault is found, and real ranks do what the model's do."""

import json
from collections.abc import Callable

import pytest

from tests.model.check import MISSING, RUNS, Run, check
from tests.model.programs import DRAWN, STORED, draw, run, version, walks
from tests.ranks import RankPool

needs_spin = pytest.mark.skipif(bool(MISSING), reason=f"not found: {', '.join(MISSING)}")

# Every test run plants one in each model; `python -m tests.model` all.
FAULTS = ("OWN_FLAG", "OWN_NORM", "LANES_SHARE_MEMORY")


@needs_spin
@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.name, marks=[] if each.quick else pytest.mark.slow)
        for each in RUNS
        if not each.breaks or each.defines.endswith(FAULTS)
    ],
)
def test_a_model_holds_and_a_planted_fault_is_found(each: Run) -> None:
    found = check(each).found
    assert each.breaks in found
    assert bool(each.breaks) == bool(found), found


@needs_spin
@pytest.mark.parametrize(("model", "size", "defines"), DRAWN)
def test_the_stored_walks_are_the_models(model: str, size: int, defines: str) -> None:
    """If not: python -m tests.model --store."""
    stored = json.loads(STORED.read_text())
    if stored["version"] != version():
        pytest.skip(f"stored by {stored['version']}; this is {version()}")
    assert stored[f"{model} RANKS={size} {defines}"] == walks(model, size, defines)


@pytest.mark.parametrize(("model", "size", "defines"), DRAWN)
def test_real_ranks_do_what_the_model_does(
    ranks: Callable[[int], RankPool], model: str, size: int, defines: str
) -> None:
    programs = draw(model, size, defines)
    assert programs
    limit = 2 if "LIMIT" in defines else None
    catches = "CATCHES" in defines
    on_ranks = ranks(size).run(run, programs, model, limit, catches, timeout=30)
    for rank, results in enumerate(on_ranks):
        for program, (steps, raises) in zip(programs, results, strict=True):
            assert (steps, raises) == (program[rank].steps, program[rank].raises), program
