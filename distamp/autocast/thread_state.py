"""What one thread has entered: its autocast regions, and the mark of the op lists it follows."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.utils.checkpoint import CheckpointFunction

__all__ = [
    "MARKS",
    "Mark",
    "ThreadState",
    "local",
    "mark",
    "never_compiled",
    "reentrant_checkpoint",
]

_F = TypeVar("_F", bound=Callable[..., Any])

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


# A region that was entered, the region of torch's class for this time, which knows what it found,
# whether the cache has casts of another dtype inside, the op lists it found, if it has some, and
# whether it changed torch's setting of compiled backward passes.
_Entered = tuple[Any, Any, bool, Any, bool]


class ThreadState(threading.local):
    """What one thread has entered.

    Attributes:
        regions: The regions, outermost first.
        applied: For each state that is applied, outermost first, how to undo that.
        listed_in: In which reentrant checkpoint the op lists in force were entered; see
            `reentrant_checkpoint`.
    """

    def __init__(self) -> None:
        self.regions: list[_Entered] = []
        self.applied: list[ExitStack] = []
        self.listed_in: int | None = None


local = ThreadState()

#: Device types that nothing computes on, whose autocast dtypes are the mark of op lists, and these
#: dtypes in a new thread.
MARKS = (("ipu", torch.float16), ("maia", torch.bfloat16))
_HIGH, _LOW = (device_type for device_type, _ in MARKS)
Mark = tuple[torch.dtype, ...]


def mark() -> Mark | None:
    """Return the mark of the op lists that this thread follows; None where it follows torch's.

    It is torch's own state of a thread: torch.compile guards on it, and in a backward pass the
    thread of a device has that of the thread which called ``backward()``.
    """
    if not torch.is_autocast_enabled(_HIGH):
        return None
    return torch.get_autocast_dtype(_HIGH), torch.get_autocast_dtype(_LOW)


def reentrant_checkpoint() -> int | None:
    """Return which call of torch's reentrant checkpoint this thread runs in; None outside.

    It recomputes with nothing but torch's own state, so op lists that were entered outside of it
    are not in force then.
    """
    if torch.is_grad_enabled():  # it runs its function without
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return None if frame is None else id(frame)


def never_compiled(fn: _F) -> _F:
    """Keep torch.compile from compiling a function by itself, where a graph breaks around it.

    ``torch.compiler.disable`` does as much, loads the compiler for it, and costs more at each call.
    """
    code: Any = fn
    eval_frame.set_code_exec_strategy(code.__code__, _SKIP)
    return fn
