"""Two lanes beside the backward pass: while one bucket is on the wire, the next one is encoded.

On a host each lane has a thread, and messages go by a gloo backend of the hook's own. On a
device a lane is a stream of high priority on which the calling thread puts everything, and messages
go by communicators of the hook's own.
"""

from __future__ import annotations

import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.stats import HookStats

__all__ = ["DeviceLanes", "HostLanes", "Job", "Lane", "Lanes"]

COUNT = 2


class Lane:
    """What one exchange after another uses: memory, a number for its messages, and its turn."""

    def __init__(self, index: int, device: torch.device) -> None:
        self.index = index
        self._device = device
        self._memory: dict[str, Tensor] = {}
        # On a host: set when the bucket before is sent, and to be set when this one is.
        self.before: threading.Event | None = None
        self.over = threading.Event()

    def memory(self, name: str, nbytes: int) -> Tensor:
        """Return uint8 of that length, of which the next exchange of this lane has the same."""
        if name not in self._memory or self._memory[name].numel() < nbytes:
            self._memory.pop(name, None)
            self._memory[name] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._memory[name][:nbytes]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Return within what a job uses the network between hosts: in the order of submission.

        A stream waits for its own messages alone.
        """
        if self.before is not None:
            self.before.wait()
        yield
        self.over.set()


Job: TypeAlias = Callable[[Lane], Tensor]
# The ranks of a level, by their numbers in the group: "inner" are those of this host, "outer" those
# of other hosts that have the same part as this one. This rank is one of them.
Levels: TypeAlias = Mapping[str, list[int]]


class Lanes(ABC):
    """Runs jobs in turn on two lanes, while the caller goes on; sends what they send."""

    def __init__(self, device: torch.device) -> None:
        self.lanes = [Lane(index, device) for index in range(COUNT)]
        self._count = 0

    def next(self) -> Lane:
        """Return the lane of the next job."""
        self._count += 1
        return self.lanes[self._count % len(self.lanes)]

    @abstractmethod
    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """Return the future of what ``job`` returns; whoever waits for it raises what it raised.

        Args:
            job: What to do with a lane.
            uses: Tensors of the caller that the job reads or writes.

        Raises:
            RuntimeError: A job failed before.
        """

    @abstractmethod
    def swap(
        self, level: str, lane: Lane, received: Sequence[Tensor], sent: Sequence[Tensor]
    ) -> None:
        """Send a tensor to each rank of a level and receive one from each.

        Args:
            level: ``"inner"`` or ``"outer"``.
            lane: Whose messages they are.
            received: 1-D contiguous uint8, one from each; those without elements are left out.
            sent: The same, one for each.
        """


class HostLanes(Lanes):
    """See `Lanes`. Exchanges with one rank after another, and one bucket after another.

    Streams that share a link divide it unevenly, and all wait for the slowest.

    Args:
        name: Of a new gloo backend, the same on all ranks and no other's.
        group: The ranks.
        levels: Those of each level.
        stats: Where waiting is counted.
    """

    def __init__(self, name: str, group: ProcessGroup, levels: Levels, stats: HookStats) -> None:
        super().__init__(torch.device("cpu"))
        # One thread a lane, which takes its jobs in turn, and which the interpreter joins before it
        # ends: a thread that it finds still in torch aborts the process.
        self._workers = [ThreadPoolExecutor(1, "distamp-comm-hook") for _ in self.lanes]
        self._over: threading.Event | None = None
        self._failure: Exception | None = None
        self._backend: Any = torch_compat.new_gloo(name, group)
        self._rank, self._levels, self._stats = group.rank(), levels, stats

    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """See `Lanes.submit`."""
        self._check()
        lane = self.next()
        done = Future[Any]()
        before, over = self._over, threading.Event()

        def run() -> None:
            lane.before, lane.over = before, over
            outcome = self._outcome(job, lane)
            with lane.turn():
                done.set_result(outcome)

        self._over = over
        self._workers[lane.index].submit(run)
        # An error set on a future from Python reaches C++, where DDP waits, as a value. Raised in
        # a callback, which starts no collective, it arrives as an error.
        return done.then(_value_or_raise)

    def swap(
        self, level: str, lane: Lane, received: Sequence[Tensor], sent: Sequence[Tensor]
    ) -> None:
        """See `Lanes.swap`."""
        start = time.perf_counter()
        self._check()
        backend, ranks = self._backend, self._levels[level]
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
        received[mine].copy_(sent[mine])
        self._stats.seconds_waiting += time.perf_counter() - start

    def _outcome(self, job: Job, lane: Lane) -> Tensor | Exception:
        try:
            self._check()
            with torch.no_grad():
                return job(lane)
        except Exception as error:
            self._failure = self._failure or error
            # Ranks that wait for this one hear of it as its connections end, which the locals of
            # what failed would keep.
            self._backend = None
            traceback.clear_frames(error.__traceback__)
            return error

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"an exchange of gradients failed before ({self._failure}): no gradients are "
                "exchanged any more; end this job, and start it again from its last checkpoint"
            )


def _value_or_raise(done: Future[Any]) -> Tensor:
    outcome: Tensor | Exception = done.value()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class DeviceLanes(Lanes):
    """See `Lanes`; arguments as of `HostLanes`, and the device."""

    def __init__(
        self, name: str, group: ProcessGroup, levels: Levels, device: torch.device
    ) -> None:
        super().__init__(device)
        self._device = device
        self._streams = [torch.Stream(device, priority=-1) for _ in self.lanes]
        self._groups = {
            level: torch_compat.new_communicator(
                f"{name}/{level}/{min(ranks)}", group, ranks, device
            )
            for level, ranks in levels.items()
            if len(ranks) > 1
        }

    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """See `Lanes.submit`."""
        lane = self.next()
        stream = self._streams[lane.index]
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        result: Future[Tensor] = Future(devices=[self._device])
        with stream, torch.no_grad():
            for each in uses:
                each.record_stream(stream)
            result.set_result(job(lane))
        return result

    def swap(
        self, level: str, lane: Lane, received: Sequence[Tensor], sent: Sequence[Tensor]
    ) -> None:
        """See `Lanes.swap`."""
        if level in self._groups:
            self._groups[level].alltoall([*received], [*sent]).wait()
