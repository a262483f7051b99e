"""Which ranks a scaler agrees with, and where its message can travel."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distamp.errors import StageError

__all__ = ["Group", "GroupLike", "resolve", "traffic_over"]

_DESTROYED = (
    "the process group of this scaler was destroyed; set scaler.process_group to the new one "
    "(or to None for the default group)"
)

GroupLike: TypeAlias = "ProcessGroup | DeviceMesh | None"


@dataclass
class Traffic:
    """What the scalers of this process have sent over one group.

    It decides how long a message is, so all ranks must hold the same: it belongs to the group, for
    a rank may make a scaler anew, and it counts only what all ranks took part in.

    Args:
        flag_slots: Optimizers that one message has room for.
        messages_without_extras: Messages since extras were last sent.
    """

    flag_slots: int
    messages_without_extras: int = 0

    @classmethod
    def of(cls, size: int) -> Traffic:
        """Return the first state of a group: one word where that has room for four optimizers."""
        in_one_word = 32 // size - 2
        return cls(in_one_word if in_one_word >= 4 else 14)


_traffic: weakref.WeakKeyDictionary[ProcessGroup, Traffic] = weakref.WeakKeyDictionary()


def traffic_over(process_group: ProcessGroup) -> Traffic:
    """Return what was sent over ``process_group`` so far."""
    traffic = _traffic.get(process_group)
    if traffic is None:
        traffic = _traffic[process_group] = Traffic.of(process_group.size())
    return traffic


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
        self.device = _message_device(process_group, preferred)
        self.traffic = traffic_over(process_group)

    @property
    def global_rank(self) -> int:
        """This rank's number in the default group, the one people know it by."""
        return dist.get_rank()

    def global_ranks(self) -> list[int]:
        """Return the default group's number of every rank here."""
        return dist.get_process_group_ranks(self.process_group)


def check(process_group: object) -> None:
    """Refuse what can never be a group this rank sends through.

    Raises:
        TypeError: Neither a ProcessGroup, a DeviceMesh nor None.
        ValueError: A group that this rank is no member of.
    """
    if dist.is_available() and process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group does not contain this rank; give each rank the group it belongs to"
        )
    if process_group is not None and not isinstance(process_group, (ProcessGroup, DeviceMesh)):
        raise TypeError(
            "process_group must be a ProcessGroup, a DeviceMesh or None (the default group), not "
            f"{type(process_group).__name__}"
        )
    if isinstance(process_group, DeviceMesh) and process_group.get_coordinate() is None:
        raise ValueError(
            f"process_group is {process_group}, which does not contain rank {dist.get_rank()}"
        )


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


def _message_device(process_group: ProcessGroup, preferred: torch.device) -> torch.device:
    config = dist.get_backend_config(process_group)
    backends = dict(entry.split(":") for entry in config.split(",") if ":" in entry)
    if preferred.type in backends or not backends:
        return preferred
    if "cpu" in backends:
        return torch.device("cpu")
    device_type = next(iter(backends))
    return torch.device(device_type, torch.accelerator.current_device_index())
