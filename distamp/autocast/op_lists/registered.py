"""The category torch registered for each op: what its autocast kernel does before the op runs."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from distamp.autocast.devices import autocast_without_device
from distamp.autocast.op_lists.names import overloads
from distamp.autocast.op_lists.rules import Category
from distamp.autocast.tensors import tensors_in

__all__ = [
    "BANNED",
    "category",
    "registered",
    "registered_overloads",
]

# Ops that raise in an autocast region, with advice on what to use instead.
BANNED = "banned"


# Called through torch's binding, which hands their warnings to Python's filters.
_DEPRECATED = {"_lu_with_info", "chain_matmul", "cross", "lu_solve", "qr", "stft"}


class _Reached(Exception):
    """The op itself was reached; it need not run."""


class _Probe(Tensor):
    """A tensor of any device, there or not, that tells what it is cast to and lets no op run.

    torch's fake tensors do the same, and load torch.compile for it.
    """

    at: torch.device
    casts: set[torch.dtype]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, dtype: torch.dtype, at: torch.device, casts: set[torch.dtype]) -> _Probe:
        shape = torch.empty(2, 2, dtype=dtype, device="meta")
        made: Any = Tensor._make_subclass(
            cls, shape, False, dispatch_device=True, device_for_backend_keys=at
        )
        made.at, made.casts = at, casts
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first: Any = tensors_in(args, kwargs or {})[0]
        if func is torch.ops.prim.device.default:
            return first.at
        dtypes = [each for each in (*args, *(kwargs or {}).values()) if type(each) is torch.dtype]
        first.casts.update(dtypes)
        if func is torch.ops.aten.to.dtype or func is torch.ops.aten._to_copy.default:
            return cls(dtypes[0], first.at, first.casts)
        raise _Reached


def _arguments(overload: OpOverload, tensors: Iterator[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of the right types; the shapes need not fit, as the op never runs."""
    plain: Mapping[str, Any] = {
        "int": 1,
        "float": 1.0,
        "number": 1,
        "bool": False,
        "str": "ij,jk->ik",
        "List[int]": [1],
        "Optional[int]": None,
    }
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in overload._schema.arguments:
        kind = str(argument.type)
        if kind in ("Tensor", "List[Tensor]"):
            value: Any = next(tensors)
            value = value if kind == "Tensor" else [value, next(tensors)]
        elif argument.has_default_value():
            continue
        elif kind == "List[Optional[Tensor]]":
            value = [None]
        else:
            value = plain.get(kind)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _casts(
    overload: OpOverload, device_type: str, lower: torch.dtype, dtypes: tuple[torch.dtype, ...]
) -> set[torch.dtype] | str:
    """What one op's inputs of ``dtypes``, in turn, are cast to; or BANNED."""
    casts: set[torch.dtype] = set()
    at = torch.device(device_type)
    args, kwargs = _arguments(overload, (_Probe(it, at, casts) for it in itertools.cycle(dtypes)))
    name = overload._schema.name.removeprefix("aten::")
    call = getattr(torch._C._VariableFunctions, name) if name in _DEPRECATED else overload
    with autocast_without_device(device_type, lower), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Autograd would ask for the device.
        below = torch._C._AutoDispatchBelowAutograd()
        try:
            call(*args, **kwargs)
        except RuntimeError as error:
            if "unsafe to autocast" in str(error):
                return BANNED
        except (_Reached, IndexError, TypeError, ValueError, NotImplementedError):
            pass
        finally:
            del below
    return casts


@functools.cache
def category(overload: OpOverload, device_type: str) -> Category | str:
    """The category torch registered for one overload, :data:`BANNED`, or ``UNLISTED``."""
    key = "Autocast" + torch._C._dispatch_key_for_device(device_type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key):
        return Category.UNLISTED
    lower, fp32 = torch.bfloat16, torch.float32
    of_fp32 = _casts(overload, device_type, lower, (fp32,))
    if isinstance(of_fp32, str):
        return of_fp32
    if lower in of_fp32:
        return Category.LOWER_PRECISION
    if fp32 in _casts(overload, device_type, lower, (lower,)):
        return Category.FP32
    if fp32 in _casts(overload, device_type, lower, (lower, fp32)):
        return Category.PROMOTE
    return Category.UNLISTED


@functools.cache
def registered_overloads(device_type: str) -> Mapping[OpOverload, Category | str]:
    """Every overload torch registered an autocast kernel for, and its category."""
    key = "Autocast" + torch._C._dispatch_key_for_device(device_type)
    names = {
        full.removeprefix("aten::").partition(".")[0]
        for full in torch._C._dispatch_get_registrations_for_dispatch_key(key)
        if full.startswith("aten::")
    }
    return {
        overload: category(overload, device_type)
        for name in sorted(names)
        for overload in overloads(name)
        if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key)
    }


def registered(device_type: str) -> Mapping[str, Category | str]:
    """Every op torch registered an autocast kernel for, and its category.

    The dispatcher tells that a kernel is there but not what it does, so each is called once with
    fake inputs and watched until the op itself would start. No device is needed.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` and so on.

    Returns:
        Dispatcher op, without its overload, to category or :data:`BANNED`.
    """
    return {
        overload._schema.name.removeprefix("aten::"): category
        for overload, category in registered_overloads(device_type).items()
    }
