"""The autocast region, which can be nested in itself and shared between threads.

The thread that enters a region stores the state to restore, and the region stores none. So threads
may enter one object any number of times.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar

import torch
from torch import (
    clear_autocast_cache,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
)
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook

from distamp.autocast.compiled_backward import (
    restore_setting,
    switch_off_autocast,
    warn_of_inner_region,
)
from distamp.autocast.generators import is_generator_like, wrap_generator_like
from distamp.autocast.op_kernels import is_exporting, reentrant_checkpoint_id, skip_dynamo
from distamp.autocast.op_lists import ActiveLists, OpLists, activate_lists, active_lists
from distamp.autocast.thread_state import ActiveRegion, local
from distamp.callers import stacklevel_of_caller
from distamp.errors import ConfigError

__all__ = ["autocast"]

# A user or a test may put distamp's class into torch's namespace, so torch's class is read once.
_TorchAutocast = torch.amp.autocast_mode.autocast
_P = ParamSpec("_P")
_R = TypeVar("_R")


class autocast(_TorchAutocast):
    """Run a region in mixed precision, each op in the dtype that autocast's lists give it.

    A subclass of :class:`torch.autocast`, a context manager and a decorator. It differs from
    torch's class in these points:

    - One object may be entered again while it is entered, and by several threads at once. torch's
      class saves the previous state on the object, and so leaves autocast on, or sets another
      thread's state.
    - A decorated generator or coroutine is outside the region while it is suspended. A ``with``
      with a body that suspends leaks into the code that the thread runs meanwhile, as torch's does.
    - A region of another dtype inside a region does not use the cast weights of the outer region,
      and an optimizer's step inside a region drops them.
    - Leaving a region also leaves the regions that were entered after it and are still open, and
      restores the state from before it. Leaving a region that this thread is not in does nothing.
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
        ConfigError: A region with ``ops`` is entered inside a non-strict ``torch.export``. Or a
            listed op runs in torch's reentrant checkpoint, which recomputes without the lists.
        RuntimeError: This torch has no autocast for ``device_type``.

    Source: torch's page on automatic mixed precision, https://pytorch.org/docs/stable/amp.html.
    """

    device: str
    fast_dtype: torch.dtype
    ops: OpLists | None
    _enabled: bool
    _caches_weights: bool

    def __new__(cls, *args: Any, ops: OpLists | None = None, **settings: Any) -> Self:
        """Make a region, which is one of torch's class in a compiled function."""
        # torch.compile knows torch's class by identity, and can break a graph inside it.
        if is_dynamo_compiling() and cls is autocast and ops is None:
            warn_of_inner_region(*args, **settings)
            return _TorchAutocast(*args, **settings)  # type: ignore[return-value]
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
            # torch.compile reads no name of a constant here, so the message is written out.
            torch._dynamo.graph_break(
                "autocast(..., ops=...) is the thread's, not the graph's. Enter it around the call "
                "of the compiled function."
            )
        if ops is not None and not isinstance(ops, OpLists):
            raise TypeError(f"ops must be an OpLists, got {ops!r}. Write OpLists(fp32={{...}}).")
        if cache_enabled not in (True, False, None):
            raise ValueError(f"cache_enabled must be True, False or None, got {cache_enabled!r}.")
        self._enabled = _is_enabled(device_type, dtype, bool(enabled))
        self.device = device_type
        self.fast_dtype = get_autocast_dtype(device_type) if dtype is None else dtype
        if cache_enabled is None:
            cache_enabled = is_autocast_cache_enabled()
        self._caches_weights = cache_enabled
        self.ops = ops

    @property
    def _cache_enabled(self) -> bool:  # type: ignore[override]
        """The cache flag by torch's name, which a region with lists does not have.

        torch.compile reads the attribute of a region that a compiled function enters, treats the
        region as one of torch's, and would drop the lists.
        """
        if self.ops is not None:
            raise _lists_in_graph_error()(
                "autocast(..., ops=...) is the thread's, not the graph's. Enter it around the call "
                "of the compiled function."
            )
        return self._caches_weights

    @property
    def active_dtype(self) -> torch.dtype | None:
        """The dtype of lower precision ops inside; None if the region is off."""
        return self.fast_dtype if self._enabled else None

    def __enter__(self) -> Self:
        outer_lists = None
        if self.ops is not None:
            outer_lists = self._enter_lists(self.ops)
        # torch's cache finds the cast of a weight by the weight alone, in any dtype.
        clears_cache = self._enabled and _cached_dtype(self.device) is not self.fast_dtype
        if clears_cache:
            clear_autocast_cache()
        torch_region: Any = object.__new__(_TorchAutocast)
        vars(torch_region).update(
            device=self.device,
            fast_dtype=self.fast_dtype,
            _enabled=self._enabled,
            _cache_enabled=self._caches_weights,
        )
        torch_region.__enter__()
        # If an outer region is on, it has changed torch's setting already.
        is_outermost = self._enabled and not any(
            entry.region.active_dtype for entry in local.regions
        )
        changed_setting = is_outermost and switch_off_autocast()
        local.regions.append(
            ActiveRegion(self, torch_region, clears_cache, outer_lists, changed_setting)
        )
        return self

    def _enter_lists(self, ops: OpLists) -> tuple[ActiveLists, int | None]:
        """Follow lists on this region's device type; return the lists and checkpoint before."""
        if is_exporting():
            raise ConfigError(
                "torch.export records a region, and its graph has no place for op lists, so it "
                "would compute by torch's lists. Export without ops=, and enter "
                "autocast(..., ops=...) around the call of the exported program."
            )
        outer_lists = active_lists()
        outer_checkpoint_id = local.lists_checkpoint_id
        local.lists_checkpoint_id = reentrant_checkpoint_id()
        other_devices = [entry for entry in outer_lists if entry[0] != self.device]
        activate_lists((*other_devices, (self.device, ops)))
        return outer_lists, outer_checkpoint_id

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> Literal[False]:
        regions = local.regions
        if not any(entry.region is self for entry in regions):
            return False
        entry = None
        while entry is None or entry.region is not self:
            entry = regions.pop()
            _undo(entry)
        return False

    def __call__(self, func: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorate a function, or a generator or coroutine function, to run in this region."""
        if not callable(func):
            raise TypeError(
                f"autocast(...)(func) needs a callable, got {type(func).__name__}. To open a "
                "region, write with autocast(device_type): ..."
            )
        if is_generator_like(func):
            return wrap_generator_like(lambda: self, func)
        settings = (self.device, self.fast_dtype, self._enabled, self._caches_weights)

        @functools.wraps(func)
        def in_region(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            # torch.compile cannot enter one object again inside itself, as recursion would.
            with autocast(*settings) if is_dynamo_compiling() and self.ops is None else self:
                return func(*args, **kwargs)

        return in_region


def _undo(entry: ActiveRegion) -> None:
    """Restore the state from before the entry of a region."""
    entry.torch_region.__exit__(None, None, None)
    if entry.changed_setting:
        restore_setting()
    if entry.clears_cache:
        clear_autocast_cache()
    if entry.outer_lists is not None:
        lists, local.lists_checkpoint_id = entry.outer_lists
        activate_lists(lists)


# Arguments with which torch's constructor gave no warning when it was last called.
_accepted: set[tuple[str, torch.dtype | None]] = set()


def _is_enabled(device_type: str, dtype: Any, enabled: bool) -> bool:
    """Return whether torch enables a region of these arguments on this machine, now.

    torch's constructor decides each time. It depends on the devices that it finds, which a test or
    `preflight` may simulate, and on a backend's module, which may be registered later.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}.")
    _drop_casts_after_optimizer_steps()
    arguments = device_type, dtype
    is_present = device_type != "cuda" or torch.cuda.is_available()
    if not enabled or (is_present and arguments in _accepted):
        is_enabled = _torch_enables(device_type, dtype, enabled)
        if enabled and not is_enabled:
            _accepted.discard(arguments)
        return is_enabled
    # Recording warnings is slow and changes the filters of all threads, so it is done only when
    # torch may warn.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_enabled = _torch_enables(device_type, dtype, enabled)
    for warning in caught:
        warnings.warn(str(warning.message), warning.category, stacklevel_of_caller())
    if not caught:
        _accepted.add(arguments)
    return is_enabled


def _torch_enables(device_type: str, dtype: torch.dtype | None, enabled: bool) -> bool:
    return bool(vars(_TorchAutocast(device_type, dtype, enabled))["_enabled"])


# After a graph break, torch.compile would compile these methods with a region as their argument.
for _method in (autocast.__init__, autocast.__enter__, autocast.__exit__):
    skip_dynamo(_method)


def _cached_dtype(device_type: str) -> torch.dtype:
    """Return the dtype of the casts in torch's cache, which the innermost enabled region made.

    If autocast is on, that region is the current one, which may be of torch's class. A region that
    is off leaves the casts of the region around it.
    """
    if is_autocast_enabled(device_type):
        return get_autocast_dtype(device_type)
    for entry in reversed(local.regions):
        region = entry.region
        if region.device == device_type and region.active_dtype is not None:
            return region.active_dtype  # type: ignore[no-any-return]
    return get_autocast_dtype(device_type)


@functools.cache
def _drop_casts_after_optimizer_steps() -> None:
    """Clear the cache after each optimizer step, because it has casts of the old weights."""
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: clear_autocast_cache())


@functools.cache
def _lists_in_graph_error() -> type[Exception]:
    """Return an error that breaks a graph of torch.compile, and that `hasattr` catches."""
    return type("ListsInGraphError", (torch._dynamo.exc.Unsupported, AttributeError), {})
