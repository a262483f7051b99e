"""What one thread has entered: its autocast regions, and the op lists it follows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

__all__ = ["ThreadState", "local", "never_compiled"]

_F = TypeVar("_F", bound=Callable[..., Any])

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)

# A region that was entered, and what it found: enabled, dtype, cache_enabled, the lists if it has
# some, and whether it is part of an export.
_Region = tuple[Any, bool, torch.dtype, bool, Any, bool]


class ThreadState(threading.local):
    """What one thread has entered.

    Attributes:
        regions: The regions, outermost first, and what each found.
        lists: The op lists in force, at most one for each device type; () where torch's own are.
        rules: What these lists say of each op: its name and the device type to a category.
    """

    def __init__(self) -> None:
        self.regions: list[_Region] = []
        self.lists: tuple[tuple[str, Any], ...] = ()
        self.rules: Mapping[tuple[str, str], Any] = {}


local = ThreadState()


def never_compiled(fn: _F) -> _F:
    """Keep torch.compile from compiling a function by itself, where a graph breaks around it.

    ``torch.compiler.disable`` does as much, loads the compiler for it, and costs more at each call.
    """
    code: Any = fn
    eval_frame.set_code_exec_strategy(code.__code__, _SKIP)
    return fn
