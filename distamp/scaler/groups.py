"""Over which ranks a scaler sends its message, where it lies, and how long it is."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distamp import host
from distamp.errors import StageError

__all__ = ["Group", "GroupLike", "Layout", "check_group", "resolve"]

_HALF = 32
# Messages that take rows after rows were last sent.
_WITH_ROWS = 8

GroupLike: TypeAlias = "ProcessGroup | DeviceMesh | None"


@dataclass
class Length:
    """What decides how long a message over one group is; the same on all its ranks.

    It belongs to the group and not to a scaler, for a rank may make a scaler anew, and it counts
    only what all ranks took part in.

    Args:
        capacity: Optimizers that one message takes.
        without_rows: Messages since rows were last sent.
    """

    capacity: int
    without_rows: int = 0

    def takes_rows(self) -> bool:
        """Return whether the next message takes rows, and count it."""
        self.without_rows += 1
        return self.without_rows <= _WITH_ROWS


# A ProcessGroup has no place for attributes, so this stands beside it, as long as it lives.
_lengths: weakref.WeakKeyDictionary[ProcessGroup, dict[bool, Length]] = weakref.WeakKeyDictionary()


class Group:
    """A process group, this rank's place in it, and the device its messages lie on.

    Args:
        process_group: The group every message of the scaler goes through.
        preferred: The device of the loss scale; used where the group's backend can read it.
    """

    def __init__(self, process_group: ProcessGroup, preferred: torch.device) -> None:
        self.process_group = process_group
        self.preferred = preferred
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        self.global_ranks = dist.get_process_group_ranks(process_group)
        self.device = _message_device(process_group, preferred)
        self.on_host = host.is_host(self.device)
        by_place = _lengths.setdefault(process_group, {})
        self.length = by_place.setdefault(self.on_host, Length(self.first_capacity()))

    def first_capacity(self) -> int:
        """Return how many optimizers share the first messages: those of one word, or four."""
        return max(_HALF // self.size, 4) if self.on_host else 1

    @property
    def global_rank(self) -> int:
        """This rank's number in the default group, the one people know it by."""
        return self.global_ranks[self.rank]

    def layout(self) -> Layout:
        """Return where things lie in the next message."""
        shared = self.on_host and self.size <= _HALF
        return _layout(self.size, self.length.capacity, _HALF // self.size if shared else 1)


def check_group(process_group: object) -> None:
    """Refuse what can never be a group this rank sends through.

    Raises:
        TypeError: Neither a ProcessGroup, a DeviceMesh, None nor a stand-in for a group.
        ValueError: A group that this rank is no member of.
    """
    if dist.is_available() and process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group does not contain this rank; give each rank the group it belongs to"
        )
    if (
        process_group is not None
        and not isinstance(process_group, (ProcessGroup, DeviceMesh))
        and not _is_stand_in(process_group)
    ):
        raise TypeError(
            "process_group must be a ProcessGroup, a DeviceMesh or None (the default group), not "
            f"{type(process_group).__name__}"
        )
    if isinstance(process_group, DeviceMesh) and process_group.get_coordinate() is None:
        raise ValueError(
            f"process_group is {process_group}, which does not contain rank {dist.get_rank()}"
        )


def _is_stand_in(process_group: object) -> bool:
    """Return whether this is an object as tests make them, with ``rank()`` and ``size()``."""
    return all(callable(getattr(process_group, name, None)) for name in ("rank", "size"))


def resolve(given: GroupLike) -> ProcessGroup | None:
    """Return the group to send through now; None where there is nobody to agree with.

    A mesh stands for all its dimensions as one group. A mesh as large as the default group is that
    group; only a smaller mesh of several dimensions needs a group of its own, made by its members.

    Raises:
        StageError: An explicit group was destroyed.
    """
    world = dist.group.WORLD if dist.is_available() else None
    if given is None:
        return world
    anything: Any = given
    if not isinstance(anything, (ProcessGroup, DeviceMesh)):
        _check_stand_in(anything)
        return None
    if world is None:
        raise StageError(_DESTROYED)
    if isinstance(given, ProcessGroup):
        try:
            dist.get_rank(given)  # unlike get_world_size, refuses a group that is gone
        except (ValueError, RuntimeError) as error:
            raise StageError(f"{_DESTROYED} ({error})") from None
        return given
    if given.ndim == 1:
        return given.get_group()
    if given.size() == dist.get_world_size():
        return dist.group.WORLD
    ranks = sorted(int(rank) for rank in given.mesh.flatten())
    group: ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return group


_DESTROYED = (
    "the process group of this scaler was destroyed; set scaler.process_group to the new one "
    "(or to None for the default group)"
)


def _check_stand_in(given: Any) -> None:
    if given.size() == 1:
        return
    raise StageError(
        f"process_group is a {type(given).__name__} of {given.size()} ranks, through which nothing "
        "can be sent; give a ProcessGroup, a DeviceMesh or None"
    )


def _message_device(process_group: ProcessGroup, preferred: torch.device) -> torch.device:
    config = dist.get_backend_config(process_group)
    backends = dict(entry.split(":") for entry in config.split(",") if ":" in entry)
    if preferred.type in backends or not backends:
        return preferred
    if "cpu" in backends:
        return torch.device("cpu")
    device_type = next(iter(backends))
    return torch.device(device_type, torch.accelerator.current_device_index())


class Layout(NamedTuple):
    """Where flags lie in a message.

    Args:
        size: Ranks.
        capacity: Optimizers that it takes.
        in_a_word: Optimizers whose flags share a word; 1 where those of one fill it.
        for_one: Words that the flags of one optimizer take.
        words: All words before the rows.
    """

    size: int
    capacity: int
    in_a_word: int
    for_one: int
    words: int

    def bit(self, optimizer: int, rank: int) -> tuple[int, int]:
        """Return the word and the bit of an optimizer's flag on a rank."""
        if self.for_one > 1:
            return optimizer * self.for_one + rank // _HALF, rank % _HALF
        return optimizer // self.in_a_word, optimizer % self.in_a_word * self.size + rank

    def found(self, words: Sequence[int], optimizer: int) -> int:
        """Return the ranks of the group that set an optimizer's flag, a bit for each."""
        if self.for_one == 1:
            shift = optimizer % self.in_a_word * self.size
            return words[optimizer // self.in_a_word] >> shift & (1 << self.size) - 1
        start = optimizer * self.for_one
        low = [word & 2**_HALF - 1 for word in words[start : start + self.for_one]]
        return sum(word << _HALF * place for place, word in enumerate(low))


@functools.lru_cache(maxsize=64)
def _layout(size: int, capacity: int, in_a_word: int) -> Layout:
    for_one = -(-size // _HALF)
    words = capacity * for_one if for_one > 1 else -(-capacity // in_a_word)
    return Layout(size, capacity, in_a_word, for_one, words)
