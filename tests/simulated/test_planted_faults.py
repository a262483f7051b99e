"""Mistakes that a CPU cannot show are found on the simulated device.

Every function takes ``fault``, makes its mistake or not, and returns a number. A mistake gives a
wrong number under the schedules in ``FAULTS``. Correct code gives the same number under every
schedule.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.place import rank_device
from tests.ranks import RankError

LATE, OTHERS = "late", "late_others"
SCHEDULES = [(LATE, 0), (OTHERS, 0), ("eager", 0), ("random", 1)]


def missing_wait_stream(fault: bool) -> float:
    """Read memory on a second stream before the first has written it."""
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    x = torch.full((64,), 3.0, device="sim")
    if not fault:
        side.wait_stream(main)
    with side:
        y = x * 2
    main.wait_stream(side)
    return y.sum().item() / 64


def missing_record_stream(fault: bool) -> float:
    """Free memory that a second stream still reads, so that the first stream uses it again."""
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    x = torch.full((64,), 3.0, device="sim")
    side.wait_stream(main)
    with side:
        y = x * 2
    if not fault:
        x.record_stream(side)
    del x
    overwrite = torch.full((64,), 9.0, device="sim")
    del overwrite
    main.synchronize()
    main.wait_stream(side)
    return y.sum().item() / 64


def future_without_its_device(fault: bool) -> float:
    """Return a future without a device from a hook, so that DDP reads the bucket too early."""
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False).to(rank_device()))
    side = torch.Stream(rank_device())

    def hook(_, bucket):
        side.wait_stream(torch.accelerator.current_stream())
        future = torch.futures.Future(devices=None if fault else [rank_device()])
        with side:
            dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG)
            future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    model(torch.full((1, 4), 1.0 + rank, device=rank_device())).sum().backward()
    return model.module.weight.grad.mean().item()


def buffer_of_a_collective_used_too_soon(fault: bool) -> float:
    """Write to a buffer while a collective fills it."""
    buffer = torch.full((4,), 1.0, device="sim")
    work = dist.all_reduce(buffer, async_op=True)
    if not fault:
        work.wait()
    buffer.add_(10.0)
    work.wait()
    return buffer.mean().item()


# The number of ranks, the correct result, and the schedules that show the mistake.
FAULTS: dict[Callable[[bool], float], tuple[int, float, list[str]]] = {
    missing_wait_stream: (1, 6.0, [LATE]),
    missing_record_stream: (1, 6.0, [LATE, OTHERS]),
    future_without_its_device: (2, 1.5, [LATE, OTHERS]),
    buffer_of_a_collective_used_too_soon: (2, 12.0, [OTHERS]),
}


def name_of(function: Callable[[bool], float]) -> str:
    return function.__name__


@pytest.mark.parametrize("function", FAULTS, ids=name_of)
def test_a_fault_gives_a_wrong_result_on_every_rank(sim_ranks, function):
    world_size, expected, schedules = FAULTS[function]
    for schedule in schedules:
        results = sim_ranks(world_size).run(function, True, schedule=schedule)
        assert expected not in results, schedule


@pytest.mark.parametrize("function", FAULTS, ids=name_of)
def test_correct_code_gives_the_same_result_under_every_schedule(sim_ranks, function):
    world_size, expected, _ = FAULTS[function]
    for schedule, seed in SCHEDULES:
        results = sim_ranks(world_size).run(function, False, schedule=schedule, seed=seed)
        assert results == [expected] * world_size, schedule


def reduce_and_gather(fault: bool) -> list[float]:
    """Reduce and then gather; with the fault, rank 1 gathers first."""
    reduced, gathered = torch.full((4,), 1.0, device="sim"), torch.empty(4, device="sim")
    shard = torch.full((2,), 1.0 + dist.get_rank(), device="sim")
    if fault and dist.get_rank() == 1:
        dist.all_gather_into_tensor(gathered, shard)
        dist.all_reduce(reduced)
    else:
        dist.all_reduce(reduced)
        dist.all_gather_into_tensor(gathered, shard)
    return (reduced + gathered).tolist()


def test_collectives_in_another_order_are_named_on_every_rank(sim2):
    assert sim2.run(reduce_and_gather, False) == [[3.0, 3.0, 4.0, 4.0]] * 2
    expected = (
        r"rank 0, 1 raised(.|\n)*number 1 of this group is all_reduce\(SUM, Float\[4\]\) "
        r"on rank 0 and all_gather_into_tensor\(Float\[2\]\) on rank 1"
    )
    with pytest.raises(RankError, match=expected):
        sim2.run(reduce_and_gather, True, group="fresh")
