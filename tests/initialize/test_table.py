"""docs/levels.md says what the code does."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.levels_page import BEGIN, END, RESULTS, render
from distamp.initialize.table import levels_table, page_with_table
from distamp.precision import LEVELS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "levels.md"


def test_the_table_in_the_docs_is_written_from_the_levels():
    text = PAGE.read_text()
    assert text == page_with_table(text), "run python -m distamp.initialize.table"


def test_every_level_has_a_row():
    rows = levels_table().splitlines()
    assert [row.split("|")[1].strip(" `") for row in rows[2:]] == list(LEVELS)


def test_the_figures_in_the_docs_are_those_that_were_measured():
    results = json.loads((ROOT / RESULTS).read_text())
    shown = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert shown == render(results), "run python -m benchmarks.levels --render"


def test_o1_and_o2_end_within_one_percent_of_fp32():
    runs = json.loads((ROOT / RESULTS).read_text())["runs"]
    losses = {(r["task"], r["level"], r["seed"]): r["loss"] for r in runs}
    assert len(losses) == len(runs) == 2 * 6 * 3
    for task in {task for task, _, _ in losses}:
        for level in ("O1", "O2"):
            ours, fp32 = (
                sum(losses[task, which, seed] for seed in range(3)) / 3 for which in (level, "O0")
            )
            assert abs(ours / fp32 - 1) < 0.01
