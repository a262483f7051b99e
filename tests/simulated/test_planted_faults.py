"""Mistakes that a CPU cannot show, made on purpose: each is found, and without it all is well.

Every function makes the mistake or not, and returns what a test can see of it. Each mistake shows
under the schedules named beside it; the right way gives the right numbers under every schedule.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.place import here
from tests.ranks import RankError

LATE, OTHERS = "late", "late_others"
SCHEDULES = [(LATE, 0), (OTHERS, 0), ("eager", 0), ("random", 1)]


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


def future_without_its_device(fault: bool) -> float:
    """A hook's future says nothing of its device, so DDP reads the bucket before it is reduced."""
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False).to(here()))
    side = torch.Stream(here())

    def hook(_, bucket):
        side.wait_stream(torch.accelerator.current_stream())
        future = torch.futures.Future(devices=None if fault else [here()])
        with side:
            dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG)
            future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    model(torch.full((1, 4), 1.0 + rank, device=here())).sum().backward()
    return model.module.weight.grad.mean().item()


def buffer_of_a_collective_used_too_soon(fault: bool) -> float:
    """A buffer is written to while the collective that fills it is under way."""
    buffer = torch.full((4,), 1.0, device="sim")
    work = dist.all_reduce(buffer, async_op=True)
    if not fault:
        work.wait()
    buffer.add_(10.0)
    work.wait()
    return buffer.mean().item()


# How many ranks, the right result, and where the mistake shows.
FAULTS = {
    missing_wait_stream: (1, 6.0, [LATE]),
    missing_record_stream: (1, 6.0, [LATE, OTHERS]),
    future_without_its_device: (2, 1.5, [LATE, OTHERS]),
    buffer_of_a_collective_used_too_soon: (2, 12.0, [OTHERS]),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_and_without_it_every_schedule_is_right(sim_ranks, fault):
    size, right, schedules = FAULTS[fault]
    pool = sim_ranks(size)
    for schedule in schedules:
        assert right not in pool.run(fault, True, schedule=schedule)
    for schedule, seed in SCHEDULES:
        assert pool.run(fault, False, schedule=schedule, seed=seed) == [right] * size


def _another_order(fault: bool) -> list[float]:
    """One rank reduces and then gathers, the other gathers and then reduces."""
    reduced, gathered = torch.full((4,), 1.0, device="sim"), torch.empty(4, device="sim")
    mine = torch.full((2,), 1.0 + dist.get_rank(), device="sim")
    calls = [
        lambda: dist.all_reduce(reduced),
        lambda: dist.all_gather_into_tensor(gathered, mine),
    ]
    for call in reversed(calls) if fault and dist.get_rank() else calls:
        call()
    return (reduced + gathered).tolist()


def test_collectives_in_another_order_are_named_on_every_rank(sim2):
    assert sim2.run(_another_order, False) == [[3.0, 3.0, 4.0, 4.0]] * 2
    expected = (
        r"rank 0, 1 raised(.|\n)*number 1 of this group is all_reduce\(SUM, Float\[4\]\) "
        r"on rank 0 and all_gather_into_tensor\(Float\[2\]\) on rank 1"
    )
    with pytest.raises(RankError, match=expected):
        sim2.run(_another_order, True, group="fresh")
