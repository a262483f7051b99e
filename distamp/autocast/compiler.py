"""Where torch.compile must leave our functions alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["never_compiled", "never_followed"]

_F = TypeVar("_F", bound=Callable[..., Any])

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def never_compiled(fn: _F) -> _F:
    """Keep torch.compile from compiling a function by itself, where a graph breaks around it.

    ``torch.compiler.disable`` does as much, loads the compiler for it, and costs more at each call.
    """
    code: Any = fn
    eval_frame.set_code_exec_strategy(code.__code__, _SKIP)
    return fn


def never_followed(fn: _F) -> _F:
    """Keep torch.compile from following calls of a function too: a graph breaks before it.

    torch 2.14 warns of what it met in a function where a graph breaks inside.
    """
    code: Any = never_compiled(fn)
    code._torchdynamo_disable = True
    return fn
