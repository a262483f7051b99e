"""Which ranks are on which hosts: one table, from which all ranks come to the same."""

from __future__ import annotations

import os
import socket
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from distamp.comm_hooks.hosts import Row, hosts_of
from distamp.errors import LockstepError
from tests.comm_hooks.training import BOUNDS, agreed, gradients, inputs, mlp
from tests.ranks import subgroup

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
        # Uneven hosts, and neighbours on different hosts.
        (rows("aaab"), [[0], [1], [2], [3]]),
        (rows("abab"), [[0], [1], [2], [3]]),
    ],
)
def test_two_levels_where_hosts_are_even(table, ranks):
    assert hosts_of(table).ranks == ranks


def _as_if_on(hosts: str, local: dict[int, str], group: Any = None, wire: str = "fp16") -> Any:
    """The error of DDP whose ranks believe to be on these hosts, and what its stats say."""
    rank = dist.get_rank()
    variable = {"LOCAL_WORLD_SIZE": local[rank]} if rank in local else {}
    with (
        patch.object(socket, "gethostname", lambda: hosts[rank]),
        patch.dict(os.environ, variable),
    ):
        model = DistributedDataParallel(mlp(*WIDTHS), process_group=group)
        plain = DistributedDataParallel(mlp(*WIDTHS), process_group=group)
        state = comm_hooks.register(model, wire)
    for each in (model, plain):
        each(inputs(0, WIDTHS[0])).square().sum().backward()
    mine, true = gradients(model), gradients(plain)
    return ((mine - true).norm() / true.norm()).item(), mine, state.stats().levels


def _on_hosts(hosts: str, local: dict[int, str]) -> Any:
    error, mine, levels = _as_if_on(hosts, local)
    return error, agreed(mine), levels


@pytest.mark.parametrize(
    ("hosts", "local", "levels"),
    [
        ("aabb", {}, "two levels: 2 hosts of 2 ranks"),
        ("aaaa", dict.fromkeys(range(4), "2"), "two levels: 2 hosts of 2 ranks"),
        ("aabb", {0: "2", 1: "2", 3: "2"}, "two levels: 2 hosts of 2 ranks"),
        ("aaab", {}, "one level: hosts have from 1 to 3 ranks"),
        ("aaaa", {}, "one level of 4 ranks"),
    ],
)
def test_every_rank_decides_from_one_table(ranks4, hosts, local, levels):
    for error, same, said in ranks4.run(_on_hosts, hosts, local):
        assert error <= BOUNDS["fp16"]
        assert same
        assert said == levels


def _subgroup_of(hosts: str) -> Any:
    """DDP over ranks 1, 2 and 3 of four, of which rank 0 knows nothing."""
    group = subgroup([1, 2, 3])
    if dist.get_rank() == 0:
        return None
    error, _, levels = _as_if_on(hosts, {}, group)
    return error, levels


def test_a_group_of_some_ranks_makes_its_connections_alone(ranks4):
    none, *found = ranks4.run(_subgroup_of, "aabc")
    assert none is None
    for error, levels in found:
        assert error <= BOUNDS["fp16"]
        assert levels == "one level of 3 ranks"


def _stages() -> float:
    """Two pipeline stages, of which one registers when the other has taken steps."""
    groups = [subgroup([0, 1]), subgroup([2, 3])]
    stage = dist.get_rank() // 2
    if stage == 1:
        dist.barrier()
        groups.append(dist.new_group([2, 3], use_local_synchronization=True))
    model = DistributedDataParallel(mlp(*WIDTHS), process_group=groups[stage])
    plain = DistributedDataParallel(mlp(*WIDTHS), process_group=groups[stage])
    comm_hooks.register(model, "fp16", ranks_per_host=1)
    for step in range(2):
        for each in (model, plain):
            each.zero_grad()
            each(inputs(step, WIDTHS[0])).square().sum().backward()
    if stage == 0:
        dist.barrier()
    mine, true = gradients(model), gradients(plain)
    return ((mine - true).norm() / true.norm()).item()


def test_pipeline_stages_register_at_different_times(ranks4):
    assert max(ranks4.run(_stages)) <= BOUNDS["fp16"]


def _refused(given: int) -> str:
    model = DistributedDataParallel(nn.Linear(3, 3))
    with pytest.raises((ValueError, LockstepError)) as error:
        comm_hooks.register(model, "fp16", ranks_per_host=given)
    return str(error.value)


@pytest.mark.parametrize("given", [0, -2, 3, 8])
def test_hosts_that_cannot_be_are_refused(ranks4, given):
    for message in ranks4.run(_refused, given):
        assert f"ranks_per_host is {given}" in message
        assert "4 ranks" in message


def _other_hosts() -> str:
    model = DistributedDataParallel(nn.Linear(3, 3))
    with pytest.raises(LockstepError) as error:
        comm_hooks.register(model, "fp16", ranks_per_host=1 + dist.get_rank() % 2)
    return str(error.value)


def test_ranks_that_say_otherwise_are_named(ranks4):
    for message in ranks4.run(_other_hosts):
        assert "rank 0, 2: " in message
        assert "ranks_per_host=2" in message


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
