"""The transport of messages: its threads and connections, and how they end."""

import contextlib
import ctypes
import gc
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from distamp.comm_hooks import HookStats, torch_private, transport
from distamp.comm_hooks.topology import Topology
from tests.comm_hooks.training import inputs, mlp
from tests.on_ranks import on_ranks
from tests.ranks import subgroup

ENDS_DURING_AN_EXCHANGE = """
import time, torch
import torch.distributed as dist
from contextlib import suppress
from datetime import timedelta
from distamp.comm_hooks.topology import Topology
from distamp.comm_hooks.transport import GlooTransport
from distamp.comm_hooks.stats import HookStats

class Slow:
    # The interpreter deletes it at its end.
    def __del__(self, sleep=time.sleep):
        sleep(1)

def waits(slot):
    # This function waits in torch, as an exchange does.
    with suppress(dist.DistStoreError):
        dist.HashStore().wait(["never"], timedelta(seconds=0.5))
    return torch.ones(1)

torch.slow = Slow()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
topology = Topology(0, [[0]], "one rank", iter(["name"]))
device = torch.device("cpu")
transport = GlooTransport(topology, dist.group.WORLD, device, HookStats())
transport.submit(waits)
"""


def run_in_fork(program: str) -> tuple[int, str]:
    """Run a program in a fork, which ends as an interpreter does.

    A new interpreter would take seconds to import torch.

    Returns:
        The exit status, and the text on stderr.
    """
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), sys.stderr.fileno())
            try:
                exec(program, {})
                ctypes.pythonapi.Py_Exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


@pytest.mark.slow
def test_a_process_ends_while_a_lane_is_still_in_torch(new_ranks):
    (result,) = new_ranks(1).run(run_in_fork, ENDS_DURING_AN_EXCHANGE, group="none")
    assert result == (0, "")


# -- threads and connections of a hook -------------------------------------------------------------


class Resources(NamedTuple):
    """Threads of distamp, sockets and process groups of this process."""

    threads: int
    sockets: int
    groups: int


def count_resources() -> Resources:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("distamp")]
    sockets = 0
    for entry in os.scandir("/proc/self/fd"):
        # Another thread may close a file between the two calls.
        with contextlib.suppress(FileNotFoundError):
            sockets += os.readlink(entry.path).startswith("socket")
    groups = len(dist.distributed_c10d._world.pg_map)
    return Resources(len(threads), sockets, groups)


def backward(model: Any) -> None:
    model(inputs(0, 31)).sum().backward()


def train_and_collect() -> None:
    model = DistributedDataParallel(mlp(31, 64, 5))
    comm_hooks.register_comm_hook(model, "int8")
    backward(model)


def train_and_close() -> None:
    model = DistributedDataParallel(mlp(31, 64, 5))
    hook = comm_hooks.register_comm_hook(model, "int8")
    backward(model)
    hook.close()
    with pytest.raises(RuntimeError, match="was closed: wrap the model"):
        backward(model)


def resources_after(run: Callable[[], None], times: int, max_threads: int) -> Resources:
    """Run a function some times, and wait until it has no more threads than ``max_threads``."""
    for _ in range(times):
        run()
        gc.collect()
    dist.barrier()
    resources = count_resources()
    # A thread may be the last to drop a hook. It ends a moment later.
    for _ in range(50):
        if resources.threads <= max_threads:
            break
        time.sleep(0.1)
        resources = count_resources()
    return resources


@on_ranks(2)
@pytest.mark.parametrize("run", [train_and_close, train_and_collect])
def test_a_hook_that_is_closed_or_collected_leaves_no_thread_and_no_connection(run):
    gc.collect()
    before = count_resources()
    after_one = resources_after(run, times=1, max_threads=before.threads)
    after_many = resources_after(run, times=3, max_threads=before.threads)
    assert after_many == after_one
    # An earlier test may still have had a thread before.
    assert after_one.threads <= before.threads


@on_ranks(2)
def test_a_hook_releases_its_threads_at_the_first_use_after_the_group_was_destroyed():
    gc.collect()  # hooks of tests before
    threads = count_resources().threads
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(mlp(31, 64, 5), process_group=group)
    with comm_hooks.register_comm_hook(model, "fp16") as hook:
        backward(model)
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="group of this communication hook was destroyed"):
            hook.all_reduce_mean(torch.ones(3))
    assert count_resources().threads == threads


@on_ranks(2)
def test_no_rank_returns_from_registration_before_all_ranks_have_connected():
    """Otherwise a rank that closes its hook at once would break the connections of the others."""
    store = dist.distributed_c10d._get_default_store()
    new_communicator = torch_private.new_communicator

    def connect_late(*args: Any) -> Any:
        communicator = new_communicator(*args)
        if dist.get_rank() == 0:
            time.sleep(0.5)
            store.set("connected last", "")
        return communicator

    with mock.patch.object(torch_private, "new_communicator", connect_late):
        comm_hooks.register_comm_hook(DistributedDataParallel(mlp(8, 8)), "fp16")
    assert store.check(["connected last"])


# -- NCCL, by a mock -------------------------------------------------------------------------------


class NcclBackend:
    """Stands for NCCL's backend: it records its arguments and how often it was shut down."""

    arguments: ClassVar[list[tuple[Any, ...]]] = []

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.priority = is_high_priority_stream

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.arguments.append((rank, size, options.priority))
        self.shutdowns = 0

    def shutdown(self) -> None:
        self.shutdowns += 1


@on_ranks(3)
def test_each_lane_and_level_has_its_own_communicator_of_high_priority_by_a_mock():
    """Two of three ranks are a stage, and the third makes no communicator."""
    group = subgroup([0, 2])
    rank = dist.get_rank()
    if rank == 1:
        return
    with (
        mock.patch.object(dist, "ProcessGroupNCCL", NcclBackend, create=True),
        mock.patch.object(dist, "get_backend_config", return_value="meta:nccl"),
        mock.patch.object(torch_private, "_timeout_of", return_value=timedelta(seconds=9)),
        mock.patch.object(torch, "Stream", mock.MagicMock()) as stream,
    ):
        topology = Topology(group.rank(), [[0], [1]], "two hosts", iter(["name"]))
        nccl = transport.NcclTransport(topology, group, torch.device("meta"), HookStats())
        backends = list(nccl._backends.values())
        nccl.close()
    priorities = {call.kwargs["priority"] for call in stream.call_args_list}
    assert priorities == {-1}
    # The stage's ranks alone, no split of the default group; none for a level of one rank.
    # Two slots, each with a communicator between hosts and one between all ranks.
    assert NcclBackend.arguments == [(rank // 2, 2, True)] * 4
    assert [backend.shutdowns for backend in backends] == [1] * 4
