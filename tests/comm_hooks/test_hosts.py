"""Which ranks are on which hosts: one table, from which all ranks come to the same."""

import os
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
from distamp.comm_hooks.topology import RankInfo, group_by_host
from distamp.errors import RankMismatchError
from tests.comm_hooks.training import BOUNDS, WIDTHS, gradients, inputs, mlp, relative
from tests.on_ranks import on_ranks
from tests.ranks import mesh, subgroup


def rows(hosts: str, local: list[int] | int = 0, given: int | None = None) -> list[RankInfo]:
    """A rank on each of these hosts, named by letters."""
    sizes = local if isinstance(local, list) else [local] * len(hosts)
    pairs = zip(hosts, sizes, strict=True)
    return [
        RankInfo(rank, host, size, given, "fp16", f"n{rank}")
        for rank, (host, size) in enumerate(pairs)
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
    assert group_by_host(table, rank=0).hosts == ranks


def _error(hosts: str, local: dict[int, str], wire: Any, stage: Any = None) -> tuple[float, Any]:
    """The error of DDP whose ranks believe to be on these hosts, and what its hook did.

    Args:
        hosts: A letter a rank.
        local: What some ranks have as ``LOCAL_WORLD_SIZE``.
        wire: A format, or the state of a drop-in.
        stage: The process group.
    """
    rank = dist.get_rank()
    variable = {"LOCAL_WORLD_SIZE": local[rank]} if rank in local else {}
    model, plain = (DistributedDataParallel(mlp(*WIDTHS), process_group=stage) for _ in range(2))
    here = patch.object(socket, "gethostname", lambda: hosts[rank])
    with here, patch.dict(os.environ, variable):
        if isinstance(wire, str):
            state = comm_hooks.register_comm_hook(model, wire)
        else:
            state = wire
            model.register_comm_hook(state, comm_hooks.fp16_compress_hook)
        for each in (model, plain):
            each(inputs(0, WIDTHS[0])).square().sum().backward()
    return relative(gradients(model), gradients(plain)), state.stats()


@on_ranks(4)
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
def test_every_rank_decides_from_one_table(hosts, local, levels):
    error, stats = _error(hosts, local, "fp16")
    assert error <= BOUNDS["fp16"]
    assert stats.levels == levels


@on_ranks(4)
@pytest.mark.parametrize("hosts", ["aabb", "abab", "abba"])
def test_shards_go_to_their_ranks_in_whichever_order_these_are_on_hosts(hosts):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = fully_shard(nn.Linear(700, 60, bias=False), mesh=mesh((size,), ("shard",)))
    with patch.object(socket, "gethostname", lambda: hosts[rank]):
        state = comm_hooks.register_comm_hook(model, "fp16")
    everyone = torch.randn(size, 4, 700, generator=torch.Generator().manual_seed(1))
    (model(everyone[rank]) * torch.arange(60.0)).sum().backward()
    exact = everyone.double().sum(1).mean(0).outer(torch.arange(60.0).double())
    assert relative(model.weight.grad.full_tensor().double().T, exact) <= BOUNDS["fp16"]
    assert state.stats().levels == "two levels: 2 hosts of 2 ranks"


@on_ranks(4)
@pytest.mark.parametrize("dropped_in", [False, True])
def test_uneven_hosts_say_that_the_hook_is_left_off(dropped_in):
    wire = comm_hooks.CommHook("fp16") if dropped_in else "fp16"
    error, stats = _error("aaab", {}, wire)
    assert error < 1e-6
    assert stats.total_bytes == 0
    said = "hosts have" if dropped_in else "the hook was left off: hosts have from 1 to 3"
    assert said in str(stats)


@on_ranks(4)
def test_pipeline_stages_register_at_different_times():
    """One of two registers when the other has taken steps."""
    groups = [subgroup([0, 1]), subgroup([2, 3])]
    stage = dist.get_rank() // 2
    if stage == 1:
        dist.barrier()
    assert _error("abcd", {}, "fp16", groups[stage])[0] <= BOUNDS["fp16"]
    if stage == 0:
        dist.barrier()


@on_ranks(4)
@pytest.mark.parametrize(
    ("given", "match"),
    [
        ([0] * 4, "ranks_per_host is 0"),
        ([-2] * 4, "ranks_per_host is -2"),
        ([3] * 4, "ranks_per_host is 3"),
        ([8] * 4, "ranks_per_host is 8"),
        ([1, 2, 1, 2], r"ranks 1, 3: .*ranks_per_host=2"),
    ],
)
def test_hosts_that_cannot_be_are_refused_on_every_rank(given, match):
    model = DistributedDataParallel(nn.Linear(3, 3))
    with pytest.raises((ValueError, RankMismatchError), match=match):
        comm_hooks.register_comm_hook(model, "fp16", ranks_per_host=given[dist.get_rank()])
