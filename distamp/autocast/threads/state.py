"""The whole autocast state of a thread as a value, and how other threads get it.

Autocast's state is a thread's own: what another thread runs, it runs in fp32, or in a dtype of its
own, whatever region its caller is in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from distamp.autocast import op_lists
from distamp.autocast.compiler import never_compiled, never_followed
from distamp.autocast.op_lists.kernels import key_of_lists
from distamp.autocast.threads import suspension
from distamp.autocast.threads.thread_state import local
from distamp.errors import RegionError

__all__ = ["AutocastState", "propagate"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

# (device type, enabled, dtype) for each device type.
_Devices = tuple[tuple[str, bool, torch.dtype], ...]


@functools.cache
def _device_types(privateuse1: str) -> tuple[str, ...]:
    """The device types this torch has autocast for; the renameable one once it has a name."""
    supported: list[str] = torch._C._autocast_supported_devices()
    return tuple(each for each in supported if each != "privateuseone" or each != privateuse1)


@dataclass(frozen=True)
class AutocastState:
    """What autocast does in a thread: a value to be taken in one thread and applied in another.

    torch has no such thing; its ``parallel_apply`` carries over one device type's on or off.
    Hashable, and can be pickled.

    Attributes:
        devices: For each device type that this torch has autocast for: its name, whether autocast
            is enabled, and the dtype of lower precision ops.
        cache_enabled: Whether casts of weights are kept until the outermost region ends.
        lists: The op lists in force, as ``op_lists.current()`` gives them; None is torch's own.
    """

    devices: _Devices
    cache_enabled: bool
    lists: op_lists.ListsInForce | None = None

    @classmethod
    @never_compiled
    def capture(cls) -> AutocastState:
        """Take the calling thread's state."""
        names = _device_types(torch._C._get_privateuse1_backend_name())
        devices = tuple(
            [
                (each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
                for each in names
            ]
        )
        lists = op_lists.current()
        if lists is not None:
            # Two device types only show torch.compile the lists.
            unused = dict(key_of_lists().unused_devices)
            devices = tuple(
                (name, False, unused[name]) if name in unused else (name, enabled, dtype)
                for name, enabled, dtype in devices
            )
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
        return _Applied(self)

    def __reduce__(self) -> tuple[Any, ...]:
        lists = () if self.lists is None else self.lists.lists
        return _unpickle, (self.devices, self.cache_enabled, lists)


def _unpickle(
    devices: _Devices, cache_enabled: bool, lists: tuple[tuple[str, op_lists.OpLists], ...]
) -> AutocastState:
    found = op_lists.enter(None)
    try:
        for device_type, ops in lists:
            op_lists.push(ops, device_type)
        return AutocastState(devices, cache_enabled, op_lists.current())
    finally:
        op_lists.restore(found)


def _set(now: AutocastState, to: AutocastState) -> bool:
    """Set torch's settings of the calling thread; tell whether a device type's changed."""
    if now.cache_enabled is not to.cache_enabled:
        torch.set_autocast_cache_enabled(to.cache_enabled)
    changes = set(to.devices).difference(now.devices)
    for name, enabled, dtype in changes:
        torch.set_autocast_enabled(name, enabled)
        torch.set_autocast_dtype(name, dtype)
    return bool(changes)


class _Applied:
    """One use of a state in one thread."""

    def __init__(self, state: AutocastState) -> None:
        self._state = state
        self._nesting = 0

    @never_followed
    def __enter__(self) -> AutocastState:
        if self._nesting:
            raise RegionError("an applied state was entered twice; call apply() for each use")
        thread = local.state
        self._found = AutocastState.capture()
        # A region of the block's own must end in the block, and none of the caller's can.
        self._regions, thread.regions = thread.regions, []
        self._lists = op_lists.enter(None)
        changed = _set(self._found, self._state)
        op_lists.enter(self._state.lists)
        self._nesting = torch.autocast_increment_nesting()
        if changed and self._nesting > 1:
            torch.clear_autocast_cache()
        return self._state

    @never_followed
    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        local.state.regions = self._regions
        op_lists.enter(None)
        changed = _set(AutocastState.capture(), self._found)
        op_lists.restore(self._lists)
        # More than one where the block left a region open.
        nesting = torch.autocast_decrement_nesting()
        while nesting >= self._nesting:
            nesting = torch.autocast_decrement_nesting()
        if changed or nesting == 0:
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
    kind = suspension.suspendable_kind(fn)
    if kind is not None:
        return suspension.wrap(bound.apply, fn, kind)
    return _Propagated(fn, bound)
