"""The late process group: the result of each collective, the time of the result, and refusals."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.on_ranks import on_devices
from tests.place import rank_device
from tests.ranks import RankError

SCHEDULES = [("late", 0), ("late_others", 0), ("random", 1)]


class _Tensors:
    """Makes the inputs and outputs of collectives on this rank, in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rank = dist.get_rank()
        self.other_rank = 1 - self.rank
        self.dtype = dtype

    def values(self, count: int) -> Tensor:
        """Return values that differ between ranks."""
        numbers = torch.arange(count) + 3 * self.rank
        return numbers.to(rank_device(), self.dtype)

    def zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=self.dtype, device=rank_device())


def all_reduce_sum(tensors: _Tensors) -> Any:
    result = tensors.values(4)
    dist.all_reduce(result)
    return result


def all_reduce_max(tensors: _Tensors) -> Any:
    result = tensors.values(4)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result


def broadcast(tensors: _Tensors) -> Any:
    result = tensors.values(4)
    dist.broadcast(result, 1)
    return result


def all_gather(tensors: _Tensors) -> Any:
    results = [tensors.zeros(3), tensors.zeros(3)]
    dist.all_gather(results, tensors.values(3))
    return results


def all_gather_into_tensor(tensors: _Tensors) -> Any:
    result = tensors.zeros(6)
    dist.all_gather_into_tensor(result, tensors.values(3))
    return result


def reduce_scatter_tensor(tensors: _Tensors) -> Any:
    result = tensors.zeros(2)
    dist.reduce_scatter_tensor(result, tensors.values(4))
    return result


def reduce_scatter(tensors: _Tensors) -> Any:
    result = tensors.zeros(2)
    dist.reduce_scatter(result, [tensors.values(2), tensors.values(2) + 1])
    return result


def all_to_all(tensors: _Tensors) -> Any:
    result = tensors.zeros(4)
    dist.all_to_all_single(result, tensors.values(4))
    return result


def all_to_all_of_uneven_parts(tensors: _Tensors) -> Any:
    """Send 1 value to rank 0 and 2 values to rank 1."""
    received = 1 + tensors.rank
    result = tensors.zeros(2 * received)
    dist.all_to_all_single(result, tensors.values(3), [received, received], [1, 2])
    return result


def gather(tensors: _Tensors) -> Any:
    results = [tensors.zeros(2), tensors.zeros(2)]
    dist.gather(tensors.values(2), results if tensors.rank == 0 else None, 0)
    return results


def scatter(tensors: _Tensors) -> Any:
    result = tensors.zeros(2)
    inputs = [tensors.values(2), tensors.values(2) + 1]
    dist.scatter(result, inputs if tensors.rank == 1 else None, 1)
    return result


def batched_send_and_receive(tensors: _Tensors) -> Any:
    result = tensors.zeros(4)
    send = dist.P2POp(dist.isend, tensors.values(4), tensors.other_rank)
    receive = dist.P2POp(dist.irecv, result, tensors.other_rank)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return result


def send_and_receive(tensors: _Tensors) -> Any:
    result = tensors.zeros(4)
    if tensors.rank == 0:
        dist.send(tensors.values(4), 1)
        dist.recv(result, 1)
    else:
        dist.recv(result, 0)
        dist.send(tensors.values(4), 0)
    return result


COLLECTIVES = [
    all_reduce_sum,
    all_reduce_max,
    broadcast,
    all_gather,
    all_gather_into_tensor,
    reduce_scatter_tensor,
    reduce_scatter,
    all_to_all,
    all_to_all_of_uneven_parts,
    gather,
    scatter,
    batched_send_and_receive,
    send_and_receive,
]


def _call_all(dtype: torch.dtype) -> dict[str, Any]:
    """Call every collective; return the results, by name."""
    results = {}
    for collective in COLLECTIVES:
        results[collective.__name__] = collective(_Tensors(dtype))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_collectives_have_the_results_of_gloo(sim2, ranks2, dtype):
    expected = ranks2.run(_call_all, dtype)
    for schedule, seed in SCHEDULES:
        results = sim2.run(_call_all, dtype, schedule=schedule, seed=seed)
        torch.testing.assert_close(results, expected, rtol=0, atol=0)


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
    with counted() as counts_of_barrier:
        dist.barrier(group=group)
    assert counts_of_barrier == {"stream": 1}, "a barrier makes the host wait"
    assert x.tolist() == [3.0, 3.0]


def _short() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.int16, device="sim"))


def _sparse() -> None:
    embedding = nn.Embedding(4, 2, sparse=True).to("sim")
    embedding(torch.arange(2, device="sim")).square().sum().backward()
    dist.all_reduce(embedding.weight.grad)


@on_devices(2)
@pytest.mark.parametrize(
    ("collective", "error", "message"),
    [
        (_short, TypeError, "not supported for NCCL process group: Short"),
        (_sparse, RuntimeError, "no sparse tensor in c10d::allreduce_"),
    ],
)
def test_a_collective_that_nccl_refuses_is_refused(collective, error, message):
    with pytest.raises(error, match=message):
        collective()


def _different_shapes() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank(), device="sim"))


def test_different_shapes_are_refused(sim2):
    with pytest.raises(RankError, match=r"Float\[2\]\) on rank 0 and all_reduce\(SUM, Float\[3\]"):
        sim2.run(_different_shapes)
