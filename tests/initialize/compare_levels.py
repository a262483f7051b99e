"""Run every cell of ``tests/initialize/cells.py``, and print the table: see `main`.

``python -m tests.initialize.compare_levels --write docs/results/level_cells.md`` takes minutes.
"""

import argparse
import collections
import datetime
import platform
import sys
from pathlib import Path

import torch

from tests.initialize.cells import CELLS, LAYOUTS, LEVELS, WORLD, Outcome, cell, judge
from tests.ranks import RankError, RankPool

Cell = tuple[str, str, str]


def outcomes(cells: list[Cell], pool: RankPool) -> dict[Cell, Outcome]:
    """Run cells, one at a time; what became of each."""
    found = {}
    for each in cells:
        try:
            found[each] = judge(*each, pool.run(cell, *each))
        except RankError as error:
            found[each] = Outcome("wrong", str(error).strip().splitlines()[-1])
        if found[each].kind == "wrong":
            print(*each, found[each].said[:600], sep=" | ", file=sys.stderr, flush=True)
    return found


def table(found: dict[Cell, Outcome]) -> str:
    """Return the page: counts for each layout and level, and each refusal once."""
    kinds = collections.Counter(outcome.kind for outcome in found.values())
    lines = [
        "# Levels, layouts and what crosses them",
        "",
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{WORLD} gloo ranks on {platform.machine()}.",
        "",
        "    python -m tests.initialize.compare_levels --write docs/results/level_cells.md",
        "",
        f"{len(found)} cells of level x layout x one of nothing, LoRA on a half base, pins by "
        "pattern, op lists, compile, checkpointing of both kinds, hook. "
        f"{kinds['right']} right, {kinds['refused']} refused, {kinds['wrong']} wrong. A cell is "
        "right if a step is within its precision's tolerance of float64, ranks agree, and the "
        "level's contract is kept. It is refused if distamp raised before anything changed.",
        "",
        "| | " + " | ".join(LEVELS) + " |",
        "|---" * (len(LEVELS) + 1) + "|",
    ]
    for layout in LAYOUTS:
        row = []
        for level in LEVELS:
            of = [o.kind for (a, b, _), o in found.items() if (a, b) == (level, layout)]
            row.append(
                ", ".join(f"{n} {kind}" for kind, n in sorted(collections.Counter(of).items()))
            )
        lines.append(f"| {layout} | " + " | ".join(row) + " |")
    said: dict[str, list[Cell]] = collections.defaultdict(list)
    for each, outcome in found.items():
        if outcome.kind != "right":
            said[outcome.said.splitlines()[0]].append(each)
    lines += ["", "What was refused, and how:", ""]
    for sentence, cells in sorted(said.items(), key=lambda pair: -len(pair[1])):
        lines.append(f"- {len(cells)} x, first {', '.join(cells[0])}: {sentence}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="write the page to this file")
    given = parser.parse_args()
    with RankPool(WORLD) as pool:
        found = outcomes(list(CELLS), pool)
    page = table(found)
    (given.write.write_text if given.write else print)(page)
    sys.exit(any(outcome.kind == "wrong" for outcome in found.values()))


if __name__ == "__main__":
    main()
