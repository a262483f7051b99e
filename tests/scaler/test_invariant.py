"""Layouts x optimizers x orders of calls x faults, and one invariant.

All ranks agree on skips, scale and parameters; a skipped step changes nothing; a step that was
taken equals the float64 reference. If an optimizer itself cannot train in a layout, which a run
without a scaler shows, then torch's error comes through on all ranks, with parameters unchanged.
"""

import pytest

from tests.quick_cases import quick_cases
from tests.scaler.matrix.cells import cell, cells, chains, sample
from tests.scaler.matrix.judge import Judge
from tests.scaler.matrix.layouts import ALL_LAYOUTS, WORLD
from tests.scaler.matrix.programs import Iteration, Program


@pytest.fixture(scope="module")
def judge(ranks):
    return Judge(ranks(WORLD))


# A layout of each family on several ranks. `test_clip` has tensor parallel.
QUICK_LAYOUTS = ["DDP", "DDP, experts", "FSDP1", "FSDP2", "ZeRO", "DDP, fp16 parameters"]


@pytest.mark.parametrize("layout", quick_cases(ALL_LAYOUTS, QUICK_LAYOUTS))
def test_invariant_holds_on_a_sample_of_cells(judge, layout):
    program = sample(layout)
    assert judge.judge(program) == []


LAYOUTS_WITH_KINDS = sorted({(layout, kind) for layout, kind, _, _ in cells()})


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("layout", "kind"), LAYOUTS_WITH_KINDS)
def test_invariant_holds_in_every_cell(judge, layout, kind):
    violations = {}
    for program in chains(layout, kind):
        sentences = judge.judge(program)
        if sentences:
            violations[program] = sentences
    assert violations == {}


@pytest.mark.parametrize(
    "kind", ["SGD for-loop", pytest.param("Adam fused", marks=pytest.mark.slow)]
)
def test_an_overflow_made_by_the_reduction_is_skipped_everywhere(judge, kind):
    program = cell("FSDP2 in fp16", kind, "step", "sum")
    assert judge.judge(program) == []


# A layout of each family.
FAMILIES = ["DDP", "FSDP1", "FSDP2", "FSDP2 x TP", "ZeRO", "pipeline"]


def program_with(layout: str, deviation: str) -> Program:
    """Return two iterations of two optimizers; rank 2 deviates in the second."""
    iterations = (Iteration(), Iteration())
    return Program(layout, "SGD for-loop", iterations, optimizers=2, astray=(deviation, 2))


@pytest.mark.parametrize("layout", quick_cases(FAMILIES, quick=["DDP"]))
def test_a_rank_that_steps_its_optimizers_in_another_order_stops_every_rank(judge, layout):
    assert judge.judge(program_with(layout, "swap")) == []


@pytest.mark.parametrize("layout", quick_cases(FAMILIES, quick=["FSDP2"]))
def test_a_rank_with_another_scale_stops_every_rank(judge, layout):
    assert judge.judge(program_with(layout, "scale")) == []


@pytest.mark.parametrize("layout", quick_cases(FAMILIES, quick=["DDP"]))
def test_a_rank_may_call_unscale_when_the_others_step(judge, layout):
    assert judge.judge(program_with(layout, "call")) == []


# -- the judge can tell right from wrong -----------------------------------------------------------


def violations_of(pool, scaler: str, *names: str) -> str:
    """Return the violations of a cell under a scaler of torch, one a line."""
    judge = Judge(pool, scaler)
    return "\n".join(judge.judge(cell(*names)))


def test_torchs_scaler_is_right_if_the_loss_of_a_ddp_model_overflows(ranks):
    assert violations_of(ranks(WORLD), "torch", "DDP", "SGD for-loop", "step", "loss") == ""


def test_torchs_scaler_steps_on_some_ranks_of_fsdp(ranks):
    text = violations_of(ranks(WORLD), "torch", "FSDP1", "Adam foreach", "unscale", "nan")
    assert "should have skipped" in text


@pytest.mark.slow
def test_torchs_sharded_scaler_fails_under_ddp_with_a_fused_optimizer(new_ranks):
    text = violations_of(new_ranks(WORLD), "sharded", "DDP", "Adam fused", "unscale", "none")
    assert "raised RuntimeError" in text


@pytest.mark.slow
def test_torchs_sharded_scaler_steps_a_fused_optimizer_with_inf(new_ranks):
    text = violations_of(new_ranks(WORLD), "sharded", "DDP", "SGD fused", "unscale", "every rank")
    assert "parameters" in text
