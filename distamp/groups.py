"""Over which ranks something is agreed on, and where its messages lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distamp import host
from distamp.errors import CallOrderError, RankMismatchError

__all__ = ["Group", "GroupLike", "check_group", "gather_sums", "reach", "resolve"]

GroupLike: TypeAlias = "ProcessGroup | DeviceMesh | None"

_AVAILABLE = dist.is_available()
# By torch's newer name where there is, which does not warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group:
    """A process group, this rank's place in it, and the device its messages lie on.

    Args:
        process_group: The group every message of the scaler goes through.
        preferred: The device of the loss scale; used where the group's backend can read it.
        owner: The noun for the object that sends, in errors: "guard" or "scaler". None for a call
            without such an object.
    """

    def __init__(
        self, process_group: ProcessGroup, preferred: torch.device, owner: str | None = None
    ) -> None:
        self.process_group = process_group
        self.owner = owner
        self.preferred = preferred
        self.size = dist.get_world_size(process_group)
        self.global_ranks = dist.get_process_group_ranks(process_group)
        #: This rank's number in the default group, the one people know it by.
        self.global_rank = self.global_ranks[dist.get_rank(process_group)]
        self.device = _message_device(process_group, preferred)
        self.on_host = host.is_host(self.device)


def check_group(process_group: object) -> None:
    """Refuse what can never be a group this rank sends through.

    Raises:
        TypeError: Neither a ProcessGroup, a DeviceMesh nor None.
        ValueError: A group that this rank is no member of.
    """
    if process_group is None:
        return
    if dist.is_available() and process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group does not contain this rank; give each rank the group it belongs to"
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


def resolve(given: GroupLike, owner: str | None = None) -> ProcessGroup | None:
    """Return the group to send through now; None where torch.distributed is not initialised.

    A mesh stands for all its dimensions as one group. A mesh as large as the default group is that
    group; only a smaller mesh of several dimensions needs a group of its own, made by its members.

    Args:
        given: The group as the user passed it.
        owner: As in `Group`.

    Raises:
        CallOrderError: An explicit group was destroyed.
    """
    world: Any = dist.group.WORLD if _AVAILABLE else None
    if given is None:
        return world  # type: ignore[no-any-return]
    if world is None:
        raise CallOrderError(_destroyed_text(owner))
    if isinstance(given, ProcessGroup):
        try:
            dist.get_rank(given)  # unlike get_world_size, refuses a group that is gone
        except (ValueError, RuntimeError) as error:
            raise CallOrderError(f"{_destroyed_text(owner)} ({error})") from None
        return given
    if given.ndim == 1:
        return given.get_group()
    if given.size() == dist.get_world_size():
        return world  # type: ignore[no-any-return]
    ranks = sorted(int(rank) for rank in given.mesh.flatten())
    group: ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return group


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


def _message_device(process_group: ProcessGroup, preferred: torch.device) -> torch.device:
    config = dist.get_backend_config(process_group)
    backends = dict(entry.split(":") for entry in config.split(",") if ":" in entry)
    if preferred.type in backends or not backends:
        return preferred
    if "cpu" in backends:
        return torch.device("cpu")
    return torch.device(next(iter(backends)), torch.accelerator.current_device_index())


def reach(group: Group, collective: Callable[..., object], *given: Any) -> None:
    """Call a collective; if it fails, raise an error that has the likely causes."""
    try:
        collective(*given)
    except RuntimeError as error:
        call = "the same call" if group.owner is None else f"the same call of its {group.owner}"
        disabled = ", or its scaler is disabled" if group.owner == "scaler" else ""
        raise RankMismatchError(
            f"Rank {group.global_rank} lost its peers. A rank died, or it did not make {call} "
            f"within the group's timeout{disabled}. If only some ranks train, make a group of "
            f"those ranks and pass it as process_group=. ({error})"
        ) from error


def gather_sums(group: Group, sums: Tensor) -> Tensor:
    """Return every rank's float64, of shape (ranks, sums), on the device of ``sums``."""
    mine = host.moved(sums, group.device)
    shape = group.size, sums.numel()
    everyone = torch.empty(shape, dtype=torch.float64, device=group.device)
    reach(group, _all_gather, everyone.view(-1), mine, group.process_group)
    return host.moved(everyone, sums.device)
