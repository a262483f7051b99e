"""Cells of level x layout x what crosses them: no third outcome beside right and refused."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.levels.cells import CELLS, LAYOUTS, LEVELS, cell, judge, level_of, reference
from tests.ranks import RankPool


def wrong(cells: list[Any], pool: RankPool) -> list[Any]:
    """What is wrong of cells; how many of a level are right is printed."""
    found = {each: judge(*each, pool.run(cell, *each)) for each in cells}
    print(Counter((*each[:2], outcome.kind) for each, outcome in found.items()))
    return [pair for pair in found.items() if pair[1].kind == "wrong"]


def test_twelve_cells_drawn_are_right_or_refused(ranks4: RankPool):
    """Anew in every run; compiling takes too long for it."""
    assert wrong(random.sample([each for each in CELLS if each[2] != "compile"], 12), ranks4) == []


# Layouts of `make test`. `make test-all` runs all of them.
QUICK_LAYOUTS = ("plain", "DDP", "FSDP2")
EACH_LAYOUT = [
    pytest.param(layout, marks=[] if layout in QUICK_LAYOUTS else pytest.mark.slow)
    for layout in LAYOUTS
]


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_each_level_keeps_its_contract(ranks4: RankPool, layout):
    cells = [(level, layout, "nothing") for level in LEVELS]
    cells += [("fp16-O2", layout, "pins"), ("bf16", layout, "reentrant checkpoint")]
    assert wrong(cells, ranks4) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_cell_is_right_or_refused(ranks4: RankPool, layout):
    assert wrong([each for each in CELLS if each[1] == layout], ranks4) == []


# What each rank answers, of the parameters that are right and of a contract that is kept.
ANSWERS: dict[str, tuple[str, Callable[[list[Tensor]], Any], str]] = {
    "right": ("bf16", lambda right: [("ran", (right, {}))] * 4, ""),
    "no number": (
        "bf16",
        lambda right: [("ran", ([p * torch.nan for p in right], {}))] * 4,
        "ranks have parted",
    ),
    "far off": ("bf16", lambda right: [("ran", ([p * 1.1 for p in right], {}))] * 4, "off by"),
    "closer than float8": ("fp8", lambda right: [("ran", (right, {}))] * 4, "off by 0"),
    "another dtype": (
        "bf16",
        lambda right: [("ran", (right, {"compute": "fp32"}))] * 4,
        "contract is broken: {'compute'",
    ),
    "one rank": (
        "bf16",
        lambda right: [("ran", (right, {}))] * 3 + [("ran", ([p + 1e-9 for p in right], {}))],
        "ranks have parted",
    ),
    "one raises": ("bf16", lambda right: [("refused", "why")] * 3 + [("raised", "x")], "why"),
    "all raise": ("bf16", lambda right: [("raised", "RuntimeError: x")] * 4, "RuntimeError"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_not_right_is_seen(name):
    level, answers, says = ANSWERS[name]
    both = reference(level_of(level), "nothing")
    outcome = judge(level, "DDP", "nothing", answers(both[len(both) // 2 :]))
    assert (outcome.kind, says in outcome.said) == ("wrong" if says else "right", True)
