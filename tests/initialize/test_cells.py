"""Cells of level x layout x what crosses them: no third outcome beside right and refused."""

import random
from typing import Any

import pytest

from tests.initialize.cells import CELLS, LAYOUTS, judge, level_of, reference
from tests.initialize.compare_levels import Cell, outcomes, table
from tests.ranks import RankPool


def wrong(cells: list[Cell], pool: RankPool) -> list[Any]:
    return [pair for pair in outcomes(cells, pool).items() if pair[1].kind == "wrong"]


def test_twelve_cells_drawn_are_right_or_refused(ranks4: RankPool):
    """Anew in every run; compiling takes too long for it."""
    assert wrong(random.sample([each for each in CELLS if each[2] != "compile"], 12), ranks4) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_cell_is_right_or_refused(ranks4: RankPool, layout):
    assert wrong([each for each in CELLS if each[1] == layout], ranks4) == []


RIGHT = ("bf16", "DDP", "nothing")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found, ran: (found, ran), ""),
        (lambda found, ran: ([p * 1.1 for p in found], ran), "off by"),
        (lambda found, ran: ([p * float("nan") for p in found], ran), "ranks have parted"),
        (lambda found, ran: (found, ran | {"hidden": {"float32"}}), "hidden computes in"),
        (lambda found, ran: (found, ran | {"hidden": {"bfloat16", "float32"}}), "hidden computes"),
        (lambda found, ran: (found, {}), "no product"),
    ],
)
def test_what_is_not_right_is_seen(change, says):
    both = reference(level_of("bf16"), "nothing")
    made = change(both[len(both) // 2 :], {"hidden": {"bfloat16"}})
    outcome = judge(*RIGHT, [("ran", made)] * 4)
    assert (outcome.kind, says in outcome.said) == ("wrong" if says else "right", True)


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ({"bfloat16", "float8_e4m3fn"}, ""),
        ({"bfloat16"}, "first computes in"),
        ({"float32", "float8_e4m3fn"}, "first computes in"),
    ],
)
def test_a_layer_that_computes_without_float8_is_seen(first, says):
    both = reference(level_of("fp8"), "nothing")
    ran = {"first": first, "output": {"bfloat16"}}
    outcome = judge("fp8", "DDP", "nothing", [("ran", (both[len(both) // 2 :], ran))] * 4)
    assert (outcome.kind, says in outcome.said) == ("wrong" if says else "right", True)


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ([("refused", "why")] * 4, "refused"),
        ([("refused", "why")] * 3 + [("raised", "RuntimeError: x")], "wrong"),
        ([("raised", "RuntimeError: x")] * 4, "wrong"),
    ],
)
def test_an_error_that_is_not_ours_or_not_everybodys_is_a_third_outcome(answers, kind):
    assert judge(*RIGHT, answers).kind == kind


def test_ranks_that_differ_are_seen():
    both = reference(level_of("bf16"), "nothing")
    found = both[len(both) // 2 :]
    other = [*found[:-1], found[-1] + 1e-9]
    answers = [("ran", (each, {"hidden": {"bfloat16"}})) for each in (found, found, found, other)]
    assert judge(*RIGHT, answers).said == "ranks have parted"


def test_the_page_counts_each_kind():
    refused = judge("O0", "plain", "LoRA", [("refused", "SettingError: take bf16")] * 4)
    page = table({("O0", "plain", "LoRA"): refused})
    assert "1 cells of" in page
    assert "0 right, 1 refused, 0 wrong" in page
    assert "1 x, first O0, plain, LoRA: SettingError: take bf16" in page
