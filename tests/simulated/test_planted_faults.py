"""Mistakes that a CPU cannot show, made on purpose: each is found, and without it all is well.

Every function makes the mistake or not, and returns what a test can see of it. Each mistake shows
under the schedules named beside it; the right way gives the right numbers under every schedule.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import RankError

LATE, OTHERS = "late", "late_others"
SCHEDULES = [(LATE, 0), (OTHERS, 0), ("eager", 0), ("random", 1), ("random", 2)]


def _rank() -> int:
    return torch.accelerator.current_device_index()


def missing_wait_stream(fault: bool) -> float:
    """A second stream reads what the first has not yet written."""
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    x = torch.full((64,), 3.0, device="sim")
    if not fault:
        side.wait_stream(main)
    with side:
        y = x * 2
    main.wait_stream(side)
    return y.sum().item() / 64


def missing_record_stream(fault: bool) -> float:
    """Memory that a second stream still reads is freed, and the first stream uses it again."""
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    x = torch.full((64,), 3.0, device="sim")
    side.wait_stream(main)
    with side:
        y = x * 2
    if not fault:
        x.record_stream(side)
    del x
    other = torch.full((64,), 9.0, device="sim")
    del other
    main.synchronize()
    main.wait_stream(side)
    return y.sum().item() / 64


def memory_used_again_too_soon(fault: bool) -> float:
    """The stream that made a tensor uses its memory again while another still reads it."""
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    with side:
        x = torch.full((64,), 3.0, device="sim")
    side.synchronize()
    y = x * 2
    del x
    if not fault:
        side.wait_stream(main)
    with side:
        torch.full((64,), 9.0, device="sim")
    side.synchronize()
    return y.sum().item() / 64


def _future(fault: bool) -> list[float]:
    """A hook's future says nothing of its device, so DDP reads the bucket before it is reduced."""
    rank = _rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False).to(f"sim:{rank}"))
    side = torch.Stream("sim")

    def hook(_, bucket):
        side.wait_stream(torch.accelerator.current_stream())
        devices = None if fault else [torch.device("sim", rank)]
        future = torch.futures.Future(devices=devices)
        with side:
            dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG)
            future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    model(torch.full((1, 4), 1.0 + rank, device=f"sim:{rank}")).sum().backward()
    return model.module.weight.grad.cpu().flatten().tolist()


def host_copy_without_wait(fault: bool) -> float:
    """The host looks at pinned memory while the copy into it is on its way."""
    there = torch.full((8,), 5.0, device="sim")
    here = torch.empty(8, pin_memory=True)
    here.copy_(there, non_blocking=True)
    event = torch.Event("sim")
    event.record()
    if not fault:
        event.synchronize()
    return here.sum().item() / 8


def flag_made_on_another_stream(fault: bool) -> float:
    """A zero is made on a second stream and added to on the first."""
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    if fault:
        with side:
            flag = torch.zeros((), device="sim")
    else:
        flag = torch.zeros((), device="sim")
    torch.maximum(flag, torch.ones((), device="sim"), out=flag)
    main.wait_stream(side)
    return flag.item()


def buffer_used_again_too_soon(fault: bool) -> float:
    """Pinned memory is filled anew while the copy out of it is on its way."""
    staging = torch.full((8,), 1.0, pin_memory=True)
    first = staging.to("sim", non_blocking=True)
    if not fault:
        event = torch.Event("sim")
        event.record()
        event.synchronize()
    staging.fill_(2.0)
    second = staging.to("sim", non_blocking=True)
    return (first + 10 * second).sum().item() / 8


def _reduced_buffer(fault: bool) -> list[float]:
    """A buffer is written to while the collective that fills it is under way."""
    buffer = torch.full((4,), 1.0, device="sim")
    work = dist.all_reduce(buffer, async_op=True)
    if not fault:
        work.wait()
    buffer.add_(10.0)
    work.wait()
    return buffer.tolist()


def _another_order(fault: bool) -> list[float]:
    """One rank reduces and then gathers, the other gathers and then reduces."""
    reduced = torch.full((4,), 1.0, device="sim")
    mine, gathered = torch.full((2,), 1.0 + _rank(), device="sim"), torch.empty(4, device="sim")
    calls = [
        lambda: dist.all_reduce(reduced),
        lambda: dist.all_gather_into_tensor(gathered, mine),
    ]
    for call in reversed(calls) if fault and _rank() else calls:
        call()
    return (reduced + gathered).tolist()


ONE_PROCESS = {
    "missing wait_stream": (missing_wait_stream, 6.0, [LATE]),
    "missing record_stream": (missing_record_stream, 6.0, [LATE, OTHERS]),
    "memory used again too soon": (memory_used_again_too_soon, 6.0, [LATE, OTHERS]),
    "host copy read without waiting": (host_copy_without_wait, 5.0, [LATE, OTHERS]),
    "flag made on another stream": (flag_made_on_another_stream, 1.0, [OTHERS]),
    "buffer used again too soon": (buffer_used_again_too_soon, 21.0, [LATE, OTHERS]),
}
TWO_RANKS = {
    "future without its device": (_future, [1.5] * 4, [LATE, OTHERS]),
    "buffer of a collective used too soon": (_reduced_buffer, [12.0] * 4, [OTHERS]),
}


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_a_fault_is_found_and_without_it_every_schedule_is_right(sim, name):
    function, right, schedules = ONE_PROCESS[name]
    assert right not in [sim.one(function, True, schedule=each) for each in schedules]
    drawn = [sim.one(function, True, schedule="random", seed=seed) for seed in range(20)]
    assert any(value != right for value in drawn)
    assert [sim.one(function, False, schedule=s, seed=n) for s, n in SCHEDULES] == [right] * 5


@pytest.mark.parametrize("name", TWO_RANKS)
def test_a_fault_between_ranks_is_found_and_without_it_every_schedule_is_right(sim2, name):
    function, right, schedules = TWO_RANKS[name]
    assert all(right not in sim2.run(function, True, schedule=each) for each in schedules)
    for schedule, seed in SCHEDULES:
        assert sim2.run(function, False, schedule=schedule, seed=seed) == [right, right]


def test_collectives_in_another_order_are_named_on_every_rank(sim2):
    assert sim2.run(_another_order, False) == [[3.0, 3.0, 4.0, 4.0]] * 2
    with pytest.raises(RankError) as error:
        sim2.run(_another_order, True, group="fresh")
    expected = (
        "number 1 of this group is all_reduce(SUM, Float[4]) on rank 0 and "
        "all_gather_into_tensor(Float[2]) on rank 1"
    )
    assert "rank 0, 1 raised" in str(error.value)
    assert expected in str(error.value)
