"""The process group of a guard or scaler, and the device of its messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distamp import device_utils
from distamp.errors import CallOrderError, RankMismatchError

__all__ = [
    "GroupLike",
    "MessageGroup",
    "all_gather_rows",
    "call_collective",
    "check_group",
    "resolve_process_group",
]

GroupLike: TypeAlias = "ProcessGroup | DeviceMesh | None"

_IS_AVAILABLE = dist.is_available()
# torch 2.14 renames the function, and the old name warns there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class MessageGroup:
    """A process group with the device on which its messages lie.

    Args:
        process_group: The group that sends the messages.
        scale_device: The device of the loss scale, on which messages lie if the group's backend
            supports it.
        owner: The noun of the sending object in errors: "guard" or "scaler". None for a call
            without such an object.
    """

    def __init__(
        self, process_group: ProcessGroup, scale_device: torch.device, owner: str | None = None
    ) -> None:
        self.process_group = process_group
        self.owner = owner
        self.scale_device = scale_device
        self.size = dist.get_world_size(process_group)
        self.global_ranks = dist.get_process_group_ranks(process_group)
        #: This process's rank in the default group, the number that users know.
        self.global_rank = self.global_ranks[dist.get_rank(process_group)]
        self.device = _message_device(process_group, scale_device)
        self.is_on_host = device_utils.is_cpu(self.device)


def check_group(process_group: object) -> None:
    """Refuse an object that can never be a group of this rank.

    Raises:
        TypeError: The object is no ProcessGroup, DeviceMesh or None.
        ValueError: The group does not contain this rank.
    """
    if process_group is None:
        return
    if dist.is_available() and process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group does not contain this rank. Pass each rank a group that contains it."
        )
    if not isinstance(process_group, (ProcessGroup, DeviceMesh)):
        raise TypeError(
            "process_group must be a ProcessGroup, a DeviceMesh or None (the default group), not "
            f"{type(process_group).__name__}"
        )
    if isinstance(process_group, DeviceMesh) and process_group.get_coordinate() is None:
        raise ValueError(
            f"process_group is {process_group}, which does not contain rank {dist.get_rank()}"
        )


def resolve_process_group(group: GroupLike, owner: str | None = None) -> ProcessGroup | None:
    """Return the process group of ``group``; None if torch.distributed is not initialised.

    A mesh stands for all its dimensions as one group. A mesh as large as the default group is that
    group. A smaller mesh of several dimensions needs a new group, which its members create.

    Args:
        group: The group as the user passed it.
        owner: As in `MessageGroup`.

    Raises:
        CallOrderError: The group was destroyed.
    """
    world: Any = dist.group.WORLD if _IS_AVAILABLE else None
    if group is None:
        return world  # type: ignore[no-any-return]
    if world is None:
        raise CallOrderError(_destroyed_text(owner))
    if isinstance(group, ProcessGroup):
        try:
            dist.get_rank(group)  # Unlike get_world_size, this refuses a destroyed group.
        except (ValueError, RuntimeError) as error:
            raise CallOrderError(f"{_destroyed_text(owner)} ({error})") from None
        return group
    if group.ndim == 1:
        return group.get_group()
    if group.size() == dist.get_world_size():
        return world  # type: ignore[no-any-return]
    ranks = sorted(int(rank) for rank in group.mesh.flatten())
    new_group: ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return new_group


def _destroyed_text(owner: str | None) -> str:
    if owner is None:
        return (
            "The group that was passed as process_group= was destroyed. Pass the new group (None "
            "is the default group)."
        )
    return (
        f"The process group of this {owner} was destroyed. Set {owner}.process_group to the new "
        "group (None is the default group)."
    )


def _message_device(process_group: ProcessGroup, scale_device: torch.device) -> torch.device:
    config = dist.get_backend_config(process_group)
    backends = dict(entry.split(":") for entry in config.split(",") if ":" in entry)
    if scale_device.type in backends or not backends:
        return scale_device
    if "cpu" in backends:
        return torch.device("cpu")
    return torch.device(next(iter(backends)), torch.accelerator.current_device_index())


def call_collective(group: MessageGroup, collective: Callable[..., object], *args: Any) -> None:
    """Call a collective; if it fails, raise an error with the likely causes.

    Raises:
        RankMismatchError: The collective failed.
    """
    try:
        collective(*args)
    except RuntimeError as error:
        call = "the same call" if group.owner is None else f"the same call of its {group.owner}"
        disabled = ", or its scaler is disabled" if group.owner == "scaler" else ""
        raise RankMismatchError(
            f"Rank {group.global_rank} lost its peers. A rank died, or it did not make {call} "
            f"within the group's timeout{disabled}. If only some ranks train, make a group of "
            f"those ranks and pass it as process_group=. ({error})"
        ) from error


def all_gather_rows(group: MessageGroup, row: Tensor) -> Tensor:
    """Return the float64 row of every rank, of shape (ranks, values), on the device of ``row``.

    Collective: every rank of ``group`` must call this.
    """
    sent = device_utils.to_device(row, group.device)
    shape = group.size, row.numel()
    gathered = torch.empty(shape, dtype=torch.float64, device=group.device)
    call_collective(group, _all_gather, gathered.view(-1), sent, group.process_group)
    return device_utils.to_device(gathered, row.device)
