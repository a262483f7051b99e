"""Compare format and model among the ranks that register a hook, before anything is sent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distamp.comm_hooks.choice import AUTO
from distamp.comm_hooks.headers import compare
from distamp.comm_hooks.wire import WIRE_FORMATS

__all__ = ["agree"]

# A format that is yet to be chosen is not sent in, but agreed on.
_FORMATS = (*WIRE_FORMATS, AUTO)


def agree(name: str, numel: int, group: ProcessGroup, device: torch.device) -> None:
    """Compare format and model with all ranks of the group. Collective.

    Args:
        name: The format on the way, or ``"auto"``.
        numel: How many elements this rank's model has.
        group: The ranks.
        device: One that the group can send from.

    Raises:
        LockstepError: a rank has another format or model; on all ranks.
    """
    if group.size() == 1:
        return
    mine = torch.tensor([_FORMATS.index(name), numel], device=device)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(rows, mine, group=group)
    compare(
        torch.stack(rows).tolist(),
        dist.get_process_group_ranks(group),
        lambda row: f"{_FORMATS[row[0]]} for {row[1]} elements",
        "register different hooks",
        "Give every rank the same format and model",
    )
