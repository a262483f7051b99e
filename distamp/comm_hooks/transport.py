"""Messages between ranks, in two slots that run during the backward pass.

While the bucket of one slot is on the network, the bucket of the second slot is encoded. On a CPU
each slot has a thread, and messages go through a gloo backend. On a GPU each slot is a stream of
high priority, on which the calling thread enqueues all work, and each slot has a separate
communicator for each level, because one communicator is one queue. Connections are made from the
store by exactly their ranks, so no other rank has to take part.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import torch_private
from distamp.comm_hooks.stats import HookStats
from distamp.comm_hooks.topology import Topology

__all__ = ["CommSlot", "GlooTransport", "Job", "NcclTransport", "Transport"]

NUM_SLOTS = 2


class CommSlot:
    """One of the pipeline's slots: it runs one job at a time, in separate memory.

    Attributes:
        index: The number of the slot.
        network_order: Returns a context in which a job sends between hosts. On a CPU jobs enter it
            in the order of their submission.
        views: Views of this slot's memory, by the caller's keys, for later jobs. They are dropped
            when memory grows.
    """

    # Private attributes that survive a job:
    # _memory: by name, memory that later jobs of this slot use again.

    def __init__(self, index: int, device: torch.device) -> None:
        self.index = index
        self.network_order: Callable[[], AbstractContextManager[None]] = nullcontext
        self.views: dict[object, Any] = {}
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return a contiguous tensor in the memory of this name."""
        nbytes = math.prod(shape) * dtype.itemsize
        if name not in self._memory or self._memory[name].numel() < nbytes:
            self.views.clear()
            self._memory.pop(name, None)
            self._memory[name] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._memory[name][:nbytes].view(dtype).view(shape)


# The rows of one tensor, or a list of tensors.
TensorForEachRank: TypeAlias = Tensor | Sequence[Tensor]
# A job gets the slot that runs it, and returns the tensor that it wrote.
Job: TypeAlias = Callable[[CommSlot], Tensor]
_CLOSED = "this communication hook was closed: wrap the model and register a hook again"


class Transport(ABC):
    """Slots, their connections, and the first failure, after which nothing is sent.

    `close` releases threads and connections. So does the end of this object and of the interpreter.
    A level is "inner" (the ranks of this host), "outer" (the ranks of other hosts that have the
    local rank of this rank) or "all".

    Args:
        topology: The ranks and their hosts.
        group: The ranks.
        device: The device of the tensors.
        stats: The counts to which the time on the network is added.
    """

    # Private attributes that survive a call:
    # _next_slots: yields the slot of each job.
    # _failure: the reason for which nothing is sent any more, or "".
    # _executors, _backends: threads and connections, which `_finalizer` releases.
    # _streams: on a GPU, the stream of each slot.

    def __init__(
        self, topology: Topology, group: ProcessGroup, device: torch.device, stats: HookStats
    ) -> None:
        self._rank = group.rank()
        self._ranks_by_level = {
            "inner": topology.host_ranks,
            "outer": topology.peer_ranks,
            "all": list(range(group.size())),
        }
        self._device = device
        self._stats = stats
        self._slots = [CommSlot(index, device) for index in range(NUM_SLOTS)]
        self._next_slots = itertools.cycle(self._slots)
        self._failure = ""
        self._streams: Sequence[torch.Stream] = ()
        self._executors: list[ThreadPoolExecutor] = []
        self._backends: dict[tuple[str, int], Any] = {}
        self._connect(next(topology.store_prefixes), group)
        self._finalizer = weakref.finalize(self, _release, self._executors, self._backends)

    @abstractmethod
    def _connect(self, prefix: str, group: ProcessGroup) -> None:
        """Make the connections of all slots."""

    @abstractmethod
    def submit(self, job: Job, tensors: Sequence[Tensor] = ()) -> Future[Tensor]:
        """Run a job in the next slot, and return the future of its result.

        Args:
            job: The work.
            tensors: The caller's tensors that the job reads or writes.

        Raises:
            RuntimeError: A job has failed before, or the hook is closed.
        """

    @abstractmethod
    def all_to_all(
        self, level: str, slot: CommSlot, received: TensorForEachRank, sent: TensorForEachRank
    ) -> None:
        """Send a contiguous tensor to each other rank of a level, and receive one from each.

        Args:
            level: "inner" or "outer".
            slot: The slot of the job.
            received: The rows of a contiguous tensor, one for each rank, or a list of tensors. The
                content of this rank's row is undefined afterwards. In a list, its tensor is empty.
            sent: Rows or a list likewise.
        """

    @abstractmethod
    def all_gather(self, level: str, slot: CommSlot, rows: Tensor, row: Tensor) -> None:
        """Send a row to all ranks of a level, and receive a row from each.

        Args:
            level: The level.
            slot: The slot of the job.
            rows: uint8 (ranks, bytes), contiguous.
            row: uint8 (bytes,), in other memory or this rank's row of ``rows``.
        """

    @abstractmethod
    def all_reduce(self, slot: CommSlot, values: Tensor) -> None:
        """Add up a few values over all ranks, in place."""

    def mark_failed(self, error: Exception) -> None:
        """Send nothing any more, because of an error."""
        self._failure = self._failure or (
            f"an exchange of gradients failed before ({error}): no gradients are exchanged any "
            "more; end this job, and start it again from its last checkpoint"
        )

    def close(self) -> None:
        """Wait for submitted jobs, and release threads and connections. Ranks may close alone."""
        for executor in self._executors:
            executor.shutdown()
        for stream in self._streams:
            stream.synchronize()
        self._failure = self._failure or _CLOSED
        self._finalizer()


class GlooTransport(Transport):
    """Messages of CPU tensors, which a thread for each slot sends while the caller goes on.

    The interpreter joins the threads before it ends, because a thread that is still in torch then
    would abort the process.

    A rank sends to one rank after another, and the slots send one after another: streams that share
    a link divide it unevenly, and all ranks would wait for the slowest.
    """

    def _connect(self, prefix: str, group: ProcessGroup) -> None:
        self._executors.extend(ThreadPoolExecutor(1, "distamp-comm-hook") for _ in self._slots)
        ranks = self._ranks_by_level["all"]
        gloo = torch_private.new_communicator(prefix, group, ranks, self._device)
        # A rank may close at once, for example if torch refuses the hook. All ranks must have
        # connected before.
        gloo.allreduce([torch.zeros(1, device=self._device)]).wait()
        self._backends["all", 0] = gloo
        # The event at which the last job has left the network.
        self._last_job_sent = threading.Event()
        self._last_job_sent.set()

    def submit(self, job: Job, tensors: Sequence[Tensor] = ()) -> Future[Tensor]:  # noqa: D102
        if self._failure:
            raise RuntimeError(self._failure)
        slot = next(self._next_slots)
        result = Future[Any]()
        job_sent = threading.Event()
        order = partial(_in_submission_order, self._last_job_sent, job_sent)
        self._last_job_sent = job_sent
        self._executors[slot.index].submit(self._run, job, slot, order, result)
        # A future with a Python error reaches DDP, which waits in C++, as a value. An error that a
        # callback raises arrives as an error, and this callback starts no collective.
        return result.then(_value_or_raise)

    def _run(self, job: Job, slot: CommSlot, order: Any, result: Future[Any]) -> None:
        slot.network_order = order
        outcome: Tensor | Exception
        try:
            with torch.no_grad():
                outcome = job(slot)
        except Exception as error:
            self.mark_failed(error)
            # The other ranks raise when the connections end, and the local variables of the frames
            # would keep the connections alive.
            self._backends.clear()
            traceback.clear_frames(error.__traceback__)
            outcome = error
        with order():
            result.set_result(outcome)

    def all_to_all(  # noqa: D102
        self, level: str, slot: CommSlot, received: TensorForEachRank, sent: TensorForEachRank
    ) -> None:
        start = time.perf_counter()
        # A job in the other slot may have failed since this job was submitted.
        if self._failure:
            raise RuntimeError(self._failure)
        gloo = self._backends["all", 0]
        ranks = self._ranks_by_level[level]
        size = len(ranks)
        index = ranks.index(self._rank)
        tag = 2 * slot.index + (level == "inner")
        for shift in range(1, size):
            source = (index - shift) % size
            target = (index + shift) % size
            receiving = gloo.recv([received[source]], ranks[source], tag)
            sending = gloo.send([sent[target]], ranks[target], tag)
            receiving.wait()
            sending.wait()
        self._stats.seconds_waiting += time.perf_counter() - start

    def all_gather(self, level: str, slot: CommSlot, rows: Tensor, row: Tensor) -> None:  # noqa: D102
        self.all_to_all(level, slot, rows, [row] * len(rows))
        rows[self._ranks_by_level[level].index(self._rank)] = row

    def all_reduce(self, slot: CommSlot, values: Tensor) -> None:  # noqa: D102
        if self._failure:
            raise RuntimeError(self._failure)
        self._backends["all", 0].allreduce([values]).wait()


class NcclTransport(Transport):
    """Messages of tensors on a GPU or another accelerator, in a stream for each slot."""

    def _connect(self, prefix: str, group: ProcessGroup) -> None:
        self._streams = [torch.Stream(self._device, priority=-1) for _ in self._slots]
        for level, ranks in self._ranks_by_level.items():
            if len(ranks) == 1:
                continue
            for slot in self._slots:
                name = f"{prefix}/{level}/{min(ranks)}/{slot.index}"
                communicator = torch_private.new_communicator(name, group, ranks, self._device)
                self._backends[level, slot.index] = communicator

    def submit(self, job: Job, tensors: Sequence[Tensor] = ()) -> Future[Tensor]:  # noqa: D102
        if self._failure:
            raise RuntimeError(self._failure)
        slot = next(self._next_slots)
        stream = self._streams[slot.index]
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        result: Future[Tensor] = Future(devices=[self._device])
        with stream, torch.no_grad():
            for tensor in tensors:
                tensor.record_stream(stream)
            try:
                result.set_result(job(slot))
            except Exception as error:
                self.mark_failed(error)
                raise
        return result

    def all_to_all(  # noqa: D102
        self, level: str, slot: CommSlot, received: TensorForEachRank, sent: TensorForEachRank
    ) -> None:
        backend = self._backends[level, slot.index]
        if isinstance(received, Tensor):
            # The cost of this call on the host does not grow with the number of ranks.
            backend.alltoall_base(received, sent, [], []).wait()
        else:
            backend.alltoall([*received], [*sent]).wait()

    def all_gather(self, level: str, slot: CommSlot, rows: Tensor, row: Tensor) -> None:  # noqa: D102
        torch_private.all_gather(self._backends[level, slot.index], rows, row).wait()

    def all_reduce(self, slot: CommSlot, values: Tensor) -> None:  # noqa: D102
        self._backends["all", slot.index].allreduce([values]).wait()


@contextmanager
def _in_submission_order(
    previous_sent: threading.Event, job_sent: threading.Event
) -> Iterator[None]:
    """Wait until the previous job has left the network, and let the next job in at the end."""
    previous_sent.wait()
    try:
        yield
    finally:
        job_sent.set()


def _value_or_raise(result: Future[Any]) -> Tensor:
    outcome: Tensor | Exception = result.value()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _release(executors: Sequence[ThreadPoolExecutor], backends: MutableMapping[Any, Any]) -> None:
    """Let threads end after their jobs, and shut connections down."""
    for executor in executors:
        executor.shutdown(wait=False)
    for backend in backends.values():
        torch_private.shut_down(backend)
    backends.clear()
