"""The late process group: what each collective gives, when it is there, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import RankError, mesh

SCHEDULES = [("late", 0), ("late_others", 0), ("eager", 0), ("random", 1)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8]


def _values(n: int, dtype: torch.dtype, device: str) -> Tensor:
    return (torch.arange(n) + 3 * dist.get_rank()).to(device, dtype)


def _collectives(device: str, dtype: torch.dtype) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    other = 1 - rank
    new = lambda n: torch.zeros(n, dtype=dtype, device=device)  # noqa: E731
    found: dict[str, Any] = {}
    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        found[op] = _values(4, dtype, device)
        dist.all_reduce(found[op], op=getattr(dist.ReduceOp, op))
    found["broadcast"] = _values(4, dtype, device)
    dist.broadcast(found["broadcast"], 1)
    found["reduce"] = _values(4, dtype, device)
    dist.reduce(found["reduce"], 1)
    if rank == 0:  # what is left on the others is nobody's business
        del found["reduce"]
    found["all_gather"] = [new(3), new(3)]
    dist.all_gather(found["all_gather"], _values(3, dtype, device))
    found["all_gather_into_tensor"] = new(6)
    dist.all_gather_into_tensor(found["all_gather_into_tensor"], _values(3, dtype, device))
    found["reduce_scatter_tensor"] = new(2)
    dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], _values(4, dtype, device))
    found["reduce_scatter"] = new(2)
    dist.reduce_scatter(found["reduce_scatter"], [_values(2, dtype, device) + i for i in range(2)])
    found["all_to_all_single"] = new(4)
    dist.all_to_all_single(found["all_to_all_single"], _values(4, dtype, device))
    found["uneven"] = new(2 if rank == 0 else 4)
    splits = ([1, 1], [1, 2]) if rank == 0 else ([2, 2], [1, 2])
    dist.all_to_all_single(found["uneven"], _values(3, dtype, device), *splits)
    found["gather"] = [new(2) for _ in range(world)] if rank == 0 else None
    dist.gather(_values(2, dtype, device), found["gather"], 0)
    found["scatter"] = new(2)
    parts = [_values(2, dtype, device) + i for i in range(world)] if rank == 1 else None
    dist.scatter(found["scatter"], parts, 1)
    found["send and recv"] = new(4)
    calls = [
        lambda: dist.send(_values(4, dtype, device), other),
        lambda: dist.recv(found["send and recv"], other),
    ]
    for call in calls if rank == 0 else reversed(calls):
        call()
    found["batch"] = new(4)
    ops = [
        dist.P2POp(dist.isend, _values(4, dtype, device), other),
        dist.P2POp(dist.irecv, found["batch"], other),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_give_what_gloo_gives(sim2, ranks2, dtype):
    expected = ranks2.run(_collectives, "cpu", dtype)
    for schedule, seed in SCHEDULES:
        found = sim2.run(_collectives, "sim", dtype, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _average() -> Any:
    rank = dist.get_rank()
    average = torch.tensor([60000.0, 1.0], dtype=torch.float16, device="sim")
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    part = torch.empty(2, device="sim")
    dist.reduce_scatter_tensor(part, torch.arange(4.0, device="sim") + rank, op=dist.ReduceOp.AVG)
    return average.tolist(), part.tolist()


def test_an_average_divides_before_it_sums_as_nccl_s_does(sim2):
    assert sim2.run(_average) == [([60000.0, 1.0], [0.5, 1.5]), ([60000.0, 1.0], [2.5, 3.5])]


def _lists() -> Any:
    rank = dist.get_rank()
    inputs = [torch.full((i + 1,), 10.0 * rank + i, device="sim") for i in range(2)]
    outputs = [torch.empty(rank + 1, device="sim") for _ in range(2)]
    dist.all_to_all(outputs, inputs)
    return [t.tolist() for t in outputs]


def test_all_to_all_of_lists(sim2):
    assert sim2.run(_lists) == [[[0.0], [10.0]], [[1.0, 1.0], [11.0, 11.0]]]


def _dropped() -> list[float]:
    dist.all_reduce(torch.full((64,), 7.0, device="sim"), async_op=True)
    later = torch.full((64,), 5.0, device="sim")  # in the same memory, if that was given back
    torch.accelerator.synchronize()
    return later.tolist()


def test_memory_of_a_work_that_is_dropped_is_kept_until_it_is_done(sim2):
    for schedule, seed in SCHEDULES:
        assert sim2.run(_dropped, schedule=schedule, seed=seed) == [[5.0] * 64] * 2


def _lateness() -> Any:
    from tests.simulated.device import counted, peek

    x = torch.full((2,), 1.0 + dist.get_rank(), device="sim")
    torch.accelerator.synchronize()
    with counted() as counts:
        work = dist.all_reduce(x, async_op=True)
        early = peek(x).tolist()
        work.wait()
        after_wait = peek(x).tolist()
    return early[0] == 1.0 + dist.get_rank(), early == after_wait, counts, x.tolist()


def test_a_result_comes_late_and_wait_makes_only_the_stream_wait(sim2):
    assert sim2.run(_lateness) == [(True, True, {}, [3.0, 3.0])] * 2


def _futures() -> Any:
    x = torch.full((2,), 1.0 + dist.get_rank(), device="sim")
    here = torch.accelerator.current_stream()
    streams = []

    def double(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        streams.append(torch.accelerator.current_stream() != here)
        return future.value()[0] * 2

    work = dist.all_reduce(x, async_op=True)
    doubled = work.get_future().then(double).wait()
    return streams, doubled.tolist()


def test_what_is_chained_to_a_future_runs_behind_the_collective(sim2):
    for schedule, seed in SCHEDULES:
        assert sim2.run(_futures, schedule=schedule, seed=seed) == [([True], [6.0, 6.0])] * 2


def _one_goes_ahead() -> Any:
    # Rank 0 waits on the host for something that rank 1 sends behind its collective.
    x, note = torch.ones(2, device="sim"), torch.zeros(1)
    work = dist.all_reduce(x, async_op=True)
    if dist.get_rank() == 0:
        dist.recv(note, 1)
        work.wait()
        return x.tolist()
    work.wait()
    dist.send(note, 0)
    return x.tolist()


def test_ranks_do_not_wait_for_each_other_where_nccl_would_not(sim2):
    for schedule, seed in SCHEDULES:
        assert sim2.run(_one_goes_ahead, schedule=schedule, seed=seed) == [[2.0, 2.0]] * 2


def _short() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.int16, device="sim"))


def test_dtypes_that_nccl_refuses_are_refused(sim2):
    with pytest.raises(RankError, match="not supported for NCCL process group: Short"):
        sim2.run(_short)


def _bits() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.int64, device="sim"), op=dist.ReduceOp.BOR)


def test_bitwise_reductions_are_refused(sim2):
    with pytest.raises(RankError, match="NCCL has no such reduction"):
        sim2.run(_bits)


def _sparse() -> None:
    embedding = nn.Embedding(4, 2, sparse=True).to("sim")
    embedding(torch.arange(2, device="sim")).square().sum().backward()
    assert embedding.weight.grad is not None
    dist.all_reduce(embedding.weight.grad)


def test_sparse_tensors_are_refused(sim2):
    with pytest.raises(RankError, match="no sparse tensor in c10d::allreduce_"):
        sim2.run(_sparse)


def _barrier() -> Any:
    from tests.simulated.device import counted

    group = dist.new_group(backend="simccl")
    with counted() as counts:
        dist.barrier(group=group)
    return counts


def test_a_barrier_is_a_host_sync(sim2):
    assert sim2.run(_barrier) == [{"stream": 1}] * 2


def _different_shapes() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank(), device="sim"))


def test_one_collective_of_different_shapes_is_an_error_too(sim2):
    with pytest.raises(RankError, match=r"Float\[2\]\) on rank 0 and all_reduce\(SUM, Float\[3\]"):
        sim2.run(_different_shapes)


# -- torch's wrappers run on it -------------------------------------------------------------------


def _wrapped(device: str, how: str) -> list[Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    rank = dist.get_rank()
    where = f"{device}:{rank}" if device == "sim" else device
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).to(where)
    if how == "DDP":
        model: nn.Module = nn.parallel.DistributedDataParallel(net)
    elif how == "FSDP1":
        model = FullyShardedDataParallel(net, device_id=torch.device(where), use_orig_params=True)
    else:
        shape = {"FSDP2": ((2,), ("shard",)), "HSDP": ((2, 1), ("replicate", "shard"))}[how]
        model = fully_shard(net, mesh=mesh(*shape, device=device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(4, 8, generator=generator).to(where)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if how == "FSDP1":
        with FullyShardedDataParallel.summon_full_params(model):
            return [p.detach().cpu().clone() for p in model.parameters()]
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu()
        for p in model.parameters()
    ]


@pytest.mark.parametrize("how", ["DDP", "FSDP1", "FSDP2", "HSDP"])
def test_a_wrapped_model_trains_as_on_the_cpu_to_the_bit(sim2, ranks2, how):
    expected = ranks2.run(_wrapped, "cpu", how)
    for schedule, seed in SCHEDULES:
        found = sim2.run(_wrapped, "sim", how, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
