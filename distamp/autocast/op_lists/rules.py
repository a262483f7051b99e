"""Rules of op lists: categories, and the casts that carry them out."""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_cache_enabled, is_grad_enabled
from torch._C import DispatchKey

from distamp.autocast.tensors import tensors_in
from distamp.autocast.threads.thread_state import local

__all__ = [
    "CASTABLE",
    "Category",
    "Rule",
    "cast",
    "cast_any",
    "cast_list",
    "stash",
    "stashed",
    "widest",
]

_TLS_KEY = "distamp.op_lists"


def _stash_steals() -> bool:
    """Whether torch takes the caller's reference to a stashed object, as 2.11 does by mistake."""
    probe = object()
    count = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_TLS_KEY, probe)
    steals = sys.getrefcount(probe) == count
    if steals:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return steals


def _stash_with_a_reference(value: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(_TLS_KEY, value)


# Keeps an object with this thread's dispatch keys. They travel together into autograd's own
# threads, which a threading.local would not.
stash: Callable[[object], None] = (
    _stash_with_a_reference
    if _stash_steals()
    else functools.partial(torch._C._stash_obj_in_tls, _TLS_KEY)
)


def stashed() -> Any:
    """What this thread, or the one whose backward this thread runs, has stashed."""
    return torch._C._get_obj_in_tls(_TLS_KEY)


# Everything floating point but float64, which autocast leaves as it is.
CASTABLE = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype != torch.float64
)


class Category(Enum):
    """What autocast does with an op's inputs."""

    LOWER_PRECISION = "lower_precision"
    FP32 = "fp32"
    PROMOTE = "promote"
    UNLISTED = "unlisted"


@dataclass(frozen=True, slots=True)
class Rule:
    """What one op does with tensors of one device type."""

    device_type: str
    category: Category
    key: DispatchKey  # Where torch's own list for this device type is registered.

    @classmethod
    def of(cls, device_type: str, category: Category) -> Rule:
        """The rule that gives an op a category on a device type."""
        name = "Autocast" + torch._C._dispatch_key_for_device(device_type)
        return cls(device_type, category, getattr(DispatchKey, name))


def cast(arg: Tensor, to: torch.dtype, rule: Rule) -> Tensor:
    """Cast a tensor of a castable dtype by the rule of torch's cached_cast."""
    if arg.device.type != rule.device_type:
        return arg
    state = local.state
    if (
        to is torch.float32
        or arg.dtype is not torch.float32
        or not arg.requires_grad
        or not arg.is_leaf
        # torch also keeps casts made under no_grad, and a later use then has no gradient.
        or not is_grad_enabled()
        or not is_autocast_cache_enabled()
        or arg._is_view()
        # One of autograd's own threads has nothing that would drop the casts again.
        or state.lists is None
        # A cast made in a functorch transform does not outlive it.
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return arg.to(to)
    kept = state.weights.get(id(arg))
    if kept is not None and kept[0]() is arg and kept[1] == arg._version and kept[2].dtype is to:
        return kept[2]  # type: ignore[no-any-return]
    made = arg.to(to)
    state.weights[id(arg)] = (weakref.ref(arg), arg._version, made)
    return made


def cast_list(args: Sequence[Tensor], to: torch.dtype, rule: Rule) -> Sequence[Tensor]:
    """Cast the tensors of a list, which is handed on as it is if there is nothing to cast."""
    for arg in args:
        if arg.dtype is not to and arg.dtype in CASTABLE:
            return [cast_any(each, to, rule) for each in args]
    return args


def cast_any(arg: Any, to: torch.dtype, rule: Rule) -> Any:
    """Cast a tensor, or the tensors of a list; hand on anything else."""
    if isinstance(arg, Tensor):
        return cast(arg, to, rule) if arg.dtype is not to and arg.dtype in CASTABLE else arg
    if isinstance(arg, list | tuple) and all(isinstance(item, Tensor) for item in arg):
        return cast_list(arg, to, rule)
    return arg


def widest(args: Sequence[Any], rule: Rule) -> torch.dtype:
    """The dtype a promote op runs in: the widest of its inputs but float64."""
    dtypes = {
        tensor.dtype
        for tensor in tensors_in(args)
        if tensor.dtype in CASTABLE and tensor.device.type == rule.device_type
    }
    return reduce(torch.promote_types, dtypes, get_autocast_dtype(rule.device_type))
