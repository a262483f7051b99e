"""StepGuard and steps by a norm on simulated devices, beside the CPU."""

import contextlib
import itertools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import DistGradScaler, StepGuard
from distamp.errors import LockstepError, SettingError
from tests.scaler.steps import INF, NAN
from tests.simulated.pools import under_schedules


def _trained(device: str, by: str, how: str, calls: dict[str, Any]) -> Any:
    """Five steps, of which the third has NaN or inf on the last rank, and the fourth is a spike."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **{how: True})
    kind = torch.device(device).type
    made: Any = StepGuard() if by == "guard" else DistGradScaler(kind, init_scale=64.0)
    x = torch.ones(2, 4, device=device)
    for number in range(5):
        optimizer.zero_grad()
        made.scale(net(x).square().sum() * (1000.0 if number == 3 else 1.0)).backward()
        if number == 2 and (not dist.is_initialized() or dist.get_rank()):
            net[0].weight.grad[0, 0] = NAN if how == "fused" else INF
        made.step(optimizer, **calls)
        made.update()
    counts = made.step_counts(optimizer)
    values = [p.detach().cpu() for p in net.parameters()]
    return values, made.get_scale(), (counts.taken, counts.skipped, counts.spikes)


def _here(by: str, how: str, calls: dict[str, Any]) -> Any:
    return _trained(f"sim:{torch.accelerator.current_device_index()}", by, how, calls)


# The second clips every step, the third none.
CALLS = [{}, {"max_norm": 0.5}, {"max_norm": 90.0, "skip_above": 100.0}]


@pytest.mark.parametrize(
    ("by", "how", "calls", "schedule", "seed"),
    under_schedules(itertools.product(["guard", "scaler"], ["fused", "foreach"], CALLS)),
    ids=str,
)
def test_it_trains_as_on_the_cpu(sim2, ranks2, by, how, calls, schedule, seed):
    expected = ranks2.run(_trained, "cpu", by, "foreach", calls)
    assert expected[0][2] == ((3, 1, 1) if "skip_above" in calls else (4, 1, 0))
    found = sim2.run(_here, by, how, calls, schedule=schedule, seed=seed)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _waits_for_nothing(group: bool, calls: dict[str, Any]) -> int:
    from tests.simulated.device import ALL_SYNCS, refuse

    device = f"sim:{torch.accelerator.current_device_index()}"
    weights = [torch.ones(8, device=device, requires_grad=True) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights, fused=True)
    guard = StepGuard()
    limit = torch.full((), 1e6, device=device)
    given = {**calls, **({"skip_above": limit} if calls else {})}
    bad = torch.full((), NAN, device=device)
    kinds = [kind for kind in ALL_SYNCS if not (group and kind == "event")]
    for number in range(5):
        with refuse(*kinds) if number > 1 else contextlib.nullcontext():
            optimizer.zero_grad()
            loss = torch.stack([w.square().sum() for w in weights]).sum()
            (loss * bad if number == 3 else loss).backward()
            guard.step(optimizer, **given)
            guard.grad_norm() if calls else None
            guard.update()
    return guard.step_counts(optimizer).skipped


@pytest.mark.parametrize("calls", [{}, {"max_norm": 0.5}], ids=["step", "max_norm"])
def test_a_fused_step_waits_for_nothing_and_with_a_group_for_one_event(sim, sim2, calls):
    assert sim.one(_waits_for_nothing, False, calls, schedule="late") == 1
    assert sim2.run(_waits_for_nothing, True, calls, schedule="late") == [1] * 2


def _differs(how: str) -> tuple[bool, float]:
    weight = torch.ones(1, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=True)
    guard, raised = StepGuard(), False
    for number in range(3):
        weight.grad = torch.ones_like(weight)
        given: dict[str, Any] = {"max_norm": 10.0}
        if number == 1:
            given["max_norm"] = -1.0 if how == "shared" else 10.0 + dist.get_rank()
        if how == "limit":  # by one the second step is a spike, by the other it is none
            limit = 0.5 + dist.get_rank() if number == 1 else 1.5
            given = {"skip_above": torch.full((), limit, device="sim")}
        try:
            guard.step(optimizer, **given)
        except (LockstepError, SettingError) as error:
            raised = how != "limit" or "skip_above=1.5" in str(error)
            break
        guard.update()
    return raised, weight.item()


@pytest.mark.parametrize("how", ["another", "limit", "shared"])
def test_where_ranks_differ_or_share_an_error_nothing_is_stepped(sim2, how):
    assert sim2.run(_differs, how) == [(True, 0.75)] * 2


def _logged(fused: bool) -> list[str]:
    weight = torch.ones(2, device="sim", requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=fused)
    guard, told = StepGuard(), []
    log, handler = logging.getLogger("distamp.guard"), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    for value in (1.0, NAN if dist.get_rank() else 1.0, 1.0):
        weight.grad = torch.full_like(weight, value)
        guard.step(optimizer)
        guard.update()
    guard.step_counts(optimizer)
    log.removeHandler(handler)
    return told


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_each_bad_rank_logs_its_own_skip(sim2, fused):
    first, second = sim2.run(_logged, fused)
    assert first == []
    assert len(second) == 1
    assert "step 2 of AdamW" in second[0]
    assert "on rank 1" in second[0]
