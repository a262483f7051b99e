"""Everything the scaler can meet, on simulated devices: all cells, and random programs.

::

    python -m tests.simulated.long_run FILE cells [LAYOUT | LAYOUT/OPTIMIZER ...]
    python -m tests.simulated.long_run FILE random DRAWS SEED

Runs every cell of these layouts, of all when none is given, or so many random programs, each under
``late`` or under a random schedule that its name or its seed draws. Every program that is not as it
should be, or not as on the CPU, is printed; what was run goes to FILE, a line each, and is not run
again, so that a run that was stopped is taken up by the same command.
"""

import datetime
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

# What the ranks import is imported in functions: they run this file too, and a rank must know how
# many there are before it imports the layouts.

# Random programs of one line.
PART = 50


class _Log:
    """What was run, a line each; what has a line is not run again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = path.read_text().splitlines() if path.exists() else []
        self.broke = 0

    def run(self, name: str, count: int, wrong: Callable[[], Iterator[tuple[Any, ...]]]) -> None:
        """Run and note so many programs, and print everything that is wrong."""
        if any(line.startswith(f"{name}: ") for line in self.lines):
            return
        start, broke = time.monotonic(), 0
        for schedule, program, complaints in wrong():
            broke += 1
            print(schedule, program, *complaints, sep="\n    ", flush=True)
        self.broke += broke
        seconds = time.monotonic() - start
        line = f"{name}: {count}, {broke} wrong; {datetime.date.today()}, {seconds:.0f} s"
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(f"{line}\n")


def _pair(ranks: int) -> Any:
    from tests.ranks import RankPool
    from tests.simulated.pools import SimPool
    from tests.simulated.scaler_cells import Pair

    return Pair(RankPool(ranks), SimPool(ranks))


def _random(log: _Log, draws: int, seed: int) -> None:
    from tests.simulated.scaler_cells import drawn_programs, wrong_programs

    pair = _pair(2)
    programs = drawn_programs(pair, draws, seed)
    for start in range(0, draws, PART):
        part = programs[start : start + PART]
        name = f"programs {start} to {start + len(part) - 1} of seed {seed}"
        log.run(name, len(part), lambda part=part: wrong_programs(pair, part))
    pair.close()


def _cells(log: _Log, layouts: list[str]) -> None:
    from tests.simulated.scaler_cells import EXCEPTIONS, FOUR_RANKS, LAYOUTS, cells_of, wrong_cells

    for wanted in layouts or [each for each in LAYOUTS if each not in EXCEPTIONS]:
        layout, _, only = wanted.partition("/")
        pair = _pair(4 if layout in FOUR_RANKS else 2)
        kinds = [only] if only else [kind for _, kind, *_ in cells_of(layout)]
        for kind in dict.fromkeys(kinds):
            count = len(list(cells_of(layout, kind)))
            run = lambda pair=pair, layout=layout, kind=kind: wrong_cells(pair, layout, kind)  # noqa: E731
            log.run(f"cells of {layout}, {kind}, on {pair.ranks} ranks", count, run)
        pair.close()


def main() -> None:
    path, what, *rest = sys.argv[1:]
    print(f"torch {torch.__version__}, {what}", flush=True)
    log = _Log(Path(path))
    if what == "random":
        _random(log, *map(int, rest))
    else:
        _cells(log, rest)
    sys.exit(bool(log.broke))


if __name__ == "__main__":
    main()
