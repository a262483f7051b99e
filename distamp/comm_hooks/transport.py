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
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.stats import HookStats

__all__ = ["DeviceTransport", "HostTransport", "Job", "Lane"]

LANES = 2


class Lane:
    """What one exchange after another uses.

    ``turn`` is entered while a job uses the network between hosts: on a host in the order of
    submission. A stream waits for its own messages alone. ``views`` are those of ``memory``, by who
    made them.
    """

    # What survives a job: buffers by name, and their views; on a host the turn of the last job.
    def __init__(self, index: int, device: torch.device) -> None:
        self.index, self._device = index, device
        self._memory: dict[str, Tensor] = {}
        self.views: dict[Hashable, Any] = {}
        self.turn: AbstractContextManager[None] = nullcontext()

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


class _Lanes:
    """The lanes of a transport, and the first failure, after which nothing is exchanged."""

    # What survives a call: the lanes, and whose turn it is; why nothing is exchanged.
    def __init__(self, device: torch.device) -> None:
        self.lanes = [Lane(index, device) for index in range(LANES)]
        self._count = 0
        self._failure: str | None = None

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
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def failed(self, error: Exception) -> None:
        """Exchange nothing any more."""
        self._failure = self._failure or (
            f"an exchange of gradients failed before ({error}): no gradients are exchanged any "
            "more; end this job, and start it again from its last checkpoint"
        )

    def closed(self) -> None:
        """Exchange nothing any more."""
        self._failure = self._failure or (
            "this communication hook was closed: wrap the model and register a hook again"
        )


class _Turn:
    """That of one job on a host.

    Args:
        before: What is set when the job before has had its turn.
    """

    def __init__(self, before: threading.Event | None) -> None:
        self._before, self.over = before, threading.Event()

    def __enter__(self) -> None:
        if self._before is not None:
            self._before.wait()

    def __exit__(self, *_: object) -> None:
        self.over.set()


class HostTransport(_Lanes):
    """Runs jobs in turn on two lanes, while the caller goes on; sends what they send.

    Owned by whoever makes it, and given back by `close`, when it is collected, or as the
    interpreter ends. Unlike groups of ``torch.distributed.new_group``, its connections are no
    other's, and making them concerns their own ranks alone.

    Exchanges with one rank after another, and one bucket after another: streams that share a link
    divide it unevenly, and all wait for the slowest.

    Args:
        name: Of a new gloo backend, the same on all ranks and no other's.
        group: The ranks.
        levels: Those of each level.
        stats: Where waiting is counted.
    """

    # A thread a lane, which takes its jobs in turn, and which the interpreter joins before it ends:
    # one that it finds in torch aborts the process. What ends the turn of the last job. What gives
    # threads and connections back.
    def __init__(self, name: str, group: ProcessGroup, levels: Levels, stats: HookStats) -> None:
        super().__init__(torch.device("cpu"))
        self._workers = [ThreadPoolExecutor(1, "distamp-comm-hook") for _ in self.lanes]
        self._over: threading.Event | None = None
        self._backends: list[Any] = [torch_compat.new_gloo(name, group)]
        self._rank, self._levels, self._stats = group.rank(), levels, stats
        self._finalizer = weakref.finalize(self, _end, self._workers, self._backends)

    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """Return the future of what ``job`` returns; whoever waits for it raises what it raised.

        Args:
            job: What to do with a lane.
            uses: Tensors of the caller that the job reads or writes.

        Raises:
            RuntimeError: A job failed before, or it is closed.
        """
        lane, done, turn = self.next(), Future[Any](), _Turn(self._over)
        self._over = turn.over
        self._workers[lane.index].submit(self._run, job, lane, turn, done)
        # An error set on a future from Python reaches C++, where DDP waits, as a value. Raised in
        # a callback, which starts no collective, it arrives as an error.
        return done.then(_value_or_raise)

    def close(self) -> None:
        """Give threads and connections back, when what was submitted is done. Not collective."""
        for worker in self._workers:
            worker.shutdown()
        self.closed()
        self._finalizer()

    def _run(self, job: Job, lane: Lane, turn: _Turn, done: Future[Any]) -> None:
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
        with turn:
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
        (backend,), ranks = self._backends, self._levels[level]
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
        (backend,) = self._backends
        backend.allreduce([values]).wait()


def _value_or_raise(done: Future[Any]) -> Tensor:
    outcome: Tensor | Exception = done.value()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class DeviceTransport(_Lanes):
    """As `HostTransport`, on a device, of which each lane has a stream."""

    # A stream for each lane, and communicators by level and lane; what gives these back.
    def __init__(
        self, name: str, group: ProcessGroup, levels: Levels, device: torch.device
    ) -> None:
        super().__init__(device)
        self._device = device
        self._streams = [torch.Stream(device, priority=-1) for _ in self.lanes]
        self._backends = {
            (level, lane.index): torch_compat.new_communicator(
                f"{name}/{level}/{min(ranks)}/{lane.index}", group, ranks, device
            )
            for level, ranks in levels.items()
            for lane in (self.lanes if len(ranks) > 1 else ())
        }
        self._finalizer = weakref.finalize(self, _end, [], self._backends)

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

    def close(self) -> None:
        """As `HostTransport.close`."""
        for stream in self._streams:
            stream.synchronize()
        self.closed()
        self._finalizer()

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


def _end(workers: Sequence[ThreadPoolExecutor], backends: Any) -> None:
    """Let threads end with what they do, and give connections back."""
    for worker in workers:
        worker.shutdown(wait=False)
    for backend in backends.values() if isinstance(backends, dict) else ():
        torch_compat.shut_down(backend)
    backends.clear()
