"""The whole autocast state of a thread as a value, and how other threads get it.

Autocast's state is a thread's own: what another thread runs, it runs in fp32, or in a dtype of its
own, whatever region its caller is in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import (
    autocast_decrement_nesting,
    autocast_increment_nesting,
    clear_autocast_cache,
    get_autocast_dtype,
    set_autocast_cache_enabled,
)
from torch._C._dynamo.guards import GlobalStateGuard

from distamp.autocast import cache, op_lists
from distamp.autocast.op_lists.kernels import CARRIER_DEVICE
from distamp.autocast.threads import suspension
from distamp.autocast.threads.stack import thread
from distamp.errors import RegionError

__all__ = ["AutocastState", "checkpoint_contexts", "propagate"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "ipu", "xla")

# (device type, enabled, dtype) for each device type.
_Devices = tuple[tuple[str, bool, torch.dtype], ...]
# (torch's setter, device type, value) for each setting in which two states differ.
_Changes = tuple[tuple[Callable[[str, Any], None], str, Any], ...]
_UNKNOWN: tuple[_Devices | None, _Changes] = (None, ())
_SETTERS: tuple[Callable[[str, Any], None], ...] = (
    torch.set_autocast_enabled,
    torch.set_autocast_dtype,
)


@functools.lru_cache
def _near_device_types() -> tuple[str, ...]:
    """The device types that tensors of this process are likely to be on."""
    accelerator = torch.accelerator.current_accelerator()
    here = () if accelerator is None else (accelerator.type,)
    return tuple(
        each
        for each in dict.fromkeys(("cpu", "cuda", *here))
        if torch.amp.is_autocast_available(each)
    )


@functools.lru_cache
def _device_types(renameable: str) -> tuple[str, ...]:
    """The device types this torch has autocast for, the near ones first."""
    # Until a backend takes its name, the renameable device type only carries the op lists.
    names = _DEVICE_TYPES + (renameable,) * (renameable != CARRIER_DEVICE)
    names = tuple(dict.fromkeys(_near_device_types() + names))
    return tuple(each for each in names if torch.amp.is_autocast_available(each))


@dataclass(frozen=True)
class AutocastState:
    """What autocast does in a thread: a value to be taken in one thread and applied in another.

    torch has no such thing; its ``parallel_apply`` carries over one device type's on or off.
    Hashable, and can be pickled.

    Attributes:
        devices: For each device type that this torch has autocast for: its name, whether autocast
            is enabled, and the dtype of lower precision ops.
        cache_enabled: Whether casts of weights are kept until the outermost region ends.
        step_cache: Whether they are kept across regions (``cache_enabled="step"``).
        lists: The op lists in force, as ``op_lists.current()`` gives them; None is torch's own.
    """

    devices: _Devices
    cache_enabled: bool
    step_cache: bool = False
    lists: Any = None

    @classmethod
    def capture(cls) -> AutocastState:
        """Take the calling thread's state."""
        state, here = _captured.find(), thread.here
        if here.op_lists is None and not here.step_regions:
            return state
        return cls(state.devices, state.cache_enabled, here.step_regions > 0, here.op_lists)

    def apply(self) -> AbstractContextManager[AutocastState]:
        """Make a context manager that gives a thread this state, and then its own back.

        Its own comes back whatever the block did, regions it left open included. Each call makes
        a context manager for one use.
        """
        return _Applied(self)

    @functools.cached_property
    def _plain(self) -> bool:
        """Whether the device types this machine has no tensors of are as in a new thread."""
        names = tuple(name for name, _, _ in self.devices)
        near = len(_near_device_types())
        return self.devices[near:] == _new_thread_devices(names)[near:]

    @functools.cached_property
    def _changes(self) -> dict[int, tuple[_Devices, _Changes]]:
        """What to set to come to this state from others, by the identity of their devices."""
        return {}

    @functools.cached_property
    def _entered(self) -> _Seen:
        """The states of threads that came to this one: what is read before."""
        return _entered_nearby if self._plain else _captured

    @functools.cached_property
    def _left(self) -> _Seen:
        """The states of threads that leave this one, mostly itself: what is read after."""
        return _Seen(nearby=self._plain)

    def __reduce__(self) -> tuple[Any, ...]:
        lists = () if self.lists is None else self.lists.lists
        return _unpickle, (self.devices, self.cache_enabled, self.step_cache, lists)


def _unpickle(
    devices: _Devices,
    cache_enabled: bool,
    step_cache: bool,
    lists: tuple[tuple[str, op_lists.OpLists], ...],
) -> AutocastState:
    before = op_lists.current()
    op_lists.restore(None)
    try:
        for device_type, ops in lists:
            op_lists.push(ops, device_type)
        return AutocastState(devices, cache_enabled, step_cache, op_lists.current())
    finally:
        op_lists.restore(before)


class _Known(NamedTuple):
    """A state that was read, and what it takes to see that a thread is in it.

    torch.compile's guard compares all settings in one call, but for the dtypes of disabled device
    types: those of one or two are read one by one, which is faster than all in a tuple.
    """

    guarded: Callable[[], bool]
    first: str
    first_dtype: torch.dtype
    second: str | None
    second_dtype: torch.dtype | None
    others: tuple[str, ...]
    other_dtypes: tuple[torch.dtype, ...]
    renameable: str | None
    state: AutocastState

    @classmethod
    def of(cls, state: AutocastState, renameable: str | None, nearby: bool) -> _Known:
        unseen = [(name, dtype) for name, enabled, dtype in state.devices if not enabled]
        if nearby:
            unseen = [each for each in unseen if each[0] in _near_device_types()]
        # With none to read, one is read all the same.
        (first, first_dtype), *rest = unseen or [(state.devices[0][0], state.devices[0][2])]
        second, second_dtype = rest[0] if rest else (None, None)
        others, dtypes = tuple(it[0] for it in rest[1:]), tuple(it[1] for it in rest[1:])
        guarded = GlobalStateGuard().check
        found = (guarded, first, first_dtype, second, second_dtype, others, dtypes)
        return cls(*found, None if nearby else renameable, state)


_renameable = torch._C._get_privateuse1_backend_name


class _Seen:
    """The last few states that were read at one place, found again without reading them.

    Args:
        nearby: Take the dtypes of disabled device types that are not near as a new thread's.
    """

    __slots__ = ("_known", "_nearby")

    def __init__(self, *, nearby: bool) -> None:
        self._known: tuple[_Known, ...] = ()
        self._nearby = nearby

    def find(self) -> AutocastState:
        """What torch holds of the calling thread's state."""
        for guarded, one, dtype, two, dtype2, others, dtypes, renameable, state in self._known:
            if (
                guarded()
                and get_autocast_dtype(one) is dtype
                and (two is None or get_autocast_dtype(two) is dtype2)
                and (not others or dtypes == tuple(map(get_autocast_dtype, others)))
                and (renameable is None or renameable == _renameable())
            ):
                return state
        return self._read_and_keep()

    def _read_and_keep(self) -> AutocastState:
        renameable = _renameable()
        state = _read(_device_types(renameable))
        if _guard_sees_autocast() and (state._plain or not self._nearby):
            self._known = (_Known.of(state, renameable, self._nearby), *self._known[:3])
        return state


_captured = _Seen(nearby=False)
_entered_nearby = _Seen(nearby=True)


def _read(names: tuple[str, ...]) -> AutocastState:
    devices = tuple(
        (each, torch.is_autocast_enabled(each), get_autocast_dtype(each)) for each in names
    )
    return _interned(devices, torch.is_autocast_cache_enabled())


@functools.lru_cache(maxsize=256)
def _interned(devices: _Devices, cache_enabled: bool) -> AutocastState:
    """One object for equal states, so that what is found out about one is kept with it."""
    return AutocastState(devices, cache_enabled)


@functools.lru_cache
def _new_thread_devices(names: tuple[str, ...]) -> _Devices:
    """What a thread starts with."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_read, names).result().devices


@functools.lru_cache
def _guard_sees_autocast() -> bool:
    """Whether this torch's guard notices a change of each setting; asked once."""
    guard = GlobalStateGuard()
    seen: list[bool] = []
    for each in ("cpu", "cuda"):
        dtype, enabled = torch.get_autocast_dtype(each), torch.is_autocast_enabled(each)
        torch.set_autocast_enabled(each, not enabled)
        seen.append(not guard.check())
        torch.set_autocast_enabled(each, True)
        enabled_guard = GlobalStateGuard()
        torch.set_autocast_dtype(each, torch.float64)
        seen.append(not enabled_guard.check())
        torch.set_autocast_dtype(each, dtype)
        torch.set_autocast_enabled(each, enabled)
    cache_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(not cache_enabled)
    seen.append(not guard.check())
    torch.set_autocast_cache_enabled(cache_enabled)
    return all(seen) and bool(guard.check())


def _differences(now: _Devices, to: _Devices) -> _Changes:
    return tuple(
        (setter, name, value)
        for (_, *before), (name, *after) in zip(now, to, strict=False)
        for setter, was, value in zip(_SETTERS, before, after, strict=True)
        if was is not value
    )


def _change(now: AutocastState, to: AutocastState) -> bool:
    """Set torch's settings of the calling thread; tell whether a device type's changed."""
    if now.cache_enabled is not to.cache_enabled:
        set_autocast_cache_enabled(to.cache_enabled)
    # States are few and each is entered from few, so what to set is found once for each pair.
    origin, changes = to._changes.get(id(now.devices), _UNKNOWN)
    if origin is not now.devices:
        changes = _differences(now.devices, to.devices)
        if len(to._changes) >= 16:
            to._changes.clear()
        to._changes[id(now.devices)] = now.devices, changes
    for setter, device_type, value in changes:
        setter(device_type, value)
    return bool(changes)


class _Applied:
    """One use of a state in one thread."""

    __slots__ = ("_found", "_kept", "_nesting", "_state")

    def __init__(self, state: AutocastState) -> None:
        self._state = state
        self._nesting = 0

    def __enter__(self) -> AutocastState:
        if self._nesting:
            raise RegionError("an applied state was entered twice; call apply() for each use")
        state, here = self._state, thread.here
        self._found = found = state._entered.find()
        steps = here.step_regions
        self._kept = here.stack, steps, here.op_lists
        # A region of the block's own must end in the block, and none of the caller's can.
        here.stack = []
        changed = found is not state and _change(found, state)
        if here.op_lists is not state.lists:
            op_lists.restore(state.lists)
        if steps or state.step_cache:
            here.step_regions = int(state.step_cache)
            if not steps:
                cache.push_mode()
        self._nesting = nesting = autocast_increment_nesting()
        if changed and nesting > 1:
            clear_autocast_cache()
        return state

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        state, found, here = self._state, self._found, thread.here
        here.stack, steps, lists = self._kept
        if steps or here.step_regions:
            if here.step_regions and not (steps and state.step_cache):
                cache.pop_mode()
            here.step_regions = steps
        if here.op_lists is not lists:
            op_lists.restore(lists)
        now = state._left.find()
        changed = now is not found and _change(now, found)
        # More than one where the block left a region open.
        nesting = autocast_decrement_nesting()
        while nesting >= self._nesting:
            nesting = autocast_decrement_nesting()
        if changed or nesting == 0:
            clear_autocast_cache()


class _Propagated:
    """A callable that runs under the state it was made in. A class, so that it can be pickled."""

    def __init__(self, fn: Callable[..., Any], state: AutocastState) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.__wrapped__ = fn
        self.state = state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Applied(self.state):
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


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Make ``torch.utils.checkpoint`` recompute under all of the forward pass's state.

    Use as ``checkpoint(fn, x, use_reentrant=False, context_fn=checkpoint_contexts)``. torch itself
    carries over the state of the CPU and of one device type, which is enough without ``ops=``
    and ``cache_enabled="step"``.
    """
    return nullcontext(), AutocastState.capture().apply()
