"""The autocast region: a torch.autocast that can be nested in itself and shared between threads.

What a region found when it was entered stands on a stack of the entering thread, never on the
region, so one object may be entered any number of times, by any number of threads.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from sys import _getframe
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar

import torch
from torch import (
    autocast_decrement_nesting,
    autocast_increment_nesting,
    clear_autocast_cache,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    set_autocast_cache_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.compiler import is_dynamo_compiling

from distamp.autocast.threads.stack import enter_extras, leave_extras, leave_out_of_order, thread
from distamp.autocast.threads.suspension import (
    ENTER_CONTEXT,
    SUSPENDABLE,
    refuse_if_suspended,
    suspendable_kind,
    wrap,
)
from distamp.errors import RegionError

try:
    from torch.amp.autocast_mode import _UnmanagedAutocast
except ImportError:  # torch 2.11

    class _UnmanagedAutocast(torch.autocast):  # type: ignore[no-redef]
        """What keeps torch.compile from taking a region for one of torch's, where torch cannot."""

        @property
        def _cache_enabled(self) -> bool:
            # torch.compile reads the settings of every torch.autocast it finds, and drops the rest.
            reader = "torch._dynamo.variables.builder"
            if not is_dynamo_compiling() and _getframe(1).f_globals.get("__name__") == reader:
                raise torch._dynamo.exc.Unsupported(
                    "autocast(..., ops=...) is no context manager that can be entered inside a "
                    "compiled function: op lists are the thread's, not the graph's. Enter it "
                    "around the call of the compiled function."
                )
            return bool(self.__dict__["_cache_enabled"])

        @_cache_enabled.setter
        def _cache_enabled(self, value: bool) -> None:
            self.__dict__["_cache_enabled"] = value


if TYPE_CHECKING:
    from distamp.autocast.op_lists import OpLists

__all__ = ["autocast"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_is_torch_function_mode_enabled = torch._C._is_torch_function_mode_enabled

# (device type, dtype, enabled) that torch's constructor took without a complaint: it need not look
# again. The renameable backend is never here: what it supports changes when it is registered.
_accepted: set[tuple[str, torch.dtype | None, bool]] = set()


class autocast(torch.autocast):
    """Run a region in mixed precision, each op in the dtype autocast's lists give it.

    A :class:`torch.autocast` (``isinstance`` holds), a context manager and a decorator, that
    differs in this:

    - One object may be entered again while it is entered, and by several threads at once. torch's
      keeps what it found on itself, and so leaves autocast on, or in another thread's state.
    - A decorated generator or coroutine is outside the region while it is suspended, and a ``with``
      whose body suspends is refused. torch's leaks into what the thread runs meanwhile.
    - A region of another dtype inside a region does not take the outer one's casts of weights.
    - ``ops`` changes the op lists for the region, ``cache_enabled="step"`` keeps casts of weights
      across regions.

    Args:
        device_type: ``"cuda"``, ``"cpu"``, ``"xpu"`` and so on.
        dtype: What lower precision ops compute in. None takes the thread's current dtype for the
            device type, by default ``torch.float16`` on CUDA and ``torch.bfloat16`` on CPU.
        enabled: False makes a region in which ops run in the dtype of their inputs.
        cache_enabled: Whether casts of weights are kept until the outermost region ends;
            ``"step"`` keeps them until a weight changes or an optimizer steps. None takes the
            thread's current setting.
        ops: Op lists for this region, where they differ from torch's.

    Raises:
        ValueError: ``device_type`` is not a string, or ``cache_enabled`` none of the above.
        TypeError: ``dtype`` is not a :class:`torch.dtype`.
        RuntimeError: This torch has no autocast for ``device_type``.
        RegionError: On entering: the body suspends its function. On leaving: another thread, or
            a region entered later is still open.

    Source: torch's page on automatic mixed precision, https://pytorch.org/docs/stable/amp.html.
    """

    device: str
    fast_dtype: torch.dtype
    ops: OpLists | None
    _enabled: bool
    _cache_enabled: bool
    _step_cache: bool
    _has_extras: bool

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | Literal["step"] | None = None,
        *,
        ops: OpLists | None = None,
    ) -> None:
        if dtype is None and isinstance(device_type, str):
            dtype = get_autocast_dtype(device_type)
        if is_dynamo_compiling() or (
            isinstance(device_type, str) and (device_type, dtype, enabled) in _accepted
        ):
            self.device = device_type
            self.fast_dtype = dtype
            self._enabled = bool(enabled)
        else:
            self._check(device_type, dtype, enabled)
        if cache_enabled is None:
            # In a step region torch's own flag is off.
            cache_enabled = is_autocast_cache_enabled() or (thread.here.step_regions > 0 and "step")
        step = cache_enabled == "step"
        if not (step or cache_enabled is True or cache_enabled is False):
            raise ValueError(
                f"cache_enabled must be True, False, 'step' or None, got {cache_enabled!r}"
            )
        self._step_cache = step
        self._cache_enabled = cache_enabled is True
        self.ops = ops
        self._has_extras = step or ops is not None
        if ops is not None and type(self) is autocast:
            self.__class__ = _Listed

    def _check(self, device_type: str, dtype: torch.dtype | None, enabled: bool) -> None:
        """Let torch's own constructor judge, and hand on its warnings from the caller's line."""
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().__init__(device_type, dtype=dtype, enabled=bool(enabled))
        for warning in caught:
            warnings.warn(warning.message, warning.category, stacklevel=3)
        renameable = torch._C._get_privateuse1_backend_name()
        if not caught and isinstance(enabled, bool) and device_type != renameable:
            _accepted.add((device_type, self.fast_dtype, enabled))

    def __enter__(self) -> Self:
        if is_dynamo_compiling():
            return self._enter_traced()
        code = _getframe(1).f_code
        if code.co_flags & SUSPENDABLE or code is ENTER_CONTEXT:
            refuse_if_suspended(_getframe(1))
        device = self.device
        dtype = self.fast_dtype
        found_dtype = get_autocast_dtype(device)
        thread.here.stack.append(
            (
                self,
                is_autocast_enabled(device),
                found_dtype,
                is_autocast_cache_enabled(),
                enter_extras(self.ops, device, self._step_cache) if self._has_extras else None,
            )
        )
        set_autocast_enabled(device, self._enabled)
        set_autocast_cache_enabled(self._cache_enabled)
        nesting = autocast_increment_nesting()
        if found_dtype is not dtype:
            set_autocast_dtype(device, dtype)
            if nesting > 1:
                # torch's cache knows a weight's cast by the weight alone, not by the dtype.
                clear_autocast_cache()
        if _is_torch_function_mode_enabled():
            _tell_export(_enter_autocast, (device, dtype, self._enabled, self._cache_enabled))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> Literal[False]:
        if is_dynamo_compiling():
            return self._exit_traced()
        stack = thread.here.stack
        if not stack or stack[-1][0] is not self:
            leave_out_of_order(self)
        _, enabled, dtype, cache_enabled, extras = stack.pop()
        device = self.device
        if autocast_decrement_nesting() == 0 or dtype is not self.fast_dtype:
            clear_autocast_cache()
        set_autocast_enabled(device, enabled)
        set_autocast_dtype(device, dtype)
        set_autocast_cache_enabled(cache_enabled)
        if extras is not None:
            leave_extras(extras)
        if _is_torch_function_mode_enabled():
            _tell_export(_exit_autocast, ())
        return False

    def __call__(self, func: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorate a function, or a generator or coroutine function, to run in this region."""
        if not callable(func):
            raise TypeError(
                f"autocast(...)(func) needs a callable, got {type(func).__name__}; to open a "
                "region write: with autocast(device_type): ..."
            )
        kind = suspendable_kind(func)
        if kind is not None:
            return wrap(lambda: self, func, kind)

        settings = (self.device, self.fast_dtype, self._enabled, self._cache_enabled)
        listed = self.ops is not None

        @functools.wraps(func)
        def in_region(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            # torch.compile cannot enter one object again inside itself, as recursion would.
            with autocast(*settings) if is_dynamo_compiling() and not listed else self:
                return func(*args, **kwargs)

        # What torch.jit.script looks for, so that it says this instead of failing later.
        setattr(in_region, "__script_unsupported", "autocast(...) cannot decorate scripted code")
        return in_region

    # torch.compile knows torch's own class by identity and traces through the methods of this one.
    # It cannot trace the stack, nor a call of torch's __enter__, but a with of torch's own class.

    def _enter_traced(self) -> Self:
        if self.ops is not None:
            raise RegionError(
                "autocast(..., ops=...) cannot be entered inside a compiled function: op lists are "
                "the thread's, not the graph's. Enter it around the call of the compiled function."
            )
        self._traced = _torchs_region(
            self.device, self.fast_dtype, self._enabled, self._cache_enabled
        )
        next(self._traced)
        return self

    def _exit_traced(self) -> Literal[False]:
        next(self._traced, None)
        return False


def _torchs_region(
    device: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool
) -> Iterator[None]:
    """Be in a region of torch's own class between the first step and the second."""
    with torch.autocast(device, dtype, enabled, cache_enabled):
        yield


class _Listed(autocast, _UnmanagedAutocast):
    """A region with op lists, made outside a compiled function and entered in it.

    torch.compile takes every torch.autocast for one that has no more to it than torch's, except
    those of the class that it uses in its own graphs. With this base it calls ``__enter__``, which
    refuses, and does not drop the lists.
    """


def _tell_export(call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Let export record entering or leaving a region in its graph, as torch's class does."""
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    for mode in torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, PreDispatchTorchFunctionMode):
            mode.__torch_function__(call, (), args)
            return
