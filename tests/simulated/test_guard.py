"""Steps by a guard and by a scaler on two simulated devices, by a norm or not, as on the CPU."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import DistGradScaler, StepGuard
from tests.place import device_type, here
from tests.ranks import logged
from tests.scaler.steps import INF, NAN
from tests.simulated.pools import under_schedules


def _trained(by: str, how: str, calls: dict[str, Any]) -> Any:
    """Five steps of two optimizers, of which the third has NaN or inf on the last rank alone.

    The fourth is a spike.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(here())
    optimizers = [torch.optim.AdamW(net[i].parameters(), lr=0.1, **{how: True}) for i in (0, 2)]
    made: Any = StepGuard()
    if by == "scaler":
        made = DistGradScaler(device_type(), init_scale=64.0)
    x = torch.ones(2, 4, device=here())
    for number in range(5):
        net.zero_grad()
        made.scale(net(x).square().sum() * (1000.0 if number == 3 else 1.0)).backward()
        if number == 2 and dist.get_rank():
            net[0].weight.grad[0, 0] = NAN if how == "fused" else INF
        made.step_all(optimizers, **calls)
        made.update()
    counts = [made.step_counts(optimizer) for optimizer in optimizers]
    told = [(each.taken, each.skipped, each.spikes) for each in counts]
    return [p.detach() for p in net.parameters()], made.get_scale(), told


# The second clips every step, the third none; a norm is of both optimizers.
CALLS = [{}, {"max_norm": 0.5}, {"max_norm": 90.0, "skip_above": 100.0}]


@pytest.mark.parametrize(
    ("by", "how", "calls", "schedule", "seed"),
    under_schedules(itertools.product(["guard", "scaler"], ["fused", "foreach"], CALLS)),
    ids=str,
)
def test_it_trains_as_on_the_cpu(sim2, ranks2, by, how, calls, schedule, seed):
    expected = ranks2.run(_trained, by, "foreach", calls)
    first, second = expected[0][2]
    assert first == ((3, 1, 1) if "skip_above" in calls else (4, 1, 0))
    assert second == (first if calls else (5, 0, 0))
    found = sim2.run(_trained, by, how, calls, schedule=schedule, seed=seed)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _logged(fused: bool) -> list[str]:
    weight = torch.ones(2, device="sim", requires_grad=True)
    optimizer, guard = torch.optim.AdamW([weight], fused=fused), StepGuard()
    with logged("distamp.guard") as told:
        for value in (1.0, NAN if dist.get_rank() else 1.0, 1.0):
            weight.grad = torch.full_like(weight, value)
            guard.step(optimizer)
            guard.update()
        guard.step_counts(optimizer)
    return told


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_each_bad_rank_logs_its_own_skip(sim2, fused):
    first, (line,) = sim2.run(_logged, fused)
    assert first == []
    assert "step 2 of AdamW" in line
    assert "on rank 1" in line
