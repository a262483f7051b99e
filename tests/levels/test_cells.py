"""Cells of level x layout x feature: each is right or refused, and there is no third outcome."""

import random
from collections import Counter

import pytest
import torch

from tests.levels.cells import CELLS, LAYOUTS, LEVELS, Outcome, judge, level_of, reference, run_cell
from tests.ranks import RankPool

Cell = tuple[str, str, str]


def wrong_cells(cells: list[Cell], pool: RankPool) -> list[tuple[Cell, Outcome]]:
    """Run cells, print how many of each level and layout are right, and return the wrong ones."""
    counts: Counter[tuple[str, str, str]] = Counter()
    wrong = []
    for cell in cells:
        level, layout, _ = cell
        outcome = judge(*cell, pool.run(run_cell, *cell))
        counts[level, layout, outcome.kind] += 1
        if outcome.kind == "wrong":
            wrong.append((cell, outcome))
    print(counts)
    return wrong


def test_four_cells_drawn_are_right_or_refused(ranks4: RankPool):
    """Every run draws other cells. Compiled ones take too long for it."""
    quick = [cell for cell in CELLS if cell[2] != "compile"]
    assert wrong_cells(random.sample(quick, 4), ranks4) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_level_keeps_its_contract(ranks4: RankPool, layout):
    cells = [(level, layout, "nothing") for level in LEVELS]
    cells.append(("fp16-O2", layout, "pins"))
    cells.append(("bf16", layout, "reentrant checkpoint"))
    assert wrong_cells(cells, ranks4) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_cell_is_right_or_refused(ranks4: RankPool, layout):
    cells = [cell for cell in CELLS if cell[1] == layout]
    assert wrong_cells(cells, ranks4) == []


# -- the judge: no wrong cell passes for a right one ---------------------------------------------


def answers_of_right_step(level: str, factor: float = 1.0) -> list[tuple[str, object]]:
    """Return the answers of four ranks with the exact parameters, times a factor."""
    exact = reference(level_of(level), "nothing")
    params = [param * factor for param in exact.after]
    return [("ran", (params, {}))] * 4


def judge_in_ddp(level: str, answers: list[tuple[str, object]]) -> Outcome:
    return judge(level, "DDP", "nothing", answers)


def assert_wrong(outcome: Outcome, reason: str) -> None:
    assert outcome.kind == "wrong"
    assert reason in outcome.reason


def test_an_exact_step_is_right():
    assert judge_in_ddp("bf16", answers_of_right_step("bf16")).kind == "right"


def test_parameters_that_are_nan_are_wrong():
    answers = answers_of_right_step("bf16", factor=torch.nan)
    assert_wrong(judge_in_ddp("bf16", answers), "ranks diverged")


def test_a_step_that_is_far_off_is_wrong():
    answers = answers_of_right_step("bf16", factor=1.1)
    assert_wrong(judge_in_ddp("bf16", answers), "off by")


def test_a_step_that_is_more_exact_than_float8_is_wrong_at_fp8():
    answers = answers_of_right_step("fp8")
    assert_wrong(judge_in_ddp("fp8", answers), "off by 0")


def test_a_right_step_in_another_dtype_is_wrong():
    exact = reference(level_of("bf16"), "nothing")
    answers = [("ran", (exact.after, {"compute": "fp32"}))] * 4
    assert_wrong(judge_in_ddp("bf16", answers), "contract is broken: {'compute'")


def test_a_rank_with_other_parameters_is_wrong():
    answers = answers_of_right_step("bf16")
    params = reference(level_of("bf16"), "nothing").after
    answers[3] = ("ran", ([param + 1e-9 for param in params], {}))
    assert_wrong(judge_in_ddp("bf16", answers), "ranks diverged")


def test_a_rank_that_raises_while_the_others_refuse_is_wrong():
    answers = [("refused", "why")] * 3 + [("raised", "x")]
    assert_wrong(judge_in_ddp("bf16", answers), "why")


def test_an_error_on_all_ranks_that_is_no_refusal_is_wrong():
    answers = [("raised", "RuntimeError: x")] * 4
    assert_wrong(judge_in_ddp("bf16", answers), "RuntimeError")
