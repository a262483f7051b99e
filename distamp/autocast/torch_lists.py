"""The lists that torch itself has: what its autocast kernel of an op does before the op runs.

The dispatcher tells that a kernel is there but not what it does, so each is called once with
tensors that have no memory and watched until the op itself would start. No device is needed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from distamp.autocast.op_names import Category, autocast_key, overloads, schema_of

__all__ = ["category_in_torch", "listed_by_torch"]

# Called through torch's binding, which hands their warnings to Python's filters.
_DEPRECATED = {"_lu_with_info", "chain_matmul", "cross", "lu_solve", "qr", "stft"}
_PLAIN = {"int": 1, "float": 1.0, "number": 1, "bool": False, "str": "ij,jk->ik", "List[int]": [1]}
_PLAIN |= {"List[Optional[Tensor]]": [None]}


class _Reached(Exception):
    """The op itself was reached; it need not run."""


class _Probe(Tensor):
    """A tensor of any device, there or not, that tells what it is cast to and lets no op run."""

    at: torch.device
    casts: set[torch.dtype]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, dtype: torch.dtype, at: torch.device, casts: set[torch.dtype]) -> _Probe:
        shape = torch.empty(2, 2, dtype=dtype, device="meta")
        made: Any = torch.Tensor._make_subclass(
            cls, shape, False, dispatch_device=True, device_for_backend_keys=at
        )
        made.at, made.casts = at, casts
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        values = tree_leaves((args, kwargs or {}))
        first = next(each for each in values if isinstance(each, _Probe))
        if func is torch.ops.prim.device.default:
            return first.at
        dtypes = [each for each in values if isinstance(each, torch.dtype)]
        first.casts.update(dtypes)
        if func in (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default):
            return cls(dtypes[0], first.at, first.casts)
        raise _Reached


def _arguments(overload: OpOverload, tensors: Iterator[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of the right types; the shapes need not fit, as the op never runs."""

    def value(kind: str) -> Any:
        several = [next(tensors), next(tensors)] if kind == "List[Tensor]" else None
        return next(tensors) if kind == "Tensor" else several or _PLAIN.get(kind)

    given = [it for it in schema_of(overload).arguments if not it.has_default_value()]
    args = [value(str(it.type)) for it in given if not it.kwarg_only]
    return args, {it.name: value(str(it.type)) for it in given if it.kwarg_only}


def _casts(overload: OpOverload, device_type: str, *dtypes: torch.dtype) -> set[torch.dtype]:
    """What one op's inputs of ``dtypes``, in turn, are cast to."""
    casts: set[torch.dtype] = set()
    at = torch.device(device_type)
    args, kwargs = _arguments(overload, (_Probe(it, at, casts) for it in itertools.cycle(dtypes)))
    name = schema_of(overload).name.removeprefix("aten::")
    call = getattr(torch._C._VariableFunctions, name) if name in _DEPRECATED else overload
    # An op that torch forbids in a region raises, and is on no list.
    with contextlib.suppress(_Reached, Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(*args, **kwargs)
    return casts


def _category(overload: OpOverload, device_type: str) -> Category:
    key = autocast_key(device_type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key):
        return Category.UNLISTED
    lower, fp32 = torch.bfloat16, torch.float32
    # In a new thread, which has no state to put back.
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, lower)
    below = torch._C._AutoDispatchBelowAutograd()  # autograd would ask for the device
    if lower in _casts(overload, device_type, fp32):
        category = Category.LOWER_PRECISION
    elif fp32 in _casts(overload, device_type, lower):
        category = Category.FP32
    else:
        mixed = _casts(overload, device_type, lower, fp32)
        category = Category.PROMOTE if fp32 in mixed else Category.UNLISTED
    del below
    return category


@functools.cache
def category_in_torch(overload: OpOverload, device_type: str) -> Category:
    """The category that this torch registered for one overload."""
    # In a thread of its own, where no mode and no region of the caller's is.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_category, overload, device_type).result()


def listed_by_torch(device_type: str) -> dict[str, Category]:
    """Every op that this torch lists for a device type, here or not, and its category."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(autocast_key(device_type))
    names = {full.removeprefix("aten::").partition(".")[0] for full in registered}
    found = {
        name: category_in_torch(overload, device_type)
        for name in sorted(names)
        for overload in overloads(name)
        if overload.name() in registered or f"{overload.name()}.default" in registered
    }
    return {name: category for name, category in found.items() if category is not Category.UNLISTED}
