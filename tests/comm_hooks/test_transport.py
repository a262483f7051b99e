"""What carries messages: its threads and connections, until they are given back."""

import gc
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any, ClassVar
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

ENDS = """
import time, torch
import torch.distributed as dist
from contextlib import suppress
from datetime import timedelta
from distamp.comm_hooks.topology import Topology
from distamp.comm_hooks.transport import GlooTransport
from distamp.comm_hooks.stats import HookStats

class Slow:
    # What the interpreter ends with.
    def __del__(self, sleep=time.sleep):
        sleep(1)

def waits(slot):
    # In torch, as an exchange is.
    with suppress(dist.DistStoreError):
        dist.HashStore().wait(["never"], timedelta(seconds=0.5))
    return torch.ones(1)

torch.slow = Slow()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
topology = Topology(0, [[0]], "one rank", iter(["name"]))
place = torch.device("cpu")
transport = GlooTransport(topology, dist.group.WORLD, place, HookStats())
transport.submit(waits)
"""


def test_a_process_ends_while_a_lane_is_still_in_torch():
    command = [sys.executable, "-c", ENDS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")


def _counts() -> tuple[int, int, int]:
    """Threads, sockets and process groups of this process."""
    links = (os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink())
    threads = sum(each.name.startswith("distamp") for each in threading.enumerate())
    groups = len(dist.distributed_c10d._world.pg_map)
    return threads, sum(link.startswith("socket") for link in links), groups


def _step(how: str) -> None:
    model = DistributedDataParallel(mlp(31, 64, 5))
    state = comm_hooks.register_comm_hook(model, "int8")
    model(inputs(0, 31)).sum().backward()
    if how == "closed":
        state.close()
        with pytest.raises(RuntimeError, match="was closed: wrap the model"):
            model(inputs(0, 31)).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("how", ["closed", "collected"])
def test_threads_and_connections_are_given_back(how):
    gc.collect()
    before, found = _counts(), []
    for times in (1, 8):
        for _ in range(times):
            _step(how)
            gc.collect()
        dist.barrier()
        # The last to let go may be a thread, which ends a moment later.
        for _ in range(50):
            if (now := _counts())[0] <= before[0]:
                break
            time.sleep(0.1)
        found.append(now)
    assert found[0] == found[1]
    assert found[0][0] <= before[0]  # a test before may still have had one


@on_ranks(2)
def test_the_first_use_after_the_group_was_destroyed_gives_them_back():
    gc.collect()  # hooks of tests before
    threads = _counts()[0]
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(mlp(31, 64, 5), process_group=group)
    with comm_hooks.register_comm_hook(model, "fp16") as state:
        model(inputs(0, 31)).sum().backward()
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="group of this communication hook was destroyed"):
            state.all_reduce_mean(torch.ones(3))
    assert _counts()[0] == threads


@on_ranks(2)
def test_nobody_has_connected_before_all_have():
    """Or one that lets go at once, as where torch refuses a hook, would fail the others."""
    store, new = dist.distributed_c10d._get_default_store(), torch_private.new_communicator

    def late(*given: Any) -> Any:
        made = new(*given)
        if dist.get_rank() == 0:
            time.sleep(0.5)
            store.set("connected last", "")
        return made

    with mock.patch.object(torch_private, "new_communicator", late):
        comm_hooks.register_comm_hook(DistributedDataParallel(mlp(8, 8)), "fp16")
    assert store.check(["connected last"])


class _Backend:
    """What NCCL's would be: it keeps how it was made, and can be given back."""

    made: ClassVar[list[tuple[Any, ...]]] = []

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.priority = is_high_priority_stream

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.made.append((rank, size, options.priority))
        self.ends = 0

    def shutdown(self) -> None:
        self.ends += 1


@on_ranks(3)
def test_each_lane_and_level_has_its_own_communicator_of_high_priority_by_a_mock():
    """Of a stage of two of three ranks, while the third makes none."""
    group, rank = subgroup([0, 2]), dist.get_rank()
    if rank == 1:
        return
    mocked = {"ProcessGroupNCCL": _Backend}
    with (
        mock.patch.multiple(dist, create=True, **mocked),
        mock.patch.object(dist, "get_backend_config", return_value="meta:nccl"),
        mock.patch.object(torch_private, "_timeout_of", return_value=timedelta(seconds=9)),
        mock.patch.object(torch, "Stream", mock.MagicMock()) as stream,
    ):
        topology = Topology(group.rank(), [[0], [1]], "two hosts", iter(["name"]))
        place = torch.device("meta")
        made = transport.NcclTransport(topology, group, place, HookStats())
        backends = list(made._backends.values())
        made.close()
    assert {call.kwargs["priority"] for call in stream.call_args_list} == {-1}
    # The stage's ranks alone, no split of the default group; none for a level of one rank.
    # Two slots, each with a communicator between hosts and one between all ranks.
    assert _Backend.made == [(rank // 2, 2, True)] * 4
    assert [each.ends for each in backends] == [1] * 4
