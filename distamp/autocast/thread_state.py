"""The autocast contexts and op lists that one thread has entered."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

__all__ = ["ActiveRegion", "ThreadState", "local"]


class ActiveRegion(NamedTuple):
    """One entry of a region by this thread.

    Attributes:
        region: The `autocast` object, which may be entered several times.
        torch_region: The `torch.autocast` object of this entry, which restores torch's state.
        clears_cache: Whether leaving it clears torch's cache of cast weights.
        outer_lists: The op lists and the checkpoint id to restore; None if it changed neither.
        changed_setting: Whether it changed torch's setting of compiled backward passes.
    """

    region: Any
    torch_region: torch.autocast
    clears_cache: bool
    outer_lists: tuple[Any, int | None] | None
    changed_setting: bool


class ThreadState(threading.local):
    """The entries of one thread.

    Attributes:
        regions: The regions, outermost first.
        applied_states: How to undo each `AutocastState` that is applied, outermost first.
        lists: The op lists that the thread follows, by device type.
        lists_mark: The mark of these lists; see `op_kernels.py`.
        lists_checkpoint_id: The reentrant checkpoint in which these lists were entered; see
            `reentrant_checkpoint_id`.
    """

    def __init__(self) -> None:
        self.regions: list[ActiveRegion] = []
        self.applied_states: list[ExitStack] = []
        self.lists: tuple[Any, ...] = ()
        self.lists_mark: tuple[torch.dtype, ...] | None = None
        self.lists_checkpoint_id: int | None = None


local = ThreadState()
