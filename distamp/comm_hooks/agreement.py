"""Compare format and model among the ranks that register a hook, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.choice import AUTO
from distamp.comm_hooks.headers import compare
from distamp.comm_hooks.wire import WIRE_FORMATS
from distamp.errors import LockstepError

__all__ = ["agree", "refuse"]

# A format that is yet to be chosen is not sent in, but agreed on.
_FORMATS = (*WIRE_FORMATS, AUTO)
_REFUSED = (-1, 0)


def agree(name: str, numels: Mapping[ProcessGroup, int]) -> None:
    """Compare format and model with all ranks of some groups. Collective.

    Args:
        name: The format on the way, or ``"auto"``.
        numels: The groups, and how many elements of this rank's model each exchanges.

    Raises:
        LockstepError: a rank has another format or model, or refused what it was given; on all
            ranks.
    """
    failure: LockstepError | None = None
    for group, numel in numels.items():
        if failure is not None:
            refuse([group])
            continue
        try:
            compare(
                _gathered((_FORMATS.index(name), numel), group),
                dist.get_process_group_ranks(group),
                _text,
                "register different hooks",
                "Give every rank the same format and model",
            )
        except LockstepError as error:
            failure = error
    if failure is not None:
        raise failure


def refuse(groups: Iterable[ProcessGroup]) -> None:
    """Let the other ranks, which wait in `agree`, know that this one refuses; in their order."""
    for group in groups:
        _gathered(_REFUSED, group)


def _gathered(row: Sequence[int], group: ProcessGroup) -> list[list[int]]:
    if group.size() == 1:
        return [list(row)]
    mine = torch.tensor(row, device=torch_compat.device_of(group))
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(rows, mine, group=group)
    found: list[list[int]] = torch.stack(rows).tolist()
    return found


def _text(row: Sequence[int]) -> str:
    if tuple(row) == _REFUSED:
        return "none, because it raised another error"
    return f"{_FORMATS[row[0]]} for {row[1]} elements"
