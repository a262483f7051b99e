"""How often a step makes the host wait, beside the page's table."""

from __future__ import annotations

from tests.simulated import syncs


def test_the_page_s_table_is_what_is_counted(sim, sim2):
    pools = {1: sim, 2: sim2}
    found = syncs.table(lambda ranks, path, mine: pools[ranks].run(syncs.counts, path, mine))
    assert syncs.documented() == found
