"""The ranks that exchange gradients, and the collectives they do it with.

On the host a hook has a gloo group of its own: its exchanges run beside the backward pass, and
collectives of one group must be issued in the same order on every rank. On an accelerator the
caller's group serves, because there everything is put on a stream by the calling thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup

from distamp.comm_hooks.order import in_order

__all__ = [
    "Channel",
    "by_turns",
    "device_of",
    "lockstep_words",
    "refuse_stranger",
    "resolve_group",
    "row_bytes",
    "words_differ",
]

# gloo's gather is a ring of ``size - 1`` turns. Up to here its waits cost more than it spares.
ONE_WAIT_BYTES = 1 << 16
# Rows of a collective start at multiples of this, so that what lies in them can be viewed as int64.
_ALIGNMENT = 16


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
    refuse_stranger(process_group)
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    return group


def refuse_stranger(process_group: object) -> None:
    """Refuse what ``new_group`` returns on ranks that are no members of the new group.

    Raises:
        ValueError: It is that.
    """
    if dist.is_available() and process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group does not contain this rank; give each rank the group it belongs to"
        )


class Channel:
    """Two collectives over the ranks of one group: all-to-all, and gather of equal rows.

    Making one is collective: every rank of the group does so at the same point. On the host they
    run one after another in a thread of their own, and each keeps to one stream on every link: two
    that share a link divide it unevenly, and other links stand idle meanwhile.

    Args:
        process_group: The ranks. Held weakly: a group that is destroyed ends this channel too.
        device: Where the gradients lie.
    """

    def __init__(self, process_group: ProcessGroup, device: torch.device) -> None:
        self._group = weakref.ref(process_group)
        self.device = device
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        self.on_host = device.type == "cpu"
        self._backend: Any = None
        self._operations = in_order(device)
        if self.on_host and self.size > 1:
            self._backend = _own_gloo(process_group, self.rank, self.size)
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

    def global_ranks(self) -> list[int]:
        """Return the default group's number of every rank here."""
        return dist.get_process_group_ranks(self.process_group)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        """Send the r-th part of ``sent`` to rank r; both uint8 of equal parts. Returns the work."""
        if not self.on_host:
            return dist.all_to_all_single(received, sent, group=self.process_group, async_op=True)
        return self._operations.submit(partial(self._all_to_all, received, sent))

    def gather(self, received: Tensor, row: Tensor) -> Any:
        """Collect every rank's ``row``, by rank; ``received`` holds ``size`` rows of uint8.

        Returns the work.
        """
        if not self.on_host:
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return gather(received, row, group=self.process_group, async_op=True)
        return self._operations.submit(partial(self._gather, received, row))

    def _all_to_all(self, received: Tensor, sent: Tensor) -> Tensor:
        self._by_turns(received, sent.view(self.size, -1))
        return received

    def _by_turns(self, received: Tensor, sent: Tensor) -> None:
        by_turns(
            received.view(self.size, -1),
            sent,
            self.rank,
            receive=lambda row, source, tag: self._backend.recv([row], source, tag),
            send=lambda row, target, tag: self._backend.send([row], target, tag),
        )

    def _gather(self, received: Tensor, row: Tensor) -> Tensor:
        if received.numel() <= ONE_WAIT_BYTES:
            copies = row.repeat(self.size)
            self._backend.alltoall_base(received, copies, [], []).wait()
        elif self.size == 2:
            # A ring of two sends and receives by turns, where both can be done at once.
            self._by_turns(received, row.expand(2, -1))
        else:
            self._backend._allgather_base(received, row).wait()
        return received


def by_turns(
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


def _wait(works: Sequence[Any]) -> None:
    # Once each: gloo's wait for another message the second time.
    for work in works:
        if work is not None:
            work.wait()


def row_bytes(header: int, wire: int) -> int:
    """Return how long a row of a collective is that holds so many bytes of header and wire."""
    return -(-(header + wire) // _ALIGNMENT) * _ALIGNMENT


def lockstep_words(word: int, scale: Tensor | None, device: torch.device) -> Tensor:
    """Return what an exchange says besides gradients, int64 of shape (2,).

    Args:
        word: What a scaler says of its iteration, settings and calls.
        scale: The loss scale, 0-d float32; None says nothing at all.
        device: Where the gradients lie.
    """
    words = torch.zeros(2, dtype=torch.int64, device=device)
    if scale is not None:
        words[0] = word
        words[1] = scale.view(torch.int32)
    return words


def words_differ(words: Tensor) -> Tensor:
    """Return, 0-d bool, whether ranks sent different lockstep words.

    Args:
        words: int64, a row of each rank; one whose first word is 0 says nothing.
    """
    silent = words[:, :1] == 0
    most = torch.where(silent, torch.iinfo(torch.int64).min, words).amax(0)
    least = torch.where(silent, torch.iinfo(torch.int64).max, words).amin(0)
    return (most > least).any()


def _close(channel: weakref.ref[Channel]) -> None:
    living = channel()
    if living is not None:
        living._backend = None


def _own_gloo(parent: ProcessGroup, rank: int, size: int) -> Any:
    """Return a gloo group of the same ranks, whose life is its owner's alone.

    torch's ``new_group`` would need the ranks outside the group too, or name it by its ranks: made
    a second time, such a group finds the addresses of the first.
    """
    names = torch.randint(2**62, (1,), generator=_seeded_by_the_system())
    on_device = names.to(device_of(parent))
    dist.broadcast(on_device, src=dist.get_global_rank(parent, 0), group=parent)
    store = dist.distributed_c10d._get_default_store()
    name = f"distamp/comm_hooks/{int(on_device.item())}"
    return dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, _timeout(parent))


def _seeded_by_the_system() -> torch.Generator:
    # Users seed the default generator alike in every run, and a store may outlive a run.
    generator = torch.Generator()
    generator.seed()
    return generator


def device_of(group: ProcessGroup) -> torch.device:
    """Return a device whose tensors the group can send."""
    types = [device.type for device in group._device_types]
    if "cpu" in types or not types:
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())


def _timeout(group: ProcessGroup) -> timedelta:
    backend = group._get_backend(device_of(group))
    timeout: timedelta = getattr(backend.options, "_timeout", dist.default_pg_timeout)
    return timeout
