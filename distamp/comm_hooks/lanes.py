"""Two lanes beside the backward pass: while one bucket is on the wire, the next one is encoded.

On a host each exchange has a thread, and messages go by a gloo backend of the hook's own. On a
device a lane is a stream of high priority on which the calling thread puts everything, and messages
go by communicators of the hook's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.stats import HookStats

__all__ = ["DeviceLanes", "HostLanes", "Job", "Lane", "Lanes"]

COUNT = 2


class Lane:
    """What one exchange after another uses: memory, and a number for its messages."""

    def __init__(self, index: int, device: torch.device) -> None:
        self.index = index
        self._device = device
        self._memory: dict[str, Tensor] = {}
        # On a host: set when the bucket before is sent, and to be set when this one is.
        self.turn = threading.Event(), threading.Event()

    def memory(self, name: str, nbytes: int) -> Tensor:
        """Return uint8 of that length, of which the next exchange of this lane has the same."""
        if name not in self._memory or self._memory[name].numel() < nbytes:
            self._memory.pop(name, None)
            self._memory[name] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._memory[name][:nbytes]

    def nbytes(self) -> int:
        """Return how much memory it has."""
        return sum(each.numel() for each in self._memory.values())


Job = Callable[[Lane], Tensor]


class Lanes(Protocol):
    """Runs jobs in turn on two lanes, while the caller goes on; sends what they send."""

    def nbytes(self) -> int:
        """Return how much memory the lanes have."""

    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """Return the future of what ``job`` returns; whoever waits for it raises what it raised.

        Args:
            job: What to do with a lane.
            uses: Tensors of the caller that the job reads or writes.

        Raises:
            RuntimeError: A job failed before.
        """

    def turn(self, lane: Lane) -> AbstractContextManager[None]:
        """Return within what a job uses the network between hosts: in the order of submission."""

    def swap(
        self, level: str, lane: Lane, received: Sequence[Tensor], sent: Sequence[Tensor]
    ) -> None:
        """Send a tensor to each rank of a level and receive one from each.

        Args:
            level: ``"inner"`` for the ranks of this host, ``"outer"`` for those of other hosts that
                have the same part as this one. This rank is one of them.
            lane: Whose messages they are.
            received: 1-D contiguous uint8, one from each; those without elements are left out.
            sent: The same, one for each.
        """


class HostLanes:
    """See `Lanes`. Exchanges with one rank after another, and one bucket after another.

    Streams that share a link divide it unevenly, and all wait for the slowest.

    Args:
        name: Of a new gloo backend, the same on all ranks and no other's.
        group: The ranks.
        levels: The ranks of each level, by their numbers in the group.
        stats: Where waiting is counted.
    """

    def __init__(
        self, name: str, group: ProcessGroup, levels: dict[str, list[int]], stats: HookStats
    ) -> None:
        self._lanes = [Lane(index, torch.device("cpu")) for index in range(COUNT)]
        self._last: list[threading.Thread | None] = [None] * COUNT
        self._count = 0
        # Set when the last bucket has been sent.
        self._turn = threading.Event()
        self._turn.set()
        self._failure: Exception | None = None
        self._backend: Any = torch_compat.new_gloo(name, group)
        self._rank, self._levels, self._stats = group.rank(), levels, stats

    def nbytes(self) -> int:
        """See `Lanes.nbytes`."""
        return sum(each.nbytes() for each in self._lanes)

    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """See `Lanes.submit`."""
        self._check()
        index = self._count % COUNT
        self._count += 1
        before, done = self._last[index], Future[Any]()
        turn = self._turn, threading.Event()
        self._turn = turn[1]

        def run() -> None:
            if before is not None:
                before.join()
            self._lanes[index].turn = turn
            outcome = self._outcome(job, self._lanes[index])
            with self.turn(self._lanes[index]):
                done.set_result(outcome)

        thread = threading.Thread(target=run, name="distamp-comm-hook", daemon=True)
        self._last[index] = thread
        thread.start()
        # An error set on a future from Python reaches C++, where DDP waits, as a value. Raised in
        # a callback, which starts no collective, it arrives as an error.
        return done.then(_value_or_raise)

    @contextmanager
    def turn(self, lane: Lane) -> Iterator[None]:
        """See `Lanes.turn`."""
        before, over = lane.turn
        before.wait()
        yield
        over.set()

    def swap(
        self, level: str, lane: Lane, received: Sequence[Tensor], sent: Sequence[Tensor]
    ) -> None:
        """See `Lanes.swap`."""
        start = time.perf_counter()
        backend, ranks = self._backend, self._levels[level]
        self._check()
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
            # Ranks that wait for this one hear of it as its connections end.
            self._backend = None
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


class DeviceLanes:
    """See `Lanes`; arguments as of `HostLanes`, and the device."""

    def __init__(
        self, name: str, group: ProcessGroup, levels: dict[str, list[int]], device: torch.device
    ) -> None:
        self._device = device
        self._lanes = [
            (Lane(index, device), torch.Stream(device, priority=-1)) for index in range(COUNT)
        ]
        self._count = 0
        self._groups = {
            level: torch_compat.new_communicator(
                f"{name}/{level}/{min(ranks)}", group, ranks, device
            )
            for level, ranks in levels.items()
            if len(ranks) > 1
        }

    def nbytes(self) -> int:
        """See `Lanes.nbytes`."""
        return sum(lane.nbytes() for lane, _ in self._lanes)

    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """See `Lanes.submit`."""
        lane, stream = self._lanes[self._count % COUNT]
        self._count += 1
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        result: Future[Tensor] = Future(devices=[self._device])
        with stream, torch.no_grad():
            for each in uses:
                each.record_stream(stream)
            result.set_result(job(lane))
        return result

    def turn(self, lane: Lane) -> AbstractContextManager[None]:
        """See `Lanes.turn`; a stream waits for its own messages alone."""
        return nullcontext()

    def swap(
        self, level: str, lane: Lane, received: Sequence[Tensor], sent: Sequence[Tensor]
    ) -> None:
        """See `Lanes.swap`."""
        self._groups[level].alltoall([*received], [*sent]).wait()
