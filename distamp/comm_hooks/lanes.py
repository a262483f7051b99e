"""Two lanes beside the backward pass: while one bucket is on the wire, the next one is encoded.

On a host a lane is a thread, and messages go by a gloo backend of the hook's own, to one rank at a
time: gloo would send to all at once, and streams that share a link divide it unevenly. On a device
a lane is a stream of high priority on which the calling thread puts everything, and messages go by
communicators of the hook's own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.stats import Account

__all__ = ["DeviceLanes", "DeviceWire", "HostLanes", "HostWire", "Job", "Lane", "Lanes", "Wire"]

COUNT = 2
# So little is sent to all ranks at once: there is more to wait for than to send.
AT_ONCE_BYTES = 1 << 16


class Lane:
    """What one exchange after another uses: memory, and a number for its messages."""

    def __init__(self, index: int, device: torch.device) -> None:
        self.index = index
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def memory(self, name: str, nbytes: int) -> Tensor:
        """Return uint8 of that length, of which the next exchange of this lane has the same."""
        kept = self._memory.get(name)
        if kept is None or kept.numel() < nbytes:
            self._memory.pop(name, None)
            kept = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._memory[name] = kept
        return kept[:nbytes]

    def nbytes(self) -> int:
        """Return how much memory it has."""
        return sum(each.numel() for each in self._memory.values())


class Turn:
    """Lets exchanges use the network one after another, in the order they were asked for."""

    def __init__(self, before: threading.Event | None) -> None:
        self._before = before
        self.over = threading.Event()

    def __enter__(self) -> None:
        if self._before is not None:
            self._before.wait()
            self._before = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.over.set()


Job = Callable[[Lane, Turn], Tensor]


class Lanes(Protocol):
    """Runs jobs in turn on two lanes, while the caller goes on."""

    def nbytes(self) -> int:
        """Return how much memory the lanes have."""

    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """Return the future of what ``job`` returns; whoever waits for it raises what it raised.

        Args:
            job: What to do with a lane; what it does with the network it does in its turn.
            uses: Tensors of the caller that the job reads or writes.

        Raises:
            RuntimeError: A job failed before.
        """


class Wire(Protocol):
    """Sends a tensor to each of some ranks and receives one from each."""

    def swap(self, level: str, lane: Lane, received: list[Tensor], sent: list[Tensor]) -> None:
        """Do so, on a device when its stream comes to it.

        Args:
            level: ``"inner"`` for the ranks of this host, ``"outer"`` for those of other hosts that
                have the same part as this one. This rank is one of them.
            lane: Whose messages they are.
            received: 1-D contiguous uint8, one from each; those without elements are left out.
            sent: The same, one for each.
        """


# -- on a host --------------------------------------------------------------------------------


class HostLanes:
    """See `Lanes`; the threads end when nothing is left to do.

    Args:
        close: Ends the connections, after a failure.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._lanes = [_Thread(Lane(index, torch.device("cpu"))) for index in range(COUNT)]
        self._close = close
        self._count = 0
        self._last: threading.Event | None = None
        self._failure: Exception | None = None

    def nbytes(self) -> int:
        """See `Lanes.nbytes`."""
        return sum(each.lane.nbytes() for each in self._lanes)

    def submit(self, job: Job, uses: Sequence[Tensor] = ()) -> Future[Tensor]:
        """See `Lanes.submit`."""
        self._check()
        thread = self._lanes[self._count % COUNT]
        self._count += 1
        turn = Turn(self._last)
        self._last = turn.over
        done: Future[tuple[Tensor | None, Exception | None]] = Future()
        thread.add(lambda: done.set_result(self._outcome(job, thread.lane, turn)))
        # An error set on a future from Python reaches C++, where DDP waits, as a value. Raised in
        # a callback, which starts no collective, it arrives as an error.
        return done.then(_value_or_raise)

    def _outcome(self, job: Job, lane: Lane, turn: Turn) -> tuple[Tensor | None, Exception | None]:
        try:
            self._check()
            with torch.no_grad():
                return job(lane, turn), None
        except Exception as error:
            self._failure = self._failure or error
            # Ranks that wait for this one hear of it as their connections end.
            self._close()
            return None, error
        finally:
            with turn:
                pass

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"an exchange of gradients failed before ({self._failure}): no gradients are "
                "exchanged any more; end this job, and start it again from its last checkpoint"
            )


def _value_or_raise(done: Future[tuple[Tensor | None, Exception | None]]) -> Tensor:
    value, error = done.value()
    if error is not None:
        raise error
    assert value is not None
    return value


class _Thread:
    """Calls functions one after another; there is a thread only while there are any."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = False

    def add(self, function: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append(function)
            start, self._running = not self._running, True
        if start:
            threading.Thread(target=self._run, name="distamp-comm-hook", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                function = self._waiting.popleft()
            function()


class HostWire:
    """See `Wire`.

    Args:
        name: Of a new gloo backend, the same on all ranks and no other's.
        group: The ranks.
        levels: The ranks of each level, by their numbers in the group.
        account: Where waiting is counted.
    """

    def __init__(
        self, name: str, group: ProcessGroup, levels: dict[str, list[int]], account: Account
    ) -> None:
        self._backend: Any = torch_compat.new_gloo(name, group) if group.size() > 1 else None
        self._rank, self._levels, self._account = group.rank(), levels, account

    def close(self) -> None:
        """End the connections."""
        self._backend = None

    def swap(self, level: str, lane: Lane, received: list[Tensor], sent: list[Tensor]) -> None:
        """See `Wire.swap`."""
        start = time.perf_counter()
        backend, ranks = self._backend, self._levels[level]
        if backend is None:
            raise RuntimeError("the connections of this communication hook were closed")
        size, mine = len(ranks), ranks.index(self._rank)
        tag = 2 * lane.index + (level == "inner")
        at_once = size == 2 or sum(map(len, sent)) <= AT_ONCE_BYTES
        works: list[Any] = []
        for distance in range(1, size):
            source, target = (mine - distance) % size, (mine + distance) % size
            if len(received[source]):
                works.append(backend.recv([received[source]], ranks[source], tag))
            if len(sent[target]):
                works.append(backend.send([sent[target]], ranks[target], tag))
            if not at_once or distance == size - 1:
                for work in works:
                    work.wait()
                works = []
        received[mine].copy_(sent[mine])
        self._account.waiting += time.perf_counter() - start


# -- on a device ------------------------------------------------------------------------------


class DeviceLanes:
    """See `Lanes`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes = [
            (Lane(index, device), torch.Stream(device, priority=-1)) for index in range(COUNT)
        ]
        self._count = 0

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
            result.set_result(job(lane, Turn(None)))
        return result


class DeviceWire:
    """See `Wire`; arguments as of `HostWire`."""

    def __init__(
        self, name: str, group: ProcessGroup, levels: dict[str, list[int]], device: torch.device
    ) -> None:
        self._groups = {
            level: torch_compat.new_communicator(
                f"{name}/{level}/{min(ranks)}", group, ranks, device
            )
            for level, ranks in levels.items()
            if len(ranks) > 1
        }

    def swap(self, level: str, lane: Lane, received: list[Tensor], sent: list[Tensor]) -> None:
        """See `Wire.swap`."""
        self._groups[level].alltoall(received, sent).wait()
