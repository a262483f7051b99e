"""What `register_comm_hook` needs to know of a wrapped model; each wrapper's adapter makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed import ProcessGroup

from distamp.comm_hooks.formats import COMM_FORMATS, CommFormat
from distamp.comm_hooks.hosts import Hosts
from distamp.comm_hooks.state import CommHook

__all__ = ["Tables", "Wrapped"]

# Which ranks of a group are on which hosts.
Tables: TypeAlias = Mapping[ProcessGroup, Hosts]


@dataclass(frozen=True)
class Wrapped:
    """A wrapped model, and how it takes a hook.

    Args:
        shards: The ranks that gradients are reduce-scattered over.
        replicas: Those that they, or shards of them, are averaged over.
        formats: Names of the formats that it takes, if gradients are wide enough.
        dtype: In which most gradients are reduced. Others, if they do not fit, go as they are.
        devices: Where they lie.
        what: The model in words.
        attach: Fills torch's hook points, given a state, the format in which weights are gathered,
            and where ranks are. Where one is taken, torch's DDP and FSDP1 raise.
        refused: Why it takes no hook, or not these options.
    """

    shards: Sequence[ProcessGroup]
    replicas: Sequence[ProcessGroup]
    formats: Sequence[str]
    dtype: torch.dtype
    devices: Sequence[torch.device]
    what: str
    attach: Callable[[CommHook, CommFormat | None, Tables], None]
    refused: str | None = None

    @property
    def over(self) -> list[ProcessGroup]:
        """All these."""
        return [*self.shards, *self.replicas]

    def fitting(self) -> list[str]:
        """Return the names of the formats in which gradients are fewer bytes."""
        return [name for name in self.formats if COMM_FORMATS[name].fits(self.dtype)]
