"""What carries messages: two lanes beside the backward pass, with connections of their own.

While one lane's bucket is on the wire, the other's is encoded. On a host a lane has one thread, and
messages go by a gloo backend. On a device a lane is a stream of high priority on which the calling
thread puts everything, and each lane has a communicator of its own for each level: one communicator
is one queue. Connections are made from the store, for exactly their ranks; nothing else is asked.
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.stats import HookStats

__all__ = ["DeviceTransport", "HostTransport", "Job", "Lane", "Transport"]

LANES = 2


class Lane:
    """What one exchange after another uses.

    ``turn()`` is entered while a job uses the network between hosts: on a host in the order of
    submission. A stream waits for its own messages alone. ``views`` are those of ``memory``, by who
    made them.
    """

    # What survives a job: buffers by name, and their views; on a host the turn of the last job.
    def __init__(self, index: int, device: torch.device) -> None:
        self.index, self._device = index, device
        self._memory: dict[str, Tensor] = {}
        self.views: dict[Hashable, tuple[Any, ...]] = {}
        self.turn: Callable[[], AbstractContextManager[None]] = nullcontext

    def memory(self, name: str, nbytes: int) -> Tensor:
        """Return uint8 of that length, of which the next exchange of this lane has the same."""
        if name not in self._memory or self._memory[name].numel() < nbytes:
            self.views.clear()
            self._memory.pop(name, None)
            self._memory[name] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._memory[name][:nbytes]


Job: TypeAlias = Callable[[Lane], Tensor]
# The ranks of a level, by their numbers in the group: "inner" are those of this host, "outer" those
# of other hosts that have the same part as this one, "all" are all. This rank is one of them.
Levels: TypeAlias = Mapping[str, Sequence[int]]
_CLOSED = "this communication hook was closed: wrap the model and register a hook again"


class Transport:
    """Lanes, what they send by, and the first failure, after which nothing is exchanged.

    Owned by whoever makes it, and given back by `close`, when it is collected, or as the
    interpreter ends. Unlike groups of ``torch.distributed.new_group``, its connections are no
    other's, and making them concerns their own ranks alone.

    Args:
        name: Of its connections, the same on all ranks and no other's.
        group: The ranks.
        levels: Those of each level.
        device: Where messages lie.
        stats: Where waiting is counted.
    """

    # What survives a call: the lanes, and whose turn it is; on a device their streams; why nothing
    # is exchanged. Threads and backends, and what gives them back.
    def __init__(
        self,
        name: str,
        group: ProcessGroup,
        levels: Levels,
        device: torch.device,
        stats: HookStats,
    ) -> None:
        self._rank, self._levels, self._device, self._stats = group.rank(), levels, device, stats
        self.lanes = [Lane(index, device) for index in range(LANES)]
        self._count, self._failure = 0, ""
        self._streams: Sequence[torch.Stream] = ()
        self._workers: list[ThreadPoolExecutor] = []
        self._backends: dict[tuple[str, int], Any] = {}
        self._connect(name, group)
        self._finalizer = weakref.finalize(self, _end, self._workers, self._backends)

    def _connect(self, name: str, group: ProcessGroup) -> None:
        """Make what lanes send by."""
        raise NotImplementedError

    def next(self) -> Lane:
        """Return the lane of the next job.

        Raises:
            RuntimeError: A job failed before, on any lane, or it is closed.
        """
        self.check()
        self._count += 1
        return self.lanes[self._count % LANES]

    def check(self) -> None:
        """Raise where a job failed before, on any lane, or it is closed."""
        if self._failure:
            raise RuntimeError(self._failure)

    def failed(self, error: Exception) -> None:
        """Exchange nothing any more."""
        self._failure = self._failure or (
            f"an exchange of gradients failed before ({error}): no gradients are exchanged any "
            "more; end this job, and start it again from its last checkpoint"
        )

    def close(self) -> None:
        """Give threads and connections back, when what was submitted is done. Not collective."""
        for worker in self._workers:
            worker.shutdown()
        for stream in self._streams:
            stream.synchronize()
        self._failure = self._failure or _CLOSED
        self._finalizer()


class HostTransport(Transport):
    """Runs jobs in turn on two lanes, while the caller goes on; sends what they send.

    A thread a lane takes its jobs in turn. The interpreter joins it before it ends: one that it
    finds in torch aborts the process.

    Exchanges with one rank after another, and one bucket after another: streams that share a link
    divide it unevenly, and all wait for the slowest.
    """

    def _connect(self, name: str, group: ProcessGroup) -> None:
        self._workers.extend(ThreadPoolExecutor(1, "distamp-comm-hook") for _ in self.lanes)
        ranks = self._levels["all"]
        made = torch_compat.new_communicator(name, group, ranks, self._device)
        # Who is connected may close at once, as where torch refuses a hook: not before all are.
        made.allreduce([torch.zeros(1, device=self._device)]).wait()
        self._backends["all", 0] = made
        # What ends the turn of the last job.
        self._over = threading.Event()
        self._over.set()

    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """Return the future of what ``job`` returns; whoever waits for it raises what it raised.

        Args:
            job: What to do with a lane.
            uses: Tensors of the caller that the job reads or writes.

        Raises:
            RuntimeError: A job failed before, or it is closed.
        """
        lane, done, over = self.next(), Future[Any](), threading.Event()
        turn, self._over = partial(_turn, self._over, over), over
        self._workers[lane.index].submit(self._run, job, lane, turn, done)
        # An error set on a future from Python reaches C++, where DDP waits, as a value. Raised in
        # a callback, which starts no collective, it arrives as an error.
        return done.then(_value_or_raise)

    def _run(self, job: Job, lane: Lane, turn: Any, done: Future[Any]) -> None:
        lane.turn = turn
        try:
            self.check()
            with torch.no_grad():
                outcome: Tensor | Exception = job(lane)
        except Exception as error:
            self.failed(error)
            # Ranks that wait for this one hear of it as its connections end, which the locals of
            # what failed would keep.
            self._backends.clear()
            traceback.clear_frames(error.__traceback__)
            outcome = error
        with turn():
            done.set_result(outcome)

    def all_to_all(self, level: str, lane: Lane, received: Tensor, sent: Tensor) -> None:
        """Send each other rank of a level its row, and receive one from each.

        Args:
            level: That of `Levels`.
            lane: Whose messages they are.
            received: uint8 (ranks, bytes), contiguous; nothing is known of this rank's own row.
            sent: The same.
        """
        self.all_to_all_parts(level, lane, received.unbind(), sent.unbind())

    def all_to_all_parts(
        self, level: str, lane: Lane, received: Sequence[Tensor], sent: Sequence[Tensor]
    ) -> None:
        """Do the same with a tensor for each rank, of its own length, which may be none."""
        start = time.perf_counter()
        self.check()
        backend, ranks = self._backends["all", 0], self._levels[level]
        size, mine = len(ranks), ranks.index(self._rank)
        tag = 2 * lane.index + (level == "inner")
        for turn in range(1, size):
            source, target = (mine - turn) % size, (mine + turn) % size
            works = []
            if received[source].numel():
                works.append(backend.recv([received[source]], ranks[source], tag))
            if sent[target].numel():
                works.append(backend.send([sent[target]], ranks[target], tag))
            for work in works:
                work.wait()
        self._stats.seconds_waiting += time.perf_counter() - start

    def all_gather(self, level: str, lane: Lane, rows: Tensor, own: Tensor) -> None:
        """Send a row to each rank of a level, and receive each one's.

        Args:
            level: That of `Levels`.
            lane: Whose messages they are.
            rows: uint8 (ranks, bytes), contiguous.
            own: uint8 (1, bytes): this rank's row in ``rows``, or memory elsewhere.
        """
        self.all_to_all_parts(level, lane, rows.unbind(), [own] * len(rows))
        rows[self._levels[level].index(self._rank)] = own[0]

    def all_reduce(self, lane: Lane, values: Tensor) -> None:
        """Add up a few values over all ranks, in place."""
        self.check()
        self._backends["all", 0].allreduce([values]).wait()


class DeviceTransport(Transport):
    """As `HostTransport`, on a device, of which each lane has a stream."""

    def _connect(self, name: str, group: ProcessGroup) -> None:
        self._streams = [torch.Stream(self._device, priority=-1) for _ in self.lanes]
        for level, ranks in self._levels.items():
            for lane in self.lanes if len(ranks) > 1 else ():
                own = f"{name}/{level}/{min(ranks)}/{lane.index}"
                made = torch_compat.new_communicator(own, group, ranks, self._device)
                self._backends[level, lane.index] = made

    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """As `HostTransport.submit`; the caller puts what the job does on a stream."""
        lane = self.next()
        stream = self._streams[lane.index]
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        result: Future[Tensor] = Future(devices=[self._device])
        with stream, torch.no_grad():
            for each in uses:
                each.record_stream(stream)
            try:
                result.set_result(job(lane))
            except Exception as error:
                self.failed(error)
                raise
        return result

    def all_to_all(self, level: str, lane: Lane, received: Tensor, sent: Tensor) -> None:
        """As `HostTransport.all_to_all`. One buffer: its cost does not grow with the ranks."""
        self._backends[level, lane.index].alltoall_base(received, sent, [], []).wait()

    def all_to_all_parts(
        self, level: str, lane: Lane, received: Sequence[Tensor], sent: Sequence[Tensor]
    ) -> None:
        """As `HostTransport.all_to_all_parts`."""
        self._backends[level, lane.index].alltoall([*received], [*sent]).wait()

    def all_gather(self, level: str, lane: Lane, rows: Tensor, own: Tensor) -> None:
        """As `HostTransport.all_gather`."""
        torch_compat.all_gather(self._backends[level, lane.index], rows, own).wait()

    def all_reduce(self, lane: Lane, values: Tensor) -> None:
        """As `HostTransport.all_reduce`."""
        self._backends["all", lane.index].allreduce([values]).wait()


@contextmanager
def _turn(before: threading.Event, over: threading.Event) -> Iterator[None]:
    """Wait for the end of the turn before; end this one. Of one job on a host."""
    before.wait()
    try:
        yield
    finally:
        over.set()


def _value_or_raise(done: Future[Any]) -> Tensor:
    outcome: Tensor | Exception = done.value()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _end(workers: Sequence[ThreadPoolExecutor], backends: MutableMapping[Any, Any]) -> None:
    """Let threads end with what they do, and give connections back."""
    for worker in workers:
        worker.shutdown(wait=False)
    for backend in backends.values():
        torch_compat.shut_down(backend)
    backends.clear()
