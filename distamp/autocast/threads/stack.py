"""The autocast regions each thread is in, and what leaving them puts back."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from distamp.errors import RegionError

__all__ = [
    "Entered",
    "Extras",
    "Here",
    "enter_extras",
    "leave_extras",
    "leave_out_of_order",
    "thread",
]


class Extras(NamedTuple):
    """What a region uses beyond torch's own state."""

    has_ops: bool
    found_ops: Any
    step_cache: bool


class Entered(NamedTuple):
    """One entered region and what it found; the hot path makes the same as a plain tuple."""

    region: Any
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool
    extras: Extras | None


class Here:
    """What one thread is in.

    Attributes:
        stack: The regions, outermost first, each as an :class:`Entered`.
        step_regions: How many of them cache by the step.
        op_lists: The op lists in force, for ``op_lists.current()``; None is torch's own.
    """

    __slots__ = ("op_lists", "stack", "step_regions")

    def __init__(self) -> None:
        self.stack: list[tuple[Any, bool, torch.dtype, bool, Extras | None]] = []
        self.step_regions = 0
        self.op_lists: Any = None


class _Thread(threading.local):
    """One object for each thread, as each attribute of a threading.local costs a look-up."""

    def __init__(self) -> None:
        self.here = Here()


thread = _Thread()


@functools.cache
def _not_compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(fn)
    return disabled


def enter_extras(ops: Any, device_type: str, step_cache: bool) -> Extras:
    """Put a region's op lists and step cache in force in this thread."""
    # Under torch.compile's fallback to Python each call is compiled by itself; this one cannot be.
    # Where torch.compile was never loaded it is not loaded for this.
    if "torch._dynamo" in sys.modules:
        entered: Extras = _not_compiled(_enter_extras)(ops, device_type, step_cache)
        return entered
    return _enter_extras(ops, device_type, step_cache)


def leave_extras(extras: Extras) -> None:
    """Undo :func:`enter_extras`."""
    if "torch._dynamo" in sys.modules:
        _not_compiled(_leave_extras)(extras)
    else:
        _leave_extras(extras)


def _enter_extras(ops: Any, device_type: str, step_cache: bool) -> Extras:
    found_ops = None
    if ops is not None:
        from distamp.autocast import op_lists

        found_ops = op_lists.push(ops, device_type)
    if step_cache:
        from distamp.autocast import cache

        here = thread.here
        if here.step_regions == 0:
            cache.push_mode()
        here.step_regions += 1
    return Extras(ops is not None, found_ops, step_cache)


def _leave_extras(extras: Extras) -> None:
    if extras.step_cache:
        from distamp.autocast import cache

        here = thread.here
        here.step_regions -= 1
        if here.step_regions == 0:
            cache.pop_mode()
    if extras.has_ops:
        from distamp.autocast import op_lists

        op_lists.pop(extras.found_ops)


def leave_out_of_order(region: Any) -> None:
    """Leave a region that is not this thread's innermost one, and say so.

    The regions entered after it keep what they set; what this one found goes to the next one above
    it, so that leaving that one restores what leaving this one would have.

    Raises:
        RegionError: Always; where the region is this thread's, once the state is right.
    """
    stack = thread.here.stack
    at = next((i for i in reversed(range(len(stack))) if stack[i][0] is region), None)
    if at is None:
        raise RegionError(
            f"autocast({region.device!r}) is left in a thread, or under an applied state, that did "
            "not enter it. A region ends where it began; to run a function elsewhere under this "
            "state use distamp.autocast's propagate(fn)."
        )
    found = Entered(*stack.pop(at))
    rest = [Entered(*entry) for entry in stack[at:]]
    torch.autocast_decrement_nesting()
    heir = next((i for i, entry in enumerate(rest) if entry.region.device == region.device), None)
    if heir is None:
        torch.set_autocast_enabled(region.device, found.enabled)
        torch.set_autocast_dtype(region.device, found.dtype)
    else:
        rest[heir] = rest[heir]._replace(enabled=found.enabled, dtype=found.dtype)
    rest[0] = rest[0]._replace(cache_enabled=found.cache_enabled)
    if found.extras is not None:
        _bequeath_extras(found.extras, rest)
    stack[at:] = rest
    raise RegionError(
        f"autocast({region.device!r}) is left while autocast({rest[0].region.device!r}), entered "
        "after it, is still open. The state has been put right; leave regions in the reverse "
        "order of entering them, as nested with statements and an ExitStack do."
    )


def _bequeath_extras(extras: Extras, rest: list[Entered]) -> None:
    """Hand the op lists a region found to the next region with lists; undo them where none is."""
    for i, entry in enumerate(rest):
        if extras.has_ops and entry.extras is not None and entry.extras.has_ops:
            heir = entry.extras._replace(found_ops=extras.found_ops)
            rest[i] = entry._replace(extras=heir)
            extras = extras._replace(has_ops=False)
    leave_extras(extras)
