"""The late process group: what each collective gives, when it is there, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.on_ranks import on_devices
from tests.place import here
from tests.ranks import RankError

SCHEDULES = [("late", 0), ("late_others", 0), ("random", 1)]


def _collectives(dtype: torch.dtype) -> list[Any]:
    rank, device = dist.get_rank(), here()

    def values(n: int) -> Tensor:
        return (torch.arange(n) + 3 * rank).to(device, dtype)

    def new(n: int) -> Tensor:
        return torch.zeros(n, dtype=dtype, device=device)

    # What is written to, and the call that does; lists are of a part from, or for, each rank.
    uneven = ([1, 1], [1, 2]) if rank == 0 else ([2, 2], [1, 2])
    parts = [values(2), values(2) + 1]
    calls: list[tuple[Any, Callable[[Any], Any]]] = [
        (values(4), lambda t: dist.all_reduce(t)),
        (values(4), lambda t: dist.all_reduce(t, op=dist.ReduceOp.MAX)),
        (values(4), lambda t: dist.broadcast(t, 1)),
        ([new(3), new(3)], lambda t: dist.all_gather(t, values(3))),
        (new(6), lambda t: dist.all_gather_into_tensor(t, values(3))),
        (new(2), lambda t: dist.reduce_scatter_tensor(t, values(4))),
        (new(2), lambda t: dist.reduce_scatter(t, parts)),
        (new(4), lambda t: dist.all_to_all_single(t, values(4))),
        (new(2 + 2 * rank), lambda t: dist.all_to_all_single(t, values(3), *uneven)),
        ([new(2), new(2)], lambda t: dist.gather(values(2), None if rank else t, 0)),
        (new(2), lambda t: dist.scatter(t, parts if rank else None, 1)),
        (new(4), lambda t: _sent(t, values(4), 1 - rank)),
    ]
    for into, call in calls:
        call(into)
    return [into for into, _ in calls]


def _sent(into: Tensor, values: Tensor, other: int) -> None:
    ops = [dist.P2POp(dist.isend, values, other), dist.P2POp(dist.irecv, into, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    calls = [lambda: dist.send(values, other), lambda: dist.recv(into, other)]
    for call in calls if other else reversed(calls):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_collectives_give_what_gloo_gives(sim2, ranks2, dtype):
    expected = ranks2.run(_collectives, dtype)
    for schedule, seed in SCHEDULES:
        found = sim2.run(_collectives, dtype, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@on_devices(2)
def test_an_average_divides_before_it_sums_as_nccl_s_does():
    average = torch.tensor([60000.0, 1.0], dtype=torch.float16, device="sim")
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    assert average.tolist() == [60000.0, 1.0]


@on_devices(2)
def test_a_result_comes_late_and_wait_makes_only_the_stream_wait():
    from tests.simulated.device import counted, peek

    group = dist.new_group(backend="simccl")
    x = torch.full((2,), 1.0 + dist.get_rank(), device="sim")
    torch.accelerator.synchronize()
    with counted() as counts:
        work = dist.all_reduce(x, async_op=True)
        assert peek(x).tolist() == [1.0 + dist.get_rank()] * 2
        work.wait()
        assert peek(x).tolist() == [1.0 + dist.get_rank()] * 2
    assert counts == {}
    with counted() as of_barrier:
        dist.barrier(group=group)
    assert of_barrier == {"stream": 1}, "it makes the host wait"
    assert x.tolist() == [3.0, 3.0]


def _short() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.int16, device="sim"))


def _sparse() -> None:
    embedding = nn.Embedding(4, 2, sparse=True).to("sim")
    embedding(torch.arange(2, device="sim")).square().sum().backward()
    dist.all_reduce(embedding.weight.grad)


def _different_shapes() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank(), device="sim"))


REFUSED = {
    _short: "not supported for NCCL process group: Short",
    _sparse: "no sparse tensor in c10d::allreduce_",
    _different_shapes: r"Float\[2\]\) on rank 0 and all_reduce\(SUM, Float\[3\]",
}


@pytest.mark.parametrize("what", REFUSED, ids=lambda f: f.__name__)
def test_what_nccl_refuses_is_refused(sim2, what):
    with pytest.raises(RankError, match=REFUSED[what]):
        sim2.run(what)
