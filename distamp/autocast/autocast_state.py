"""`AutocastState`, the whole autocast state of a thread as a value.

Autocast's state belongs to a thread. A new thread computes in float32
also if its caller is in a region. A state carries the region to other threads
(`AutocastState.wrap`), to replicas (`DataParallel`) and to recomputation (`checkpoint`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ParamSpec, Self, TypeVar, overload

import torch
from torch.compiler import is_dynamo_compiling

from distamp.autocast.compiled_backward import restore_setting, switch_off_autocast
from distamp.autocast.generators import is_generator_like, wrap_generator_like
from distamp.autocast.op_kernels import (
    reentrant_checkpoint_id,
    skip_dynamo,
    supported_device_types,
)
from distamp.autocast.op_lists import ActiveLists, activate_lists, active_lists
from distamp.autocast.thread_state import local

__all__ = ["AutocastState"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _WrapMethod:
    """The method ``wrap`` of a state, and of the class for the state of the calling thread.

    A class method would ignore the state in ``state.wrap(fn)``, so the method is a descriptor.
    """

    @overload
    def __get__(
        self, state: None, owner: type[AutocastState]
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...

    @overload
    def __get__(
        self, state: AutocastState, owner: type[AutocastState]
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...

    def __get__(self, state: AutocastState | None, owner: type[AutocastState]) -> Any:
        def wrap(fn: Callable[_P, _R]) -> Callable[_P, _R]:
            """Bind a function to an autocast state, for any thread that runs the function.

            Use it as in ``threading.Thread(target=AutocastState.wrap(fn))``,
            ``executor.submit(AutocastState.wrap(fn), x)`` or
            ``asyncio.to_thread(AutocastState.wrap(fn), x)``. torch has no counterpart: a new thread
            computes in fp32. The thread's own state is restored after each call.

            Args:
                fn: A function, or a generator or coroutine function. Generators and coroutines
                    have the state while they run, and not while they are suspended.

            Returns:
                The bound function. It can be pickled if ``fn`` can, unless ``fn`` is a generator
                or coroutine function.

            Raises:
                TypeError: ``fn`` is not callable.
            """
            return _bind(fn, owner.capture() if state is None else state)

        return wrap


@dataclass(frozen=True)
class AutocastState:
    """The autocast settings of a thread, as a value that another thread can apply.

    torch has no counterpart; its DataParallel carries over one device type's on or off. A state can
    be hashed, compared and pickled.

    Attributes:
        devices: For each device type that this torch has autocast for: its name, whether autocast
            is enabled, and the dtype of lower precision ops.
        cache_enabled: Whether casts of weights are kept until the outermost region ends.
        lists: The op lists in force, with the device type of each; () means torch's lists.
    """

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool
    lists: ActiveLists = ()

    @classmethod
    @skip_dynamo
    def capture(cls) -> AutocastState:
        """Return the state of the calling thread."""
        lists = active_lists()
        # The mark of op lists shows in the settings of two device types, and is not part of them.
        activate_lists(())
        devices: list[tuple[str, bool, torch.dtype]] = []
        for device_type in supported_device_types():
            is_enabled = torch.is_autocast_enabled(device_type)
            devices.append((device_type, is_enabled, torch.get_autocast_dtype(device_type)))
        activate_lists(lists)
        return cls(tuple(devices), torch.is_autocast_cache_enabled(), lists)

    #: Binds a function to a state; see `_WrapMethod`.
    wrap = _WrapMethod()

    def apply(self) -> Self:
        """Return a context manager that applies this state, and restores the thread's afterwards.

        It restores the state in any case, also after the block left regions open.
        The context may be entered again, by any thread.
        """
        if is_dynamo_compiling():
            torch._dynamo.graph_break(
                "AutocastState.apply() cannot be used in a compiled function: a state is the "
                "thread's, not the graph's. Apply it around the call of the compiled function, or "
                "open autocast(...) regions inside."
            )
        return self

    @skip_dynamo
    def __enter__(self) -> Self:
        outer = AutocastState.capture()
        undo = ExitStack()
        # Like torch, keep casts of weights until the outermost region ends, if the dtypes agree.
        nesting = torch.autocast_increment_nesting()
        if nesting == 1 or _dtypes_of(self) != _dtypes_of(outer):
            torch.clear_autocast_cache()
            undo.callback(torch.clear_autocast_cache)
        undo.callback(_leave_nesting, nesting)
        undo.callback(_set_state, outer)
        undo.callback(setattr, local, "regions", local.regions)
        undo.callback(setattr, local, "lists_checkpoint_id", local.lists_checkpoint_id)
        # A region of the block must end in the block, and a region of the caller cannot.
        local.regions = []
        local.lists_checkpoint_id = reentrant_checkpoint_id()
        _set_state(self)
        is_on = any(is_enabled for _, is_enabled, _ in self.devices)
        if is_on and switch_off_autocast():
            undo.callback(restore_setting)
        local.applied_states.append(undo)
        return self

    @skip_dynamo
    def __exit__(self, *error: Any) -> None:
        local.applied_states.pop().close()


def _dtypes_of(state: AutocastState) -> list[torch.dtype]:
    return [dtype for _, _, dtype in state.devices]


def _set_state(state: AutocastState) -> None:
    activate_lists(())
    for device_type, is_enabled, dtype in state.devices:
        torch.set_autocast_enabled(device_type, is_enabled)
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(state.cache_enabled)
    activate_lists(state.lists)


def _leave_nesting(nesting: int) -> None:
    """Leave a level of torch's nesting, and the levels that a block left open inside it."""
    while torch.autocast_decrement_nesting() >= nesting:
        pass


def _call(fn: Callable[..., Any], state: AutocastState, /, *args: Any, **kwargs: Any) -> Any:
    with state.apply():
        return fn(*args, **kwargs)


def _bind(fn: Callable[_P, _R], state: AutocastState) -> Callable[_P, _R]:
    """Return a function that calls ``fn`` under a state."""
    if not callable(fn):
        raise TypeError(f"AutocastState.wrap() takes a callable, not {type(fn).__name__}.")
    if is_generator_like(fn):
        return wrap_generator_like(state.apply, fn)
    bound = functools.partial(_call, fn, state)
    return functools.update_wrapper(bound, fn, updated=())
