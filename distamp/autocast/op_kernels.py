"""Kernels at torch's own autocast keys that follow the op lists of the thread they run in.

An op gets its kernel when it is first listed, through ``torch.library``, and keeps it: torch cannot
take one away while other threads dispatch. Where a thread has no rule for the op, torch's own
kernel runs as before, for the price of a call into Python.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, is_autocast_cache_enabled, set_autocast_cache_enabled
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from distamp.autocast.op_names import Category, autocast_key, schema_of
from distamp.autocast.thread_state import Mark, local, mark, never_compiled, reentrant_checkpoint
from distamp.errors import ConfigError

__all__ = ["register", "rules_of"]

_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
# Everything floating point but float64, which autocast leaves as it is.
_CASTABLE = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype != torch.float64
)

#: What lists say of each op, by their mark: its name and the device type to a category.
rules_of: dict[Mark | None, Mapping[tuple[str, str], Category]] = {None: {}}
_lock = threading.Lock()
_registered: set[tuple[str, str]] = set()
# A library takes its kernels with it when it is collected.
_libraries: dict[str, torch.library.Library] = {}


def register(overload: OpOverload, device_type: str) -> None:
    """Give one overload a kernel that follows lists on one device type, if it has none yet.

    Of an op that is not torch's, somebody may register another one later, which then is in force.
    """
    slot = overload.name(), device_type
    with _lock, warnings.catch_warnings():
        # That torch's kernel is overridden, which it is not: ours calls it.
        warnings.simplefilter("ignore")
        if slot in _registered and (overload.namespace == "aten" or _in_force(*slot)):
            return
        namespace = overload.namespace
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "IMPL")
        kernel = _Kernel(overload, device_type)
        # torch 2.11 would refuse where somebody else's is there.
        _libraries[namespace].impl(
            overload,
            kernel.call,
            autocast_key(device_type),
            with_keyset=True,
            allow_override=True,
        )
        _registered.add(slot)


def _in_force(name: str, device_type: str) -> bool:
    kernels: str = torch._C._dispatch_dump(name)
    return f"{autocast_key(device_type)}: registered at {__file__}" in kernels


class _Kernel:
    """The kernel of one overload on one device type."""

    def __init__(self, overload: OpOverload, device_type: str) -> None:
        key = autocast_key(device_type)
        self._slot = overload.name(), device_type
        self._overload = overload
        self._device_type = device_type
        self._key: DispatchKey = torch._C._dispatch_key_parse(key)
        self._below: DispatchKeySet = torch._C._dispatch_keyset_full_after(self._key)
        self._torchs: Callable[..., Any] | None = None
        if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key):
            self._torchs = torch.library.get_kernel(overload, key).call_boxed
        arguments = [it for it in schema_of(overload).arguments if not it.kwarg_only]
        names = [it.name for it in arguments]
        self._dtype_at = names.index("dtype") if "dtype" in names else len(names)
        self._statistics_at = names.index("running_mean") if "running_mean" in names else len(names)
        self._tensors_at = [i for i, it in enumerate(arguments) if str(it.type) == "Tensor"]
        name = schema_of(overload).name.split("::")[1]
        self._of_numbers: Callable[..., Any] = getattr(torch, name, overload.overloadpacket)

    @never_compiled
    def call(self, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Run the op by the rule of this thread's lists, by torch's kernel where they have none."""
        category = rules_of.get(mark(), {}).get(self._slot)
        if category is None and self._torchs is not None:
            return self._run_torchs(keys, *args, **kwargs)
        if category is not None and reentrant_checkpoint() not in (None, local.listed_in):
            raise ConfigError(
                "torch.utils.checkpoint with use_reentrant=True recomputes without the op lists of "
                f"this region, and {self._slot[0]} is on one. Call checkpoint of distamp.autocast "
                "in its place, or pass use_reentrant=False and its "
                "context_fn=checkpoint_context_fn."
            )
        explicit = kwargs.get("dtype") or (len(args) > self._dtype_at and args[self._dtype_at])
        # The number of x * 2 arrives as it is, and an overload takes tensors alone.
        plain = all(i >= len(args) or isinstance(args[i], Tensor) for i in self._tensors_at)
        if category is not None and category is not Category.UNLISTED and not explicit:
            to = self._dtype(category, args)
            # The op writes running statistics: those of another dtype are not cast, nor the weights
            # beside them, which torch takes in one dtype.
            statistics = args[self._statistics_at : self._statistics_at + 2]
            cast = 1 if any(self._differs(each, to) for each in statistics) else len(args)
            args = (*(self._cast(arg, to) for arg in args[:cast]), *args[cast:])
            kwargs = {name: self._cast(arg, to) for name, arg in kwargs.items()}
        elif plain and category in (None, Category.UNLISTED):
            # Composite ops come down to others, which have lists of their own.
            return self._overload.redispatch(keys & self._below, *args, **kwargs)
        # As torch's kernels call: ops inside run in the dtypes that they are given.
        _set_excluded(self._key, True)
        try:
            return (self._overload if plain else self._of_numbers)(*args, **kwargs)
        finally:
            _set_excluded(self._key, False)

    def _run_torchs(self, *args: Any, **kwargs: Any) -> Any:
        """Call torch's kernel, which from Python holds the GIL, without the cache of casts.

        To fill the cache it takes a lock, under which the cast of another thread may wait for the
        GIL: where that thread has a dispatch mode, or its weight is a tensor subclass.
        """
        assert self._torchs is not None
        cached = is_autocast_cache_enabled()
        set_autocast_cache_enabled(False)
        try:
            return self._torchs(*args, **kwargs)
        finally:
            set_autocast_cache_enabled(cached)

    def _dtype(self, category: Category, args: tuple[Any, ...]) -> torch.dtype:
        if category is Category.FP32:
            return torch.float32
        lower = torch.get_autocast_dtype(self._device_type)
        if category is Category.LOWER_PRECISION:
            return lower
        dtypes = {each.dtype for each in tree_leaves(args) if self._casts(each)}
        return functools.reduce(torch.promote_types, dtypes, lower)

    def _casts(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.dtype in _CASTABLE
            and value.device.type == self._device_type
        )

    def _differs(self, value: Any, to: torch.dtype) -> bool:
        return self._casts(value) and value.dtype is not to

    def _cast(self, value: Any, to: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return [self._cast(each, to) for each in value]
        return value.to(to) if self._differs(value, to) else value
