"""The autocast region: a torch.autocast that can be nested in itself and shared between threads.

What a region found when it was entered is kept by the entering thread, never on the region, so one
object may be entered any number of times, by any number of threads.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar

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
from torch.amp.autocast_mode import autocast as torchs_autocast
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook

from distamp.autocast.op_lists import OpLists, follow, followed, with_lists
from distamp.autocast.op_names import nearest
from distamp.autocast.suspension import suspendable_kind, wrap
from distamp.autocast.thread_state import local, never_compiled, reentrant_checkpoint
from distamp.callers import stacklevel_of_caller
from distamp.errors import SettingError

__all__ = ["autocast"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_is_torch_function_mode_enabled = torch._C._is_torch_function_mode_enabled
# (device type, dtype, enabled) that torch's constructor took without a word, so that it is not
# asked again: it takes longer than all the rest.
_accepted: set[tuple[str, torch.dtype | None, bool]] = set()


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
        SettingError: On entering with ``ops`` inside a non-strict ``torch.export``; or a listed op
            runs in torch's reentrant checkpoint, which recomputes without the lists.
        RuntimeError: This torch has no autocast for ``device_type``.

    Source: torch's page on automatic mixed precision, https://pytorch.org/docs/stable/amp.html.
    """

    device: str
    fast_dtype: torch.dtype
    ops: OpLists | None
    _enabled: bool
    _caches: bool
    _traced: Iterator[None] | None = None

    def __new__(
        cls,
        device_type: str = "",
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        ops: OpLists | None = None,
    ) -> Self:
        """Make a region; in a compiled function, one of torch's."""
        # torch.compile knows torch's own class by identity, and can break a graph inside it.
        if is_dynamo_compiling() and cls is autocast and ops is None:
            made: Any = torchs_autocast(device_type, dtype, enabled, cache_enabled)
            return made  # type: ignore[no-any-return]
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
        if not isinstance(device_type, str):
            raise ValueError(
                f"Expected `device_type` of type `str`, got: `{type(device_type)}`; pass its type "
                "alone, such as 'cuda' or device.type"
            )
        self._enabled = enabled = bool(enabled)
        if not is_dynamo_compiling() and (device_type, dtype, enabled) not in _accepted:
            self._enabled = _judged(device_type, dtype, enabled)
        self.device = device_type
        self.fast_dtype = get_autocast_dtype(device_type) if dtype is None else dtype
        if cache_enabled is None:
            cache_enabled = is_autocast_cache_enabled()
        elif cache_enabled is not True and cache_enabled is not False:
            raise ValueError(f"cache_enabled must be True, False or None, got {cache_enabled!r}")
        self._caches = cache_enabled
        self.ops = ops
        if ops is None:
            return
        if is_dynamo_compiling():
            # Written out, as torch.compile reads no name here.
            torch._dynamo.graph_break(
                "autocast(..., ops=...) is the thread's, not the graph's. Enter it around the call "
                "of the compiled function."
            )
        elif not isinstance(ops, OpLists):
            raise TypeError(f"ops must be an OpLists, got {ops!r}; write OpLists(fp32={{...}})")

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

    def __enter__(self) -> Self:
        if is_dynamo_compiling():
            self._traced = _torchs_region(self.device, self.fast_dtype, self._enabled, self._caches)
            next(self._traced)
            return self
        device = self.device
        dtype = self.fast_dtype
        caches = self._caches
        found_dtype = get_autocast_dtype(device)
        found_caches = is_autocast_cache_enabled()
        found_lists = None
        export = _export_mode() if _is_torch_function_mode_enabled() else None
        if self.ops is not None:
            if export is not None:
                raise SettingError(
                    "torch.export records a region, and its graph has no place for op lists: it "
                    "would compute by torch's own. Export without ops=, and enter "
                    "autocast(..., ops=...) around the call of the exported program"
                )
            found_lists = followed(), local.listed_in
            local.listed_in = reentrant_checkpoint()
            follow(with_lists(found_lists[0], device, self.ops))
        exported = export is not None
        if export is not None:
            export.__torch_function__(_enter_autocast, (), (device, dtype, self._enabled, caches))
        # torch's cache knows a weight's cast by the weight alone, not by the dtype.
        drops = self._enabled and self._cached_dtype(found_dtype) is not dtype
        enabled = is_autocast_enabled(device)
        found = enabled, found_dtype, found_caches, found_lists, exported, drops
        local.regions.append((self, *found))
        set_autocast_enabled(device, self._enabled)
        if caches is not found_caches:
            set_autocast_cache_enabled(caches)
        if found_dtype is not dtype:
            set_autocast_dtype(device, dtype)
        if autocast_increment_nesting() > 1 and drops:
            clear_autocast_cache()
        return self

    @property
    def casts_to(self) -> torch.dtype | None:
        """The dtype of lower precision ops inside; None where the region is off."""
        return self.fast_dtype if self._enabled else None

    def _cached_dtype(self, found: torch.dtype) -> torch.dtype:
        """Return the dtype of the casts in torch's cache: the innermost enabled region's."""
        for region, *_ in reversed(local.regions):
            if region.device == self.device and region.casts_to is not None:
                return region.casts_to  # type: ignore[no-any-return]
        return found

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> Literal[False]:
        if self._traced is not None:
            next(self._traced, None)
            self._traced = None
            return False
        regions = local.regions
        left = not any(entered[0] is self for entered in regions)
        while not left:
            region, enabled, dtype, caches, lists, exported, drops = regions.pop()
            if autocast_decrement_nesting() == 0 or drops:
                clear_autocast_cache()
            set_autocast_enabled(region.device, enabled)
            set_autocast_dtype(region.device, dtype)
            set_autocast_cache_enabled(caches)
            if lists is not None:
                follow(lists[0])
                local.listed_in = lists[1]
            if exported and (export := _export_mode()) is not None:
                export.__torch_function__(_exit_autocast, (), ())
            left = region is self
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
        settings = (self.device, self.fast_dtype, self._enabled, self._caches)
        listed = self.ops is not None

        @functools.wraps(func)
        def in_region(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            # torch.compile cannot enter one object again inside itself, as recursion would.
            with autocast(*settings) if is_dynamo_compiling() and not listed else self:
                return func(*args, **kwargs)

        return in_region


def _judged(device_type: str, dtype: Any, enabled: bool) -> bool:
    """Whether torch's own constructor, which may warn or raise, leaves a region enabled."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        hint = nearest(str(dtype).removeprefix("torch."), ("float16", "bfloat16"))
        raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}{hint}")
    known: list[str] = torch._C._autocast_supported_devices()
    if device_type.partition(":")[0] not in known:
        hint = nearest(device_type, known)
        raise RuntimeError(
            f"User specified an unsupported autocast device_type '{device_type}'{hint}"
        )
    # Not entered to ask, as an export would record it.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        stays: bool = vars(torchs_autocast(device_type, dtype, enabled))["_enabled"]
    for each in warned:
        warnings.warn(each.message, each.category, stacklevel=stacklevel_of_caller())
    if stays is enabled:
        _accepted.add((device_type, dtype, enabled))
    _drop_casts_after_optimizer_steps()
    return stays


# Where a graph breaks, torch.compile would compile these by themselves, with a region for argument.
for _method in (autocast.__init__, autocast.__enter__, autocast.__exit__):
    never_compiled(_method)


def _torchs_region(
    device: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool
) -> Iterator[None]:
    """Be in a region of torch's own class between the first step and the second.

    Of a subclass, torch.compile traces the methods. It can trace neither the thread's state nor a
    call of torch's ``__enter__``, but a with statement of torch's own class.
    """
    with torchs_autocast(device, dtype, enabled, cache_enabled):
        yield


@functools.cache
def _drop_casts_after_optimizer_steps() -> None:
    """Keep a forward pass after a step in the same region from using casts of the old weights."""
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: clear_autocast_cache())


@functools.cache
def _not_the_graphs() -> type[Exception]:
    """What torch.compile takes for its own, and who looks for attributes for a missing one."""
    return type("NotTheGraphs", (torch._dynamo.exc.Unsupported, AttributeError), {})


def _export_mode() -> Any:
    """Return what records regions in the graph of an export, as of torch's class; None without."""
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    modes = torch.overrides._get_current_function_mode_stack()
    return next((mode for mode in modes if isinstance(mode, PreDispatchTorchFunctionMode)), None)
