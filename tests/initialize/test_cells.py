"""Cells of level x layout x what crosses them: no third outcome beside right and refused."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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


Change = Callable[[list[Tensor], dict[str, set[str]]], Any]


def _all(change: Change) -> Change:
    """What every rank answers, where all changed the right parameters and dtypes alike."""
    return lambda found, ran: [("ran", change(found, ran))] * 4


FLOAT8 = {"bfloat16", "float8_e4m3fn"}
# Of a level: what ranks answer, and what is said of it.
ANSWERS: list[tuple[str, Change, str]] = [
    ("bf16", _all(lambda found, ran: (found, ran)), ""),
    ("bf16", _all(lambda found, ran: ([p * 1.1 for p in found], ran)), "off by"),
    ("bf16", _all(lambda found, ran: ([p * torch.nan for p in found], ran)), "ranks have parted"),
    ("bf16", _all(lambda found, ran: (found, {"hidden": {"float32"}})), "hidden computes in"),
    ("bf16", _all(lambda found, ran: (found, {"hidden": {"bfloat16", "float32"}})), "hidden comp"),
    ("bf16", _all(lambda found, ran: (found, {})), "no product"),
    ("fp8", _all(lambda found, ran: (found, ran | {"first": FLOAT8})), ""),
    ("fp8", _all(lambda found, ran: (found, ran | {"first": {"bfloat16"}})), "first computes in"),
    (
        "bf16",
        lambda found, ran: (
            [("ran", (found, ran))] * 3 + [("ran", ([*found[:-1], found[-1] + 1e-9], ran))]
        ),
        "ranks have parted",
    ),
    ("bf16", lambda *_: [("refused", "why")] * 3 + [("raised", "x")], "why"),
    ("bf16", lambda *_: [("raised", "RuntimeError: x")] * 4, "RuntimeError"),
]


@pytest.mark.parametrize(("level", "answers", "says"), ANSWERS)
def test_what_is_not_right_is_seen(level, answers, says):
    both = reference(level_of(level), "nothing")
    ran = {"output" if level == "fp8" else "hidden": {"bfloat16"}}
    outcome = judge(level, "DDP", "nothing", answers(both[len(both) // 2 :], ran))
    assert (outcome.kind, says in outcome.said) == ("wrong" if says else "right", True)


def test_the_page_counts_each_kind():
    refused = judge("O0", "plain", "LoRA", [("refused", "SettingError: take bf16")] * 4)
    assert refused.kind == "refused"
    page = table({("O0", "plain", "LoRA"): refused})
    assert "1 cells of" in page
    assert "0 right, 1 refused, 0 wrong" in page
    assert "1 x, first O0, plain, LoRA: SettingError: take bf16" in page
