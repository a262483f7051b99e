"""All of the scaler's cells and 1,000 random programs on simulated devices: hours, so marked slow.

What was run of it stands in docs/results/simulated_runs.md.
"""

from __future__ import annotations

import pytest

from tests.simulated.scaler_cells import (
    EXCEPTIONS,
    FOUR_RANKS,
    LAYOUTS,
    Pair,
    cells_of,
    drawn_programs,
    wrong_cells,
    wrong_programs,
)

CELLS = sorted({each[:2] for layout in LAYOUTS for each in cells_of(layout)})
PART = 50

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(("layout", "kind"), [c for c in CELLS if c[0] not in EXCEPTIONS])
def test_every_cell_is_as_on_the_cpu(sim_ranks, ranks, layout, kind):
    count = 4 if layout in FOUR_RANKS else 2
    assert not list(wrong_cells(Pair(ranks(count), sim_ranks(count)), layout, kind))


@pytest.mark.parametrize("part", range(1000 // PART))
def test_random_programs_are_as_on_the_cpu(sim2, ranks2, part):
    pair = Pair(ranks2, sim2)
    drawn = drawn_programs(pair, 1000, 0)[part * PART : (part + 1) * PART]
    assert not list(wrong_programs(pair, drawn))
