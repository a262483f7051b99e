"""The scaler on simulated devices: a sample of its cells, to the bit as on the CPU, and its parts.

``python -m tests.simulated.long_run`` runs all cells and random programs.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp import DistGradScaler
from distamp.host import HostCopy
from tests.simulated.pools import SimPool
from tests.simulated.scaler_cells import EXCEPTIONS, FOUR_RANKS, LAYOUTS, Pair, program_of, sample

SCHEDULES = [("late", 0), ("late_others", 0), ("random", 11)]


@pytest.fixture
def pair(sim2, ranks2) -> Pair:
    return Pair(ranks2, sim2)


@pytest.mark.parametrize(
    "layout", [each for each in LAYOUTS if each not in (*EXCEPTIONS, *FOUR_RANKS)]
)
def test_a_sample_of_cells_is_as_on_the_cpu(pair, layout):
    programs = [program_of([each], 2) for each in sample(layout, 2)]
    schedules = [("late", 0), ("random", 7)]
    wrong = [pair.wrong(p, *s) for p, s in zip(programs, schedules, strict=False)]
    # As a text: pytest shortens a list to a line.
    assert not any(wrong), "\n\n".join(each for found in wrong for each in found)


# -- parts that the cells take for granted --------------------------------------------------------


def _host_copy(device: int) -> tuple[bool, list[float]]:
    copy = HostCopy(torch.full((3,), 5.0, device=f"sim:{device}"))
    return copy.arrived(), copy.values()


def test_a_host_copy_is_waited_for_before_it_is_read(sim):
    for schedule, seed in SCHEDULES:
        early, values = sim.one(_host_copy, 0, schedule=schedule, seed=seed)
        assert values == [5.0] * 3
        assert not early or schedule == "random"


def test_a_host_copy_from_another_device_than_the_current_is_waited_for_too(sim):
    assert sim.one(_host_copy, 2) == (False, [5.0] * 3)


def _copy_that_has_arrived() -> Any:
    from tests.simulated.device import refuse

    copy = HostCopy(torch.full((3,), 5, device="sim"))
    while not copy.arrived():
        pass
    with refuse():
        return copy.values()


def test_a_host_copy_that_is_known_to_have_arrived_is_not_waited_for(sim):
    assert sim.one(_copy_that_has_arrived) == [5, 5, 5]


def _offloaded(device: str, kind: str, unscales: bool, both: bool) -> list[Tensor]:
    """A layer on the device and one on the CPU; one optimizer of both, or of the CPU's alone."""
    torch.manual_seed(0)
    here, there = nn.Linear(4, 4).to(device), nn.Linear(4, 4)
    parameters = [*there.parameters(), *(here.parameters() if both else ())]
    settings = {"foreach": False} if kind == "SGD" else {"fused": True}
    kind_of = torch.optim.SGD if "SGD" in kind else torch.optim.AdamW
    momentum = {"momentum": 0.9} if kind == "SGD fused" else {}
    optimizer = kind_of(parameters, lr=0.1, **settings, **momentum)
    scaler = DistGradScaler(device, init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad()
        x = here(torch.ones(2, 4, device=device)) * (float("inf") if step == 1 else 1.0)
        scaler.scale(there(x.cpu()).to(device).square().mean()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    counts = scaler.step_counts(optimizer)
    assert (counts.taken, counts.skipped) == (2, 1)
    return [p.detach().cpu() for p in (*here.parameters(), *there.parameters())]


@pytest.mark.parametrize("both", [True, False], ids=["both", "CPU alone"])
@pytest.mark.parametrize("unscales", [True, False], ids=["unscale", "step"])
@pytest.mark.parametrize("kind", ["SGD", "SGD fused", "AdamW fused"])
def test_parameters_on_the_cpu_under_a_scaler_of_the_device(sim, kind, unscales, both):
    expected = sim.one(_offloaded, "cpu", kind, unscales, both)
    for schedule, seed in SCHEDULES:
        found = sim.one(_offloaded, "sim", kind, unscales, both, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def _side_stream(device: str) -> list[Tensor]:
    """The whole step on a stream of the user's own."""
    torch.manual_seed(0)
    if device == "sim":
        torch.accelerator.set_stream(torch.Stream("sim"))
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = DistGradScaler(device, init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4).to(device)).square().mean()
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.clip_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()
    values = [p.detach().cpu() for p in model.parameters()]
    if device == "sim":
        torch.accelerator.set_stream(torch.sim.default_stream())
    return [*values, torch.tensor(scaler.get_scale())]


def test_a_step_on_a_stream_of_the_user_s_own(sim):
    expected = sim.one(_side_stream, "cpu")
    for schedule, seed in SCHEDULES:
        found = sim.one(_side_stream, "sim", schedule=schedule, seed=seed)
        assert all(map(torch.equal, found, expected))


def _checkpoint(devices: tuple[str, str]) -> Any:
    """Train, save, go on; and go on from what was saved, on another device."""

    def start(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        kind = torch.device(device).type
        return model, optimizer, DistGradScaler(kind, init_scale=64.0, growth_interval=2)

    def train(model: Any, optimizer: Any, scaler: Any, steps: range) -> None:
        device = next(model.parameters()).device
        for step in steps:
            optimizer.zero_grad()
            x = torch.full((2, 4), 1.0 + step).to(device)
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    first = start(devices[0])
    train(*first, range(3))
    states = [each.state_dict() for each in first]
    second = start(devices[1])
    for each, state in zip(second, states, strict=True):
        each.load_state_dict(state)
    for each in (first, second):
        train(*each, range(3, 6))
    ends = [[p.detach().cpu() for p in each[0].parameters()] for each in (first, second)]
    return all(map(torch.equal, *ends)), first[2].get_scale() == second[2].get_scale()


@pytest.mark.parametrize("devices", [("sim:0", "sim:2"), ("sim:1", "cpu"), ("cpu", "sim:3")])
def test_a_run_goes_on_from_a_checkpoint_of_another_device(sim, devices):
    assert sim.one(_checkpoint, devices) == (True, True)


def _two_scalers_accumulating(device: str) -> Any:
    """Two models, a scaler each, gradients of two passes; one overflows once on one rank."""
    rank = dist.get_rank()
    where = f"{device}:{rank}" if device == "sim" else device
    found = []
    torch.manual_seed(0)
    parts = []
    for _ in range(2):
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).to(where))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        parts.append((model, optimizer, DistGradScaler(device, init_scale=256.0)))
    for step in range(4):
        for number, (model, optimizer, scaler) in enumerate(parts):
            for micro in range(2):
                bad = step == 1 and micro == 1 and rank == 1 and number == 0
                x = torch.full((2, 4), 1.0 + rank + micro, device=where)
                loss = model(x).square().mean() * (float("inf") if bad else 1.0)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for model, optimizer, scaler in parts:
        found.append([p.detach().cpu() for p in model.parameters()])
        found.append(scaler.get_scale())
        found.append(scaler.stepped(optimizer))
    return found


def test_two_scalers_and_accumulation_under_ddp(sim2, ranks2):
    expected = ranks2.run(_two_scalers_accumulating, "cpu")
    for schedule, seed in SCHEDULES:
        found = sim2.run(_two_scalers_accumulating, "sim", schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _two_scalers_of_one_group(device: str) -> list[Any]:
    """One steps a fused optimizer, whose replies are read late, and one another; both clip."""
    rank = dist.get_rank()
    where = f"{device}:{rank}" if device == "sim" else device
    torch.manual_seed(0)
    parts = []
    for fused in (True, False):
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).to(where))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused, foreach=not fused)
        parts.append((model, optimizer, DistGradScaler(device, init_scale=256.0)))
    found: list[Any] = []
    for step in range(8):
        for number, (model, optimizer, scaler) in enumerate(parts):
            bad = rank == 1 and step == 2 + 3 * number
            x = torch.full((2, 4), 1.0 + rank, device=where)
            loss = model(x).square().mean() * (float("inf") if bad else 1.0)
            scaler.scale(loss).backward()
            if (step + number) % 3:
                found.append(scaler.clip_grad_norm_(optimizer, 0.5).cpu())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for model, optimizer, scaler in parts:
        found.append([p.detach().cpu() for p in model.parameters()])
        found.append((scaler.get_scale(), scaler.step_counts(optimizer).skipped))
    return found


def test_two_scalers_of_one_group_of_which_one_reads_its_replies_late(sim2, ranks2):
    expected = ranks2.run(_two_scalers_of_one_group, "cpu")
    assert [rank[-1] for rank in expected] == [(128.0, 1)] * 2
    for schedule, seed in SCHEDULES:
        found = sim2.run(_two_scalers_of_one_group, "sim", schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def _one_rank_has_the_loss() -> Any:
    """Two stages of a pipeline: only the last one scales a loss, the other is sent gradients."""
    rank = dist.get_rank()
    weight = nn.Parameter(torch.ones(3 + rank, device=f"sim:{rank}"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = DistGradScaler("sim", init_scale=64.0, growth_interval=2)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        if rank:
            scaler.scale(weight.sum() * (float("inf") if step == 2 else 1.0)).backward()
        else:
            weight.grad = torch.full_like(weight, scaler.get_scale() if step else 64.0)
        scaler.step(optimizer)
        found.append(scaler.stepped(optimizer))
        scaler.update()
        found.append(scaler.get_scale())
    return found, weight[:3].detach()


def test_ranks_of_which_one_has_the_loss_step_together(sim2):
    expected = [True, 64.0, True, 128.0, False, 64.0, True, 64.0]
    for schedule, seed in SCHEDULES:
        for found, weight in sim2.run(_one_rank_has_the_loss, schedule=schedule, seed=seed):
            assert found == expected
            assert weight.tolist() == [-2.0] * 3


def _clips_of_parameters_that_stop_being_replicas() -> int:
    """For three steps the gradients of two ranks agree, then no longer: how often is it told?"""
    rank = dist.get_rank()
    weight = nn.Parameter(torch.ones(4, device=f"sim:{rank}"))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = DistGradScaler("sim", init_scale=4.0)
    seen = 0
    for step in range(6):
        factor = 1.0 if step < 3 else 3.0 + rank  # of gradients of norm 2
        optimizer.zero_grad()
        scaler.scale(weight.sum() * factor).backward()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            scaler.clip_grad_norm_(optimizer, 1e6)
            scaler.step(optimizer)
        seen += sum("sharded=lambda" in str(each.message) for each in told)
        scaler.update()
    return seen


@pytest.mark.usefixtures("sim2")
def test_a_group_of_the_device_alone():
    """As after init_process_group("nccl"): no gloo, so what ranks compare goes by the device."""
    with contextlib.closing(SimPool(2, backend="sim:simccl")) as pool:
        expected = [True, 64.0, True, 128.0, False, 64.0, True, 64.0]
        assert [found for found, _ in pool.run(_one_rank_has_the_loss)] == [expected] * 2
        for told in pool.run(_clips_of_parameters_that_stop_being_replicas):
            assert told == 3
