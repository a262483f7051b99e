"""What `register` needs to know of a wrapped model; each wrapper's adapter makes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from distamp.comm_hooks.formats import WIRE_FORMATS, WireFormat
from distamp.comm_hooks.state import CommHookState

__all__ = ["Wrapped"]


@dataclass(frozen=True)
class Wrapped:
    """A wrapped model, and how it takes a hook.

    Args:
        groups: The ranks that must agree, in the order in which they do.
        shards: Over which gradients are reduce-scattered; none under DDP.
        replicas: Over which they, or shards of them, are averaged.
        feedback: Whether gradients come in the same buckets at every step.
        gathers: Whether weights are gathered by a collective that can be another's.
        dtypes: In which they are reduced; first the one of most, which a format must fit. What it
            does not fit is reduced as it is.
        devices: Where they lie.
        numel: How many are exchanged together, where most are.
        what: The model in words.
        refused: Why it takes no hook.
        attach: Fills torch's hook points, given a state, whether it compresses, and the format in
            which weights are gathered.
        attach_torchs: Registers torch's own bf16 hook, where there is one.
    """

    groups: Sequence[ProcessGroup]
    shards: Sequence[ProcessGroup]
    replicas: ProcessGroup | None
    feedback: bool
    gathers: bool
    dtypes: Sequence[torch.dtype]
    devices: Sequence[torch.device]
    numel: int
    what: str
    refused: str | None
    attach: Callable[[CommHookState, bool, WireFormat | None], None]
    attach_torchs: Callable[[], None] | None = None

    @property
    def over(self) -> list[ProcessGroup]:
        """All groups that gradients are exchanged over; torch knows the first."""
        return [*self.shards, *([] if self.replicas is None else [self.replicas])]

    def formats(self) -> list[str]:
        """Return the names of the formats that fit."""
        return [
            name
            for name, wire in WIRE_FORMATS.items()
            if wire.fits(self.dtypes[0]) and wire.needs_error_feedback <= self.feedback
        ]
