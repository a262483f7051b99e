"""The models hold, the checker finds planted faults, and real ranks do the same as models."""

import json
from collections.abc import Callable

import pytest

from tests.model.check import FAULTS, HOLDS, MISSING, Run, check
from tests.model.programs import (
    STORED,
    WALK_KINDS,
    WalkKind,
    load_programs,
    run_programs,
    spin_version,
    walk_model,
)
from tests.ranks import RankPool

missing_names = ", ".join(MISSING)
needs_spin = pytest.mark.skipif(bool(MISSING), reason=f"not found: {missing_names}")

# `make test` checks the smallest model, plants a fault in it, and draws one walk of another one.
# SPIN compiles every run, which takes many seconds for the large models.
QUICK_FAULTS = ("FAULT_LANES_SHARE_MEMORY",)
QUICK_WALKS = [kind for kind in WALK_KINDS if kind.name == "guard RANKS=2 CALLS=9 REQUESTS"]
# A kind for each macro, and for three ranks.
QUICK_KINDS_ON_RANKS = (
    "scaler RANKS=3 CALLS=9 ERROR",
    "scaler RANKS=2 CALLS=9 FAILS CATCHES",
    "guard RANKS=2 CALLS=9 LIMIT=2",
    "guard RANKS=2 CALLS=9 ABSENT",
    "guard RANKS=2 CALLS=9 REQUESTS",
    "guard RANKS=2 CALLS=9 REPLICAS CATCHES",
    "guard RANKS=3 CALLS=9 SNAPSHOTS UPDATES CATCHES",
)


def parameters(runs: list[Run]) -> list[object]:
    """Return a test parameter for each run; slow ones are marked."""
    parameters: list[object] = []
    for run in runs:
        marks = []
        if not run.is_quick and not run.defines.endswith(QUICK_FAULTS):
            marks.append(pytest.mark.slow)
        parameters.append(pytest.param(run, id=run.name, marks=marks))
    return parameters


@needs_spin
@pytest.mark.parametrize("run", parameters(HOLDS))
def test_a_model_holds(run: Run) -> None:
    assert check(run).violation == ""


@needs_spin
@pytest.mark.parametrize("run", parameters(FAULTS))
def test_a_planted_fault_is_found(run: Run) -> None:
    assert run.violation in check(run).violation


def kinds_on_ranks() -> list[object]:
    """Return a test parameter for each kind of walks; slow ones are marked."""
    parameters: list[object] = []
    for kind in WALK_KINDS:
        marks = []
        if kind.name not in QUICK_KINDS_ON_RANKS:
            marks.append(pytest.mark.slow)
        parameters.append(pytest.param(kind, id=kind.name, marks=marks))
    return parameters


def load_stored_walks(kind: WalkKind) -> list[list[str]]:
    """Return the stored walks of a kind. Skip the test if another SPIN has stored them."""
    stored = json.loads(STORED.read_text())
    if stored["version"] != spin_version():
        stored_version = stored["version"]
        pytest.skip(f"stored by {stored_version}; this is {spin_version()}")
    return stored[kind.name]  # type: ignore[no-any-return]


@needs_spin
@pytest.mark.parametrize("kind", QUICK_WALKS, ids=lambda kind: kind.name)
def test_the_first_stored_walk_is_a_walk_of_todays_model(kind: WalkKind) -> None:
    """If this fails, call ``python -m tests.model --store``."""
    assert load_stored_walks(kind)[:1] == walk_model(kind, count=1)


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("kind", WALK_KINDS, ids=lambda kind: kind.name)
def test_the_stored_walks_are_walks_of_todays_model(kind: WalkKind) -> None:
    """If this fails, call ``python -m tests.model --store``."""
    assert load_stored_walks(kind) == walk_model(kind)


@pytest.mark.parametrize("kind", kinds_on_ranks())
def test_real_ranks_do_what_the_model_does(
    ranks: Callable[[int], RankPool], kind: WalkKind
) -> None:
    programs = load_programs(kind)
    assert programs
    outcomes_by_rank = ranks(kind.num_ranks).run(
        run_programs, programs, kind.model, kind.defines, timeout=60
    )
    for rank, outcomes in enumerate(outcomes_by_rank):
        for rank_programs, outcome in zip(programs, outcomes, strict=True):
            program = rank_programs[rank]
            expected = (program.steps, program.num_errors)
            assert outcome == expected, program
