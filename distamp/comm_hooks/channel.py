"""The ranks that exchange gradients, and the collectives they do it with.

On the host a hook has a gloo group of its own: its exchanges run beside the backward pass, and
collectives of one group must be issued in the same order on every rank. On an accelerator the
caller's group serves, because there everything is put on a stream by the calling thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.order import in_order

__all__ = ["Channel", "check_member", "resolve_group", "staggered_all_to_all"]

# gloo's gather is a ring of ``size - 1`` turns. Up to here its waits cost more than it spares.
ONE_WAIT_BYTES = 1 << 16


def resolve_group(process_group: ProcessGroup | None) -> ProcessGroup:
    """Return the group to exchange over: ``process_group``, or the default group for None.

    Raises:
        ValueError: torch.distributed is not initialised, or this rank is no member.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "a communication hook needs a process group: call "
            "torch.distributed.init_process_group first"
        )
    check_member(process_group)
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    return group


def check_member(process_group: object) -> None:
    """Refuse what ``new_group`` returns on ranks that are no members of the new group.

    Raises:
        ValueError: It is that.
    """
    if torch_compat.is_non_member(process_group):
        raise ValueError(
            "process_group does not contain this rank; give each rank the group it belongs to"
        )


class Channel:
    """Two collectives over the ranks of one group: all-to-all, and gather of equal rows.

    Making one is collective: every rank of the group does so at the same point. On the host they
    run one after another in a thread of their own, and each keeps to one stream on every link: two
    that share a link divide it unevenly, and other links stand idle meanwhile.

    An exchange that fails on a rank leaves the others out of step with it, so it closes the channel
    of every rank; where that was another, the backend's own error says what it saw.

    Args:
        process_group: The ranks. Referenced weakly: destroying the group ends this channel too.
        device: Where the gradients lie.
    """

    def __init__(self, process_group: ProcessGroup, device: torch.device) -> None:
        self._group = weakref.ref(process_group)
        self.device = device
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        self.ranks = dist.get_process_group_ranks(process_group)
        self.on_host = device.type == "cpu"
        self.backend_name = torch_compat.backend_name(process_group, device)
        self._backend: Any = None
        self._broken = False
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._operations = in_order(device)
        if self.on_host and self.size > 1:
            name = f"distamp/comm_hooks/{_name(process_group)}"
            self._backend, _ = torch_compat.new_gloo(name, process_group)
            weakref.finalize(process_group, _close, weakref.ref(self))

    @property
    def process_group(self) -> ProcessGroup:
        """The group this channel was made for.

        Raises:
            RuntimeError: It was destroyed.
        """
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the process group of this communication hook was destroyed; wrap the model and "
                "register the hook again"
            )
        return group

    # -- collectives -----------------------------------------------------------------------------

    def all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        """Send the r-th part of ``sent`` to rank r; both uint8 of equal parts. Returns the work."""
        if not self.on_host:
            return dist.all_to_all_single(received, sent, group=self.process_group, async_op=True)
        return self._submit(partial(self._all_to_all, received, sent))

    def gather(self, received: Tensor, row: Tensor) -> Any:
        """Collect every rank's ``row``, by rank, in ``received``: ``size`` rows of uint8.

        ``row`` may be this rank's own of ``received``. Returns the work.
        """
        if not self.on_host:
            return torch_compat.all_gather_rows(received, row, self.process_group)
        return self._submit(partial(self._gather, received, row))

    def _submit(self, operation: Callable[[], Tensor]) -> Any:
        def run() -> Tensor:
            if self._broken or self._backend is None:
                raise RuntimeError("the channel is closed")
            try:
                return operation()
            except Exception:
                self._broken = True
                raise

        return self._operations.submit(run)

    def _all_to_all(self, received: Tensor, sent: Tensor) -> Tensor:
        self._staggered(received, sent.view(self.size, -1))
        return received

    def _staggered(self, received: Tensor, sent: Tensor) -> None:
        backend = self._backend
        staggered_all_to_all(
            received.view(self.size, -1),
            sent,
            self.rank,
            receive=lambda row, source, tag: backend.recv([row], source, tag),
            send=lambda row, target, tag: backend.send([row], target, tag),
        )

    def _gather(self, received: Tensor, row: Tensor) -> Tensor:
        if received.numel() <= ONE_WAIT_BYTES:
            torch_compat.exchange_rows(self._backend, received, row.repeat(self.size))
        elif self.size == 2:
            # A ring of two sends and receives in turn, where both can be done at once.
            self._staggered(received, row.expand(2, -1))
        else:
            torch_compat.gather_rows(self._backend, received, row)
        return received

    # -- failures --------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuse to go on after a failure.

        Raises:
            RuntimeError: An exchange failed; the message says what.
        """
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def fail(self, error: BaseException, doing: str) -> RuntimeError:
        """Close the channel after an exchange failed here, and return what to raise.

        Args:
            error: What was raised on this rank.
            doing: What this rank was exchanging.
        """
        with self._lock:
            if self._failure is None:
                self._failure = self._explained(error, doing)
        return RuntimeError(self._failure)

    def _explained(self, error: BaseException, doing: str) -> str:
        text = _line(str(error)) or type(error).__name__
        self._broken = True
        if self.on_host and self.size > 1:
            self._operations.submit(self._let_go)
        return (
            f"{doing} failed on rank {self.ranks[self.rank]}: {type(error).__name__}: {text}. No "
            "gradients are exchanged any more: end this job, and start it again from its last "
            "checkpoint"
        )

    def _let_go(self) -> Tensor:
        # Peers that wait for this rank hear of it as their connections end.
        self._backend = None
        return torch.empty(0, device="cpu")


def staggered_all_to_all(
    received: Tensor,
    sent: Tensor,
    rank: int,
    *,
    receive: Callable[[Tensor, int, int], Any],
    send: Callable[[Tensor, int, int], Any],
) -> None:
    """Send each rank its row: to the next rank first, then to the one after it, round the ring.

    A send is over for gloo when the kernel has taken it. A rank that went on then would put two
    streams on its link, the first of which comes late, and whoever waits for that leaves links idle
    in its turn. So every row is answered by a byte, and the next one is sent after the answer.

    Args:
        received: A row from each rank, uint8.
        sent: A row for each rank, uint8.
        rank: This one.
        receive: Begins to receive bytes from a rank with a tag; returns the work.
        send: Begins to send bytes to a rank with a tag; returns the work.
    """
    size = len(sent)
    if received[rank].data_ptr() != sent[rank].data_ptr():
        received[rank].copy_(sent[rank])
    at_once = size == 2 or sent.numel() <= ONE_WAIT_BYTES
    works = []
    for distance in range(1, size):
        source, target = (rank - distance) % size, (rank + distance) % size
        coming = receive(received[source], source, distance)
        works.append(send(sent[target], target, distance))
        if at_once:
            works.append(coming)
            continue
        answers = sent.new_zeros(2, 1)
        works.append(receive(answers[0], target, distance + size))
        _wait([coming])
        works.append(send(answers[1], source, distance + size))
        _wait(works)
        works = []
    _wait(works)


def _wait(works: Iterable[Any]) -> None:
    # Once each: gloo's wait for another message the second time.
    for work in works:
        if work is not None:
            work.wait()


def _line(text: str) -> str:
    """Return the first line of an error that went through a future, which adds where it was."""
    return next((line.strip() for line in text.splitlines() if line.strip()), text)


def _close(channel: weakref.ref[Channel]) -> None:
    living = channel()
    if living is not None:
        living._backend = None


def _name(group: ProcessGroup) -> int:
    """Return a number that no other channel has, the same on all ranks of the group."""
    # Users seed the default generator alike in every run, and a store may outlive a run.
    generator = torch.Generator("cpu")
    generator.seed()
    drawn = torch.randint(2**62, (1,), generator=generator, dtype=torch.int64, device="cpu")
    drawn = drawn.to(torch_compat.device_of(group))
    dist.broadcast(drawn, src=dist.get_global_rank(group, 0), group=group)
    return int(drawn.item())
