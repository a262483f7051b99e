"""The autocast region: a torch.autocast that can be nested in itself and shared between threads.

What a region found when it was entered is kept by the entering thread, never on the region, so one
object may be entered any number of times, by any number of threads.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar

import torch
from torch import clear_autocast_cache, get_autocast_dtype, is_autocast_cache_enabled
from torch.amp.autocast_mode import autocast as torchs_autocast
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook

from distamp.autocast.compiled_backward import (
    restore_setting,
    switch_off_autocast,
    warn_of_inner_region,
)
from distamp.autocast.op_lists import OpLists, follow, followed
from distamp.autocast.suspension import suspends, wrap
from distamp.autocast.thread_state import local, never_compiled, reentrant_checkpoint
from distamp.callers import stacklevel_of_caller
from distamp.errors import ConfigError

__all__ = ["autocast"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class autocast(torchs_autocast):
    """Run a region in mixed precision, each op in the dtype that autocast's lists give it.

    A subclass of :class:`torch.autocast`, a context manager and a decorator. It differs from
    torch's class in these points:

    - One object may be entered again while it is entered, and by several threads at once. torch's
      class saves the previous state on the object, and so leaves autocast on, or sets another
      thread's state.
    - A decorated generator or coroutine is outside the region while it is suspended. A ``with``
      whose body suspends leaks into what the thread runs meanwhile, as torch's does.
    - A region of another dtype inside a region does not use the outer one's cast weights, and
      an optimizer's step inside a region drops them.
    - Leaving a region leaves those that were entered after it and are still open, and restores
      what it found; leaving one that this thread is not in does nothing.
    - ``ops`` changes the op lists for the region.

    Args:
        device_type: ``"cuda"``, ``"cpu"``, ``"xpu"`` and so on.
        dtype: The dtype of lower precision ops. None means the thread's current dtype for the
            device type, by default ``torch.float16`` on CUDA and ``torch.bfloat16`` on CPU.
        enabled: If False, ops in the region run in the dtype of their inputs.
        cache_enabled: Whether cast weights are cached until the outermost region ends. None means
            the thread's current setting.
        ops: Op lists for this region, if they differ from torch's.

    Raises:
        ValueError: ``device_type`` is not a string, or ``cache_enabled`` is not True, False or
            None.
        TypeError: ``dtype`` is not a :class:`torch.dtype`, or ``ops`` not an :class:`OpLists`.
        ConfigError: On entering with ``ops`` inside a non-strict ``torch.export``; or a listed op
            runs in torch's reentrant checkpoint, which recomputes without the lists.
        RuntimeError: This torch has no autocast for ``device_type``.

    Source: torch's page on automatic mixed precision, https://pytorch.org/docs/stable/amp.html.
    """

    device: str
    fast_dtype: torch.dtype
    ops: OpLists | None
    _enabled: bool
    _caches: bool

    def __new__(cls, *args: Any, ops: OpLists | None = None, **settings: Any) -> Self:
        """Make a region; in a compiled function, one of torch's."""
        # torch.compile knows torch's own class by identity, and can break a graph inside it.
        if is_dynamo_compiling() and cls is autocast and ops is None:
            warn_of_inner_region(*args, **settings)
            return torchs_autocast(*args, **settings)  # type: ignore[return-value]
        return object.__new__(cls)

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        ops: OpLists | None = None,
    ) -> None:
        if ops is not None and is_dynamo_compiling():
            # Written out, as torch.compile reads no name here.
            torch._dynamo.graph_break(
                "autocast(..., ops=...) is the thread's, not the graph's. Enter it around the call "
                "of the compiled function."
            )
        if ops is not None and not isinstance(ops, OpLists):
            raise TypeError(f"ops must be an OpLists, got {ops!r}; write OpLists(fp32={{...}})")
        if cache_enabled not in (True, False, None):
            raise ValueError(f"cache_enabled must be True, False or None, got {cache_enabled!r}")
        self._enabled = _is_enabled(device_type, dtype, bool(enabled))
        self.device = device_type
        self.fast_dtype = get_autocast_dtype(device_type) if dtype is None else dtype
        self._caches = is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        self.ops = ops

    @property
    def _cache_enabled(self) -> bool:  # type: ignore[override]
        """The cache flag by torch's name; who reads it takes the region for one of torch's.

        torch.compile does, of a region that it finds entered in a compiled function, and then
        forgets the lists: so a region with lists has no such attribute.
        """
        if self.ops is not None:
            raise _not_the_graphs()(
                "autocast(..., ops=...) is the thread's, not the graph's. Enter it around the call "
                "of the compiled function."
            )
        return self._caches

    @property
    def casts_to(self) -> torch.dtype | None:
        """The dtype of lower precision ops inside; None where the region is off."""
        return self.fast_dtype if self._enabled else None

    def __enter__(self) -> Self:
        lists = None
        if self.ops is not None:
            _refuse_export()
            lists = followed(), local.listed_in
            local.listed_in = reentrant_checkpoint()
            others = (each for each in lists[0] if each[0] != self.device)
            follow((*others, (self.device, self.ops)))
        # torch's cache knows a weight's cast by the weight alone, not by the dtype.
        drops = self._enabled and _cached_dtype(self.device) is not self.fast_dtype
        if drops:
            clear_autocast_cache()
        torchs: Any = object.__new__(torchs_autocast)  # one for each time it is entered
        vars(torchs).update(
            device=self.device,
            fast_dtype=self.fast_dtype,
            _enabled=self._enabled,
            _cache_enabled=self._caches,
        )
        torchs.__enter__()
        # An outer region of this thread has changed torch's setting already.
        outermost = self._enabled and all(region.casts_to is None for region, *_ in local.regions)
        local.regions.append((self, torchs, drops, lists, outermost and switch_off_autocast()))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> Literal[False]:
        regions = local.regions
        left = self not in [region for region, *_ in regions]
        while not left:
            region, torchs, drops, lists, changed_setting = regions.pop()
            torchs.__exit__(None, None, None)
            if changed_setting:
                restore_setting()
            if drops:
                clear_autocast_cache()
            if lists is not None:
                local.listed_in = lists[1]
                follow(lists[0])
            left = region is self
        return False

    def __call__(self, func: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorate a function, or a generator or coroutine function, to run in this region."""
        if not callable(func):
            raise TypeError(
                f"autocast(...)(func) needs a callable, got {type(func).__name__}; to open a "
                "region write: with autocast(device_type): ..."
            )
        if suspends(func):
            return wrap(lambda: self, func)
        settings = (self.device, self.fast_dtype, self._enabled, self._caches)

        @functools.wraps(func)
        def in_region(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            # torch.compile cannot enter one object again inside itself, as recursion would.
            with autocast(*settings) if is_dynamo_compiling() and self.ops is None else self:
                return func(*args, **kwargs)

        return in_region


#: Arguments with which torch's constructor gave no warning when it was last called.
_accepted: set[tuple[str, torch.dtype | None]] = set()


def _is_enabled(device_type: str, dtype: Any, enabled: bool) -> bool:
    """Return whether torch enables a region of these arguments on this machine, now.

    torch's constructor decides each time. Its answer depends on the devices that it finds, which a
    test or `preflight` may simulate, and on a backend's module, which may be registered later.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    _drop_casts_after_optimizer_steps()
    there = device_type != "cuda" or torch.cuda.is_available()
    if not enabled or (there and (device_type, dtype) in _accepted):
        accepted = _torch_enables(device_type, dtype, enabled)
        if enabled and not accepted:
            _accepted.discard((device_type, dtype))
        return accepted
    # Only if a warning may come, because this is slow and changes the filters of all threads.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accepted = _torch_enables(device_type, dtype, enabled)
    for warning in caught:
        warnings.warn(str(warning.message), warning.category, stacklevel_of_caller())
    if not caught:
        _accepted.add((device_type, dtype))
    return accepted


def _torch_enables(device_type: str, dtype: torch.dtype | None, enabled: bool) -> bool:
    return bool(vars(torchs_autocast(device_type, dtype, enabled))["_enabled"])


# Where a graph breaks, torch.compile would compile these by themselves, with a region for argument.
for _method in (autocast.__init__, autocast.__enter__, autocast.__exit__):
    never_compiled(_method)


def _cached_dtype(device_type: str) -> torch.dtype:
    """Return the dtype of the casts in torch's cache: the innermost enabled region's."""
    for region, *_ in reversed(local.regions):
        if region.device == device_type and region.casts_to is not None:
            return region.casts_to  # type: ignore[no-any-return]
    return get_autocast_dtype(device_type)


def _refuse_export() -> None:
    """Refuse lists in a non-strict export, whose graph records regions of torch's class."""
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    modes = torch.overrides._get_current_function_mode_stack()
    if any(isinstance(mode, PreDispatchTorchFunctionMode) for mode in modes):
        raise ConfigError(
            "torch.export records a region, and its graph has no place for op lists: it would "
            "compute by torch's own. Export without ops=, and enter autocast(..., ops=...) around "
            "the call of the exported program"
        )


@functools.cache
def _drop_casts_after_optimizer_steps() -> None:
    """Keep a forward pass after a step in the same region from using casts of the old weights."""
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: clear_autocast_cache())


@functools.cache
def _not_the_graphs() -> type[Exception]:
    """What torch.compile takes for its own, and who looks for attributes for a missing one."""
    return type("NotTheGraphs", (torch._dynamo.exc.Unsupported, AttributeError), {})
