"""Everything the scaler can meet, on simulated devices: all cells, and random programs.

``python -m tests.simulated.long_run cells [LAYOUT ...]`` runs every cell of these layouts, of all
when none is given, and ``python -m tests.simulated.long_run random DRAWS SEED`` random programs.
Each prints every program that is not as it should be, or not as on the CPU, and counts: a layout
after the other, so that a run can be taken up again with those that are missing. A program runs
under ``late`` or under a random schedule, which its name or its seed draws.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

# What the ranks import is imported in functions: they run this file too, and a rank must know how
# many there are before it imports the layouts.


def _run(what: str, ranks: int, wrong: Callable[[Any], Iterator[tuple[Any, ...]]]) -> int:
    """Print everything that is wrong and how much it is; return that."""
    from tests.ranks import RankPool
    from tests.simulated.pools import SimPool
    from tests.simulated.scaler_cells import Pair

    start, broke = time.monotonic(), 0
    pair = Pair(RankPool(ranks), SimPool(ranks))
    for schedule, program, complaints in wrong(pair):
        broke += 1
        print(schedule, program, *complaints, sep="\n    ", flush=True)
    pair.close()
    print(
        f"{datetime.date.today()}, torch {torch.__version__}: {what} on {ranks} simulated "
        f"devices, {broke} wrong; {time.monotonic() - start:.0f} s",
        flush=True,
    )
    return broke


def _random(draws: int, seed: int) -> int:
    from tests.simulated.scaler_cells import wrong_programs

    name = f"{draws} programs drawn from seed {seed}"
    return _run(name, 2, lambda pair: wrong_programs(pair, draws, seed))


def _cells(layouts: list[str]) -> int:
    from tests.simulated.scaler_cells import EXCEPTIONS, FOUR_RANKS, LAYOUTS, cells_of, wrong_cells

    broke = 0
    for layout in layouts or [each for each in LAYOUTS if each not in EXCEPTIONS]:
        name = f"{len(list(cells_of(layout)))} cells of {layout}"
        ranks = 4 if layout in FOUR_RANKS else 2
        broke += _run(name, ranks, lambda pair, layout=layout: wrong_cells(pair, layout))
    return broke


def main() -> None:
    what, *rest = sys.argv[1:]
    broke = _random(*map(int, rest)) if what == "random" else _cells(rest)
    sys.exit(bool(broke))


if __name__ == "__main__":
    main()
