"""Layouts x optimizers x orders x faults, and one invariant.

All ranks agree on skipped, scale and parameters; a skipped step changes nothing; a kept step equals
the float64 reference. What an optimizer itself cannot do on a layout, found by running it without a
scaler, comes through as torch's own error on all ranks, with parameters unchanged.
"""

import pytest

from tests.scaler.matrix.cells import cell, cells, chains, sample
from tests.scaler.matrix.judge import Judge
from tests.scaler.matrix.layouts import ALL_LAYOUTS, WORLD
from tests.scaler.matrix.programs import Iteration, Program


@pytest.fixture(scope="module")
def judge(ranks):
    return Judge(ranks(WORLD))


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_invariant_holds_on_a_sample_of_cells(judge, layout):
    assert judge.judge(sample(layout)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("layout", "kind"), sorted({each[:2] for each in cells()}))
def test_invariant_holds_in_every_cell(judge, layout, kind):
    found = {program: judge.judge(program) for program in chains(layout, kind)}
    assert {program: wrong for program, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("kind", ["SGD for-loop", "Adam fused"])
def test_an_overflow_made_by_the_reduction_is_skipped_everywhere(judge, kind):
    assert judge.judge(cell("FSDP2 in fp16", kind, "step", "sum")) == []


@pytest.mark.parametrize("layout", ["DDP", "FSDP1", "FSDP2", "FSDP2 x TP", "ZeRO", "pipeline"])
def test_a_rank_astray_stops_every_rank_and_one_that_unscales_by_itself_goes_on(judge, layout):
    for what in ("swap", "scale", "call"):
        program = Program(layout, "SGD for-loop", (Iteration(), Iteration()), 2, astray=(what, 2))
        assert judge.judge(program) == [], what


# -- the judge itself can tell right from wrong -------------------------------------------------


@pytest.mark.parametrize(
    ("scaler", "layout", "kind", "order", "fault", "complaint"),
    [
        ("torch", "DDP", "SGD for-loop", "step", "loss", ""),
        ("torch", "FSDP1", "Adam foreach", "unscale", "nan", "should have skipped"),
        ("sharded", "DDP", "Adam fused", "unscale", "none", "raised RuntimeError"),
        ("sharded", "DDP", "SGD fused", "unscale", "every rank", "parameters"),
    ],
)
def test_other_scalers_are_judged_right_where_they_are_and_their_known_faults_are_seen(
    new_ranks, scaler, layout, kind, order, fault, complaint
):
    judge = Judge(new_ranks(WORLD), scaler, timeout=5.0)
    wrong = judge.judge(cell(layout, kind, order, fault))
    assert any(complaint in each for each in wrong) if complaint else wrong == []
