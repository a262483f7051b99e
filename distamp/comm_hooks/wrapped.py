"""What `register` needs to know of a wrapped model; each wrapper's adapter makes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.formats import WIRE_FORMATS, WireFormat
from distamp.comm_hooks.state import CommHookState, fits

__all__ = ["Sample", "Wrapped", "ranks_of"]


@dataclass(frozen=True)
class Sample:
    """What is exchanged together where most is: so many gradients, of a dtype, on a device."""

    numel: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Wrapped:
    """A wrapped model, and how it takes a hook.

    Args:
        groups: The ranks that must agree, in the order in which they do.
        ranks: Those that the model is on.
        shards: Over which gradients are reduce-scattered; none under DDP.
        replicas: Over which they, or shards of them, are averaged.
        feedback: Whether gradients come in the same buckets at every step, as DDP's do.
        dtypes: In which they are reduced.
        devices: Where they lie.
        sample: What `auto` is to send.
        what: The model in words.
        refused: Why it takes no hook.
        attach: Fills torch's hook points, given a state and whether it compresses.
    """

    groups: Sequence[ProcessGroup]
    ranks: Sequence[int]
    shards: Sequence[ProcessGroup]
    replicas: ProcessGroup | None
    feedback: bool
    dtypes: Sequence[torch.dtype]
    devices: Sequence[torch.device]
    sample: Sample
    what: str
    refused: str | None
    attach: Callable[[CommHookState, bool], None]

    @property
    def over(self) -> list[ProcessGroup]:
        """All groups that gradients are exchanged over; torch knows the first."""
        return [*self.shards, *([] if self.replicas is None else [self.replicas])]

    def check(
        self,
        wire: WireFormat | None,
        process_group: ProcessGroup | None,
        ranks_per_host: int | None,
    ) -> None:
        """Refuse what cannot be registered.

        Raises:
            ValueError: The model takes no hook, is on other ranks, these are not so many hosts, or
                the format does not fit.
        """
        for group in self.groups if ranks_per_host is not None else ():
            if ranks_per_host < 1 or group.size() % ranks_per_host:  # type: ignore[operator]
                raise ValueError(
                    f"ranks_per_host is {ranks_per_host}, and a group has {group.size()} ranks: "
                    "give a number that divides it, or leave it out"
                )
        how = "replicated" if self.feedback else "sharded"
        if process_group is not None and ranks_of(process_group) != self.ranks:
            raise ValueError(
                f"process_group holds ranks {ranks_of(process_group)}, but the model is {how} over "
                f"ranks {self.ranks}; leave process_group out to use the model's own"
            )
        if self.refused is not None:
            raise ValueError(self.refused)
        if wire is None:
            return
        allowed = self.formats()
        if wire.needs_error_feedback > self.feedback:
            raise ValueError(
                f"{wire.name} needs error feedback, which sharded gradients have not: use "
                f"DistributedDataParallel, or one of {', '.join(allowed)}"
            )
        for dtype in self.dtypes:
            if not fits(wire, dtype):
                raise ValueError(
                    f"format {wire.name!r} takes {wire.block_bytes / 256:.3g} bytes an element, "
                    f"and gradients are reduced in {dtype}, which takes {dtype.itemsize}: choose "
                    f"{', '.join(map(repr, allowed))} or no hook, or reduce in torch.float32"
                )

    def formats(self) -> list[str]:
        """Return the names of the formats that fit."""
        return [
            name
            for name, wire in WIRE_FORMATS.items()
            if all(fits(wire, dtype) for dtype in self.dtypes)
            and wire.needs_error_feedback <= self.feedback
        ]


def ranks_of(group: ProcessGroup) -> list[int]:
    """Return the ranks of a group; none of one that was destroyed."""
    return [] if torch_compat.is_destroyed(group) else dist.get_process_group_ranks(group)
