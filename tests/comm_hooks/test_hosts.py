"""Which ranks are on which hosts: one table, from which all ranks come to the same."""

import os
import re
import socket
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from distamp.comm_hooks import HookStats
from distamp.comm_hooks.hosts import Row, hosts_of
from distamp.errors import LockstepError
from tests.comm_hooks.training import BOUNDS, agreed, gradients, inputs, mlp
from tests.ranks import mesh, subgroup

WIDTHS = (31, 97, 64, 5)


def rows(hosts: str, local: list[int] | int = 0, given: int | None = None) -> list[Row]:
    """A rank on each of these hosts, named by letters."""
    sizes = local if isinstance(local, list) else [local] * len(hosts)
    pairs = zip(hosts, sizes, strict=True)
    return [
        Row(rank, host, size, given, "fp16", f"n{rank}") for rank, (host, size) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("table", "ranks"),
    [
        (rows("aabb"), [[0, 1], [2, 3]]),
        (rows("aabbcc"), [[0, 1], [2, 3], [4, 5]]),
        (rows("aabb", 2), [[0, 1], [2, 3]]),
        # Containers that all have one name; one rank without the variable, where they have not.
        (rows("aaaa", 2), [[0, 1], [2, 3]]),
        (rows("aabb", [2, 2, 2, 0]), [[0, 1], [2, 3]]),
        (rows("aabb", [2, 0, 2, 2]), [[0, 1], [2, 3]]),
        (rows("abcd", given=2), [[0, 1], [2, 3]]),
        # One level: all on one host, or none with another, or as the user says.
        (rows("aaaa"), [[0], [1], [2], [3]]),
        (rows("abcd"), [[0], [1], [2], [3]]),
        (rows("aabb", 2, given=1), [[0], [1], [2], [3]]),
        # Neighbours on different hosts; and uneven hosts, which have no hook.
        (rows("abab"), [[0, 2], [1, 3]]),
        (rows("abbcca"), [[0, 5], [1, 2], [3, 4]]),
        (rows("aaab"), []),
    ],
)
def test_two_levels_where_hosts_are_even(table, ranks):
    assert hosts_of(table).ranks == ranks


def _error(model: nn.Module, plain: nn.Module, step: int = 0) -> float:
    for each in (model, plain):
        each.zero_grad()
        each(inputs(step, WIDTHS[0])).square().sum().backward()
    mine, true = gradients(model), gradients(plain)
    return ((mine - true).norm() / true.norm()).item()


def _wrapped(group: Any = None) -> tuple[nn.Module, nn.Module]:
    model, plain = (DistributedDataParallel(mlp(*WIDTHS), process_group=group) for _ in range(2))
    return model, plain


def _as_if_on(hosts: str, local: dict[int, str], some: bool = False) -> tuple[float, str]:
    """The error of DDP whose ranks believe to be on these hosts, and what its stats say.

    Of some, rank 0 is not one.
    """
    rank, group = dist.get_rank(), None
    if some:
        group = subgroup([1, 2, 3])
        if rank == 0:
            return 0.0, ""
    variable = {"LOCAL_WORLD_SIZE": local[rank]} if rank in local else {}
    with (
        patch.object(socket, "gethostname", lambda: hosts[rank]),
        patch.dict(os.environ, variable),
    ):
        model, plain = _wrapped(group)
        state = comm_hooks.register(model, "fp16")
    return _error(model, plain), state.stats().levels


@pytest.mark.parametrize(
    ("hosts", "local", "levels"),
    [
        ("aabb", {}, "two levels: 2 hosts of 2 ranks"),
        ("aaaa", dict.fromkeys(range(4), "2"), "two levels: 2 hosts of 2 ranks"),
        ("aabb", {0: "2", 1: "2", 3: "2"}, "two levels: 2 hosts of 2 ranks"),
        ("abba", {}, "two levels: 2 hosts of 2 ranks"),
        ("aaaa", {}, "one level of 4 ranks"),
    ],
)
def test_every_rank_decides_from_one_table(ranks4, hosts, local, levels):
    for error, said in ranks4.run(_as_if_on, hosts, local):
        assert error <= BOUNDS["fp16"]
        assert said == levels


def _shards_as_if_on(hosts: str) -> tuple[float, str]:
    """The error of FSDP2 whose ranks believe to be on these hosts, and what its stats say."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = fully_shard(nn.Linear(700, 60, bias=False), mesh=mesh((size,), ("shard",)))
    with patch.object(socket, "gethostname", lambda: hosts[rank]):
        state = comm_hooks.register(model, "fp16")
    everyone = torch.randn(size, 4, 700, generator=torch.Generator().manual_seed(1))
    (model(everyone[rank]) * torch.arange(60.0)).sum().backward()
    exact = everyone.double().sum(1).mean(0).outer(torch.arange(60.0).double())
    found = model.weight.grad.full_tensor().double().T
    return ((found - exact).norm() / exact.norm()).item(), state.stats().levels


@pytest.mark.parametrize("hosts", ["aabb", "abab", "abba"])
def test_shards_go_to_their_ranks_in_whichever_order_these_are_on_hosts(ranks4, hosts):
    for error, levels in ranks4.run(_shards_as_if_on, hosts):
        assert error <= BOUNDS["fp16"]
        assert levels == "two levels: 2 hosts of 2 ranks"


def _uneven(dropped_in: bool) -> tuple[float, HookStats]:
    """DDP whose first three ranks are on one host, and whose last is on another."""
    model, plain = _wrapped()
    with patch.object(socket, "gethostname", lambda: "aaab"[dist.get_rank()]):
        if dropped_in:
            state = comm_hooks.CommHookState("fp16")
            model.register_comm_hook(state, comm_hooks.fp16_compress_hook)
        else:
            state = comm_hooks.register(model, "fp16")
        return _error(model, plain), state.stats()


@pytest.mark.parametrize("dropped_in", [False, True])
def test_uneven_hosts_say_that_the_hook_is_left_off(ranks4, dropped_in):
    for error, stats in ranks4.run(_uneven, dropped_in):
        assert error < 1e-6
        assert stats.total_bytes == 0
        said = "hosts have" if dropped_in else "chose fp32 (no hook): hosts have from 1 to 3"
        assert said in str(stats)


def test_a_group_of_some_ranks_makes_its_connections_alone(ranks4):
    for error, levels in ranks4.run(_as_if_on, "abcd", {}, True)[1:]:
        assert error <= BOUNDS["fp16"]
        assert levels == "one level of 3 ranks"


def _stages() -> float:
    """Two pipeline stages, of which one registers when the other has taken steps."""
    groups = [subgroup([0, 1]), subgroup([2, 3])]
    stage = dist.get_rank() // 2
    if stage == 1:
        dist.barrier()
        groups.append(dist.new_group([2, 3], use_local_synchronization=True))
    model, plain = _wrapped(groups[stage])
    comm_hooks.register(model, "fp16", ranks_per_host=1)
    errors = [_error(model, plain, step) for step in range(2)]
    if stage == 0:
        dist.barrier()
    return max(errors)


def test_pipeline_stages_register_at_different_times(ranks4):
    assert max(ranks4.run(_stages)) <= BOUNDS["fp16"]


def _refused(given: list[int]) -> str:
    model = DistributedDataParallel(nn.Linear(3, 3))
    with pytest.raises((ValueError, LockstepError)) as error:
        comm_hooks.register(model, "fp16", ranks_per_host=given[dist.get_rank()])
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ([0] * 4, "ranks_per_host is 0"),
        ([-2] * 4, "ranks_per_host is -2"),
        ([3] * 4, "ranks_per_host is 3"),
        ([8] * 4, "ranks_per_host is 8"),
        ([1, 2, 1, 2], r"rank 0, 2: .*ranks_per_host=2"),
    ],
)
def test_hosts_that_cannot_be_are_refused_on_every_rank(ranks4, given, match):
    for message in ranks4.run(_refused, given):
        assert re.search(match, message)


def _means(wire: str, scale: float, ranks_per_host: int) -> tuple[float, bool]:
    """The error of the mean of independent gradients, against float64."""
    numel, size = 200_000, dist.get_world_size()
    everyone = [
        torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)
    ]
    model = DistributedDataParallel(nn.Linear(numel, 1, bias=False))
    comm_hooks.register(model, wire, ranks_per_host=ranks_per_host)
    (model(everyone[dist.get_rank()].view(1, -1)) * scale).sum().backward()
    exact = torch.stack(everyone).double().mean(0) * scale
    mean = model.module.weight.grad[0]
    return ((mean.double() - exact).norm() / exact.norm()).item(), agreed(mean)


@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**24])
@pytest.mark.parametrize(("wire", "bound"), [("fp16", 2.93e-4), ("bf16", 2.5e-3), ("int8", 2e-2)])
def test_at_most_two_roundings(ranks4, wire, bound, scale, ranks_per_host):
    for error, same in ranks4.run(_means, wire, scale, ranks_per_host):
        assert error <= bound
        assert same
