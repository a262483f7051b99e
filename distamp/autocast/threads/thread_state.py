"""What one thread has entered: its autocast regions, and the op lists it follows."""

from __future__ import annotations

import threading
from typing import Any

import torch

__all__ = ["ThreadState", "local"]

# A region that was entered; what it found: enabled, dtype, cache_enabled and, if it has lists,
# ThreadState.lists; and whether it is part of an export.
_Region = tuple[Any, bool, torch.dtype, bool, Any, bool]


class ThreadState:
    """What one thread has entered.

    Attributes:
        regions: The regions, outermost first, and what each found.
        lists: The op lists in force, whether gradients were recorded when they were entered, and
            the saved tensor hooks then; None where torch's own lists are.
        entries: The rules of those lists, for their kernels; empty where there are none.
        weights: Casts of weights that the kernels keep until the lists change.
    """

    __slots__ = ("entries", "lists", "regions", "weights")

    def __init__(self) -> None:
        self.regions: list[_Region] = []
        self.lists: tuple[Any, bool, Any] | None = None
        self.entries: dict[int, Any] = {}
        self.weights: dict[int, Any] = {}


class _Local(threading.local):
    """One object for each thread, as each attribute of a threading.local costs a look-up."""

    def __init__(self) -> None:
        self.state = ThreadState()


local = _Local()
