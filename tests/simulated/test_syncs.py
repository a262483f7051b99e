"""How often a step makes the host wait: the page's table, and what it must never do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distamp import DistGradScaler
from tests.simulated import syncs


def test_the_page_s_table_is_what_is_counted(sim, sim2):
    pools = {1: sim, 2: sim2}
    found = syncs.table(lambda ranks, path, mine: pools[ranks].run(syncs.counts, path, mine))
    assert syncs.documented() == found


def _refused(group: bool) -> float:
    """Fused steps, one of which overflows, with every kind of host sync refused but an event."""
    from tests.simulated.device import ALL_SYNCS, refuse

    device = f"sim:{torch.accelerator.current_device_index()}"
    model: nn.Module = nn.Linear(8, 4).to(device)
    if group:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = DistGradScaler("sim", init_scale=64.0)
    x = torch.ones(2, 8, device=device)
    # DDP itself reads on the host when it puts its buckets in order, in the second step.
    factors = [torch.full((), f, device=device) for f in (1.0, 1.0, 1.0, float("inf"), 1.0)]
    kinds = [kind for kind in ALL_SYNCS if not (group and kind == "event")]
    for number, factor in enumerate(factors):
        with refuse(*kinds if number > 1 else ("no_meta",)):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_a_fused_step_waits_for_nothing_in_one_process(sim, schedule):
    assert sim.one(_refused, False, schedule=schedule) == 32.0


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_a_fused_step_waits_for_one_event_with_a_group(sim2, schedule):
    assert sim2.run(_refused, True, schedule=schedule) == [32.0, 32.0]
