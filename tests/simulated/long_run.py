"""Everything the scaler can meet, on simulated devices: all cells, and random programs.

``python -m tests.simulated.long_run cells [LAYOUT ...]`` and
``python -m tests.simulated.long_run random DRAWS SEED`` print every program that is not as it
should be, or not as on the CPU, and count them. Each is run under ``late`` or under a random
schedule of its own.
"""

from __future__ import annotations

import datetime
import random
import sys
import time
from collections.abc import Iterable, Iterator

import torch

# What the ranks import is imported in functions: a rank must know how many there are before it
# imports the layouts.


def _programs_of(layout: str, ranks: int) -> Iterator[object]:
    from tests.simulated.scaler_cells import cells_of, program_of

    for each in cells_of(layout):
        yield program_of(each, ranks)


def _drawn(draws: int, seed: int, ranks: int) -> Iterator[object]:
    from dataclasses import replace

    from tests.scaler.programs import Program
    from tests.scaler.test_random_programs import _draw
    from tests.simulated.scaler_cells import EXCEPTIONS, FOUR_RANKS, fitted

    drawn: list[Program] = []
    _draw(drawn.append, draws, seed)
    for program in drawn:
        if program.layout in (*EXCEPTIONS, *FOUR_RANKS):
            program = replace(program, layout="DDP")
        yield fitted(program, ranks)


def _run(name: str, programs: Iterable[object], ranks: int) -> None:
    from tests.ranks import RankPool
    from tests.simulated.pools import SimPool
    from tests.simulated.scaler_cells import Pair

    start, seen, broke = time.monotonic(), 0, 0
    pair = Pair(RankPool(ranks), SimPool(ranks))
    chance = random.Random(name)
    for program in programs:
        schedule = ("late", 0) if chance.random() < 0.5 else ("random", chance.randrange(10**6))
        wrong = pair.wrong(program, *schedule)  # type: ignore[arg-type]
        seen, broke = seen + 1, broke + bool(wrong)
        if wrong:
            print(schedule, program, *wrong, sep="\n    ", flush=True)
    pair.sim.close()
    pair.cpu.close()
    print(
        f"{datetime.date.today()}, torch {torch.__version__}: {seen} {name} on {ranks} simulated "
        f"devices, {broke} wrong; {time.monotonic() - start:.0f} s",
        flush=True,
    )


def main() -> None:
    from tests.simulated.scaler_cells import EXCEPTIONS, FOUR_RANKS, LAYOUTS

    what, *rest = sys.argv[1:]
    if what == "random":
        draws, seed = map(int, rest)
        _run(f"programs drawn from seed {seed}", _drawn(draws, seed, 2), 2)
        return
    for layout in rest or [each for each in LAYOUTS if each not in EXCEPTIONS]:
        ranks = 4 if layout in FOUR_RANKS else 2
        _run(f"cells of {layout}", _programs_of(layout, ranks), ranks)


if __name__ == "__main__":
    main()
