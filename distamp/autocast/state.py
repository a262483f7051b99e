"""The whole autocast state of a thread as a value, and how other threads get it.

Autocast's state is a thread's own: what another thread runs, it runs in fp32, or in a dtype of its
own, whatever region its caller is in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from distamp.autocast.op_lists import Lists, follow
from distamp.autocast.suspension import suspendable_kind, wrap
from distamp.autocast.thread_state import local, never_compiled

__all__ = ["AutocastState", "propagate"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class AutocastState:
    """What autocast does in a thread: a value to be taken in one thread and applied in another.

    torch has no such thing; its ``parallel_apply`` carries over one device type's on or off.
    Hashable, and can be pickled.

    Attributes:
        devices: For each device type that this torch has autocast for: its name, whether autocast
            is enabled, and the dtype of lower precision ops.
        cache_enabled: Whether casts of weights are kept until the outermost region ends.
        lists: The op lists in force, with the device type of each; () is torch's own.
    """

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool
    lists: Lists = ()

    @classmethod
    @never_compiled
    def capture(cls) -> AutocastState:
        """Take the calling thread's state."""
        lists = local.lists
        if lists:
            # What only shows torch.compile the lists is no state of its own.
            follow(())
        devices = tuple(
            (each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
            for each in _device_types()
        )
        if lists:
            follow(lists)
        return cls(devices, torch.is_autocast_cache_enabled(), lists)

    def apply(self) -> AbstractContextManager[AutocastState]:
        """Make a context manager that gives a thread this state, and then its own back.

        Its own comes back whatever the block did, regions it left open included. Each call makes
        a context manager for one use.
        """
        if is_dynamo_compiling():
            torch._dynamo.graph_break(
                "AutocastState.apply() cannot be used in a compiled function: a state is the "
                "thread's, not the graph's. Apply it around the call of the compiled function, or "
                "open autocast(...) regions inside."
            )
        return _applied(self)

    @never_compiled
    def set(self) -> None:
        """Give the calling thread this state for good; its open regions cannot end under it."""
        follow(())
        for name, enabled, dtype in self.devices:
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_cache_enabled(self.cache_enabled)
        follow(self.lists)


def _device_types() -> tuple[str, ...]:
    """The device types this torch has autocast for; the renameable one once it has a name."""
    supported: list[str] = torch._C._autocast_supported_devices()
    unnamed = torch._C._get_privateuse1_backend_name() == "privateuseone"
    return tuple(each for each in supported if not (unnamed and each == "privateuseone"))


@contextmanager
@never_compiled
def _applied(state: AutocastState) -> Iterator[AutocastState]:
    found = AutocastState.capture()
    # A region of the block's own must end in the block, and none of the caller's can.
    regions, local.regions = local.regions, []
    nesting = torch.autocast_increment_nesting()
    state.set()
    if nesting > 1:
        torch.clear_autocast_cache()
    try:
        yield state
    finally:
        local.regions = regions
        found.set()
        # More than once where the block left a region open.
        while torch.autocast_decrement_nesting() >= nesting:
            pass
        torch.clear_autocast_cache()


class _Propagated:
    """A callable that runs under the state it was made in. A class, so that it can be pickled."""

    def __init__(self, fn: Callable[..., Any], state: AutocastState) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.__wrapped__ = fn
        self.state = state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.state.apply():
            return self.__wrapped__(*args, **kwargs)


def propagate(fn: Callable[_P, _R], state: AutocastState | None = None) -> Callable[_P, _R]:
    """Bind a function to the calling thread's autocast state, for whatever thread runs it.

    For ``threading.Thread(target=propagate(fn))``, ``executor.submit(propagate(fn), x)``,
    ``asyncio.to_thread(propagate(fn), x)`` and the like. torch has no counterpart: a new thread
    computes in fp32. The thread's own state is put back after each call, whatever ``fn`` did.

    Args:
        fn: A function, or a generator or coroutine function: these are under the state while they
            run and not while they are suspended.
        state: The state to bind to; None captures the calling thread's, now.

    Returns:
        The bound function; it can be pickled where ``fn`` can, unless it is a generator or
        coroutine function.

    Raises:
        TypeError: ``fn`` is not callable.
    """
    if not callable(fn):
        raise TypeError(f"propagate needs a callable, got {type(fn).__name__}")
    bound = AutocastState.capture() if state is None else state
    kind = suspendable_kind(fn)
    if kind is not None:
        return wrap(bound.apply, fn, kind)
    return _Propagated(fn, bound)
