"""ModelAdapter: the facts about a wrapped model that `register_comm_hook` needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed import ProcessGroup

from distamp.comm_hooks.formats import COMM_FORMATS, CommFormat
from distamp.comm_hooks.hook import CommHook
from distamp.comm_hooks.topology import Topology

__all__ = ["ModelAdapter", "TopologyByGroup"]

TopologyByGroup: TypeAlias = Mapping[ProcessGroup, Topology]


@dataclass(frozen=True)
class ModelAdapter:
    """A wrapped model, and the way to install a hook in it.

    Attributes:
        shard_groups: The ranks over which gradients are reduce-scattered.
        replicate_groups: The ranks over which gradients, or shards of them, are averaged.
        dtype: The dtype in which most gradients are reduced. Gradients of another dtype are sent
            uncompressed if they do not fit.
        devices: The devices of the gradients.
        description: The model in words.
        install: Fills torch's hook points, given a hook, the format of gathered weights and the
            topology of each group. torch's DDP and FSDP1 raise if they have a hook.
        has_error_feedback: Whether the wrapper reduces the same buckets at every step.
        refusal: The reason for which the model takes no hook, or not these options.
    """

    shard_groups: Sequence[ProcessGroup]
    replicate_groups: Sequence[ProcessGroup]
    dtype: torch.dtype
    devices: Sequence[torch.device]
    description: str
    install: Callable[[CommHook, CommFormat | None, TopologyByGroup], None]
    has_error_feedback: bool = True
    refusal: str | None = None

    @property
    def groups(self) -> list[ProcessGroup]:
        """The groups of all collectives."""
        return [*self.shard_groups, *self.replicate_groups]

    def supports(self, format: CommFormat) -> bool:
        """Return whether the wrapper can use a format, if gradients are wide enough."""
        return self.has_error_feedback or not format.needs_error_feedback

    def usable_formats(self) -> list[str]:
        """Return the names of the formats in which gradients take fewer bytes."""
        names = []
        for name, format in COMM_FORMATS.items():
            if self.supports(format) and format.fits(self.dtype):
                names.append(name)
        return names
