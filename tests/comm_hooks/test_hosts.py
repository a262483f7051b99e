"""The hosts of ranks: all ranks gather one table, and every rank draws the same conclusion."""

import contextlib
import os
import socket
from collections.abc import Iterator
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

TWO_HOSTS = "two levels: 2 hosts of 2 ranks"


# -- the table ------------------------------------------------------------------------------------


def hosts_of(
    names: str, local_world_sizes: list[int] | None = None, ranks_per_host: int | None = None
) -> list[list[int]]:
    """Return the ranks of each host from the table that the ranks gather.

    Args:
        names: A letter for the hostname of each rank.
        local_world_sizes: ``LOCAL_WORLD_SIZE`` of each rank, 0 if it is not set.
        ranks_per_host: The argument that every rank was given.
    """
    local_world_sizes = local_world_sizes or [0] * len(names)
    table = []
    for rank, name in enumerate(names):
        size = local_world_sizes[rank]
        table.append(RankInfo(rank, name, size, ranks_per_host, "fp16", f"n{rank}"))
    return group_by_host(table, rank=0).hosts


def test_ranks_with_one_hostname_are_on_one_host():
    assert hosts_of("aabb") == [[0, 1], [2, 3]]
    assert hosts_of("aabbcc") == [[0, 1], [2, 3], [4, 5]]


def test_ranks_of_a_host_need_not_be_neighbours():
    assert hosts_of("abab") == [[0, 2], [1, 3]]
    assert hosts_of("abbcca") == [[0, 5], [1, 2], [3, 4]]


def test_a_local_world_size_that_agrees_with_the_hostnames_changes_nothing():
    assert hosts_of("aabb", [2, 2, 2, 2]) == [[0, 1], [2, 3]]


def test_containers_with_one_hostname_are_separated_by_the_local_world_size():
    assert hosts_of("aaaa", [2, 2, 2, 2]) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("sizes", [[2, 2, 2, 0], [2, 0, 2, 2]], ids=str)
def test_a_rank_without_the_variable_is_on_the_host_of_its_name(sizes):
    assert hosts_of("aabb", sizes) == [[0, 1], [2, 3]]


def test_the_argument_counts_more_than_hostnames():
    assert hosts_of("abcd", ranks_per_host=2) == [[0, 1], [2, 3]]
    assert hosts_of("aabb", [2, 2, 2, 2], ranks_per_host=1) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("names", ["aaaa", "abcd"])
def test_one_host_and_hosts_of_one_rank_have_one_level(names):
    assert hosts_of(names) == [[0], [1], [2], [3]]


def test_hosts_with_different_numbers_of_ranks_have_no_hook():
    assert hosts_of("aaab") == []


# -- real ranks that believe to be on several hosts -----------------------------------------------


@contextlib.contextmanager
def on_host(names: str, local_world_sizes: str = "----") -> Iterator[None]:
    """Give this rank a hostname, and ``LOCAL_WORLD_SIZE`` unless its character is a dash."""
    rank = dist.get_rank()
    size = local_world_sizes[rank]
    variables = {} if size == "-" else {"LOCAL_WORLD_SIZE": size}
    with (
        patch.object(socket, "gethostname", lambda: names[rank]),
        patch.dict(os.environ, variables),
    ):
        yield


def backward(model: Any) -> None:
    model(inputs(0, WIDTHS[0])).square().sum().backward()


def error_of_ddp(model: Any, process_group: Any = None) -> float:
    """Take a backward pass of a hooked model, and return its error against DDP without a hook."""
    plain = DistributedDataParallel(mlp(*WIDTHS), process_group=process_group)
    backward(model)
    backward(plain)
    return relative(gradients(model), gradients(plain))


def levels_of_hook(names: str, local_world_sizes: str = "----") -> str:
    """Check the gradients of DDP with an fp16 hook on these hosts, and return its levels."""
    model = DistributedDataParallel(mlp(*WIDTHS))
    with on_host(names, local_world_sizes):
        hook = comm_hooks.register_comm_hook(model, "fp16")
    assert error_of_ddp(model) <= BOUNDS["fp16"]
    return hook.stats().levels


@on_ranks(4)
@pytest.mark.parametrize("names", ["aabb", "abba"])
def test_gradients_are_averaged_on_hosts_and_then_between_them(names):
    assert levels_of_hook(names) == TWO_HOSTS


@on_ranks(4)
def test_gradients_are_averaged_in_containers_of_one_name_and_then_between_them():
    assert levels_of_hook("aaaa", "2222") == TWO_HOSTS


@on_ranks(4)
def test_gradients_are_averaged_in_two_levels_if_a_rank_lacks_the_variable():
    assert levels_of_hook("aabb", "22-2") == TWO_HOSTS


@on_ranks(4)
def test_gradients_are_averaged_in_one_level_on_one_host():
    assert levels_of_hook("aaaa") == "one level of 4 ranks"


@on_ranks(4)
@pytest.mark.parametrize("names", ["aabb", "abab", "abba"])
def test_shards_go_to_their_ranks_in_any_order_of_hosts(names):
    rank = dist.get_rank()
    model = fully_shard(nn.Linear(700, 60, bias=False), mesh=mesh((4,), ("shard",)))
    with on_host(names):
        hook = comm_hooks.register_comm_hook(model, "fp16")
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(4, 4, 700, generator=generator)
    weights = torch.arange(60.0)
    outputs = model(batches[rank])
    (outputs * weights).sum().backward()
    mean = batches.double().sum(1).mean(0)
    exact = weights.double().outer(mean)
    grad = model.weight.grad.full_tensor().double()
    assert relative(grad, exact) <= BOUNDS["fp16"]
    assert hook.stats().levels == TWO_HOSTS


@on_ranks(4)
def test_uneven_hosts_train_without_compression_and_a_reason():
    model = DistributedDataParallel(mlp(*WIDTHS))
    with on_host("aaab"):
        hook = comm_hooks.register_comm_hook(model, "fp16")
    assert error_of_ddp(model) < 1e-6
    assert hook.stats().total_bytes == 0
    assert "the hook was left off: hosts have from 1 to 3" in str(hook.stats())


@on_ranks(4)
def test_a_hook_of_torchs_spelling_on_uneven_hosts_sends_nothing_compressed():
    model = DistributedDataParallel(mlp(*WIDTHS))
    hook = comm_hooks.CommHook("fp16")
    model.register_comm_hook(hook, comm_hooks.fp16_compress_hook)
    # This hook gathers the table in its first backward pass.
    with on_host("aaab"):
        assert error_of_ddp(model) < 1e-6
    assert hook.stats().total_bytes == 0
    assert "hosts have" in str(hook.stats())


@on_ranks(4)
def test_a_pipeline_stage_may_register_its_hook_after_another_one_has_trained():
    stages = [subgroup([0, 1]), subgroup([2, 3])]
    is_late = dist.get_rank() >= 2
    stage = stages[1] if is_late else stages[0]
    if is_late:
        dist.barrier()
    model = DistributedDataParallel(mlp(*WIDTHS), process_group=stage)
    with on_host("abcd"):
        comm_hooks.register_comm_hook(model, "fp16")
    assert error_of_ddp(model, stage) <= BOUNDS["fp16"]
    if not is_late:
        dist.barrier()


# -- ranks_per_host= ------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("ranks_per_host", [0, -2, 3, 8])
def test_a_number_of_ranks_that_no_host_can_have_is_refused(ranks_per_host):
    model = DistributedDataParallel(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=f"ranks_per_host is {ranks_per_host}"):
        comm_hooks.register_comm_hook(model, "fp16", ranks_per_host=ranks_per_host)


@on_ranks(4)
def test_ranks_that_pass_different_numbers_are_refused_on_every_rank():
    model = DistributedDataParallel(nn.Linear(3, 3))
    ranks_per_host = 2 if dist.get_rank() % 2 else 1
    with pytest.raises(RankMismatchError, match=r"ranks 1, 3: .*ranks_per_host=2"):
        comm_hooks.register_comm_hook(model, "fp16", ranks_per_host=ranks_per_host)
