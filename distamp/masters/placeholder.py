"""Placeholders: the form of a split master between steps, while it has no float32 values."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from distamp.errors import CallOrderError
from distamp.grads import to_local

__all__ = ["allocate_values", "release_values"]

_WRITE_ERROR = (
    "{operation} writes to a split master between steps. The master has no float32 values then, so "
    "the write would be lost. Write inside `with masters.materialized():`, where masters is "
    "masters_of(optimizer). Or use whole masters: MasterParameters(optimizer), or "
    "master_weights=True in initialize."
)


def release_values(master: Tensor) -> None:
    """Free the values of a split master: reads return NaN, and writes raise CallOrderError.

    The caller is under no_grad.
    """
    local = to_local(master)
    local.data = local.new_full((), math.nan).expand(local.shape)
    for tensor in (master, local):
        if not isinstance(tensor, _Placeholder):
            # torch also changes the class of a parameter in place, in UninitializedParameter.
            tensor.__class__ = _placeholder_class(type(tensor))


def allocate_values(master: Tensor, remainder: Tensor) -> None:
    """Allocate the values of a split master, and restore the class that optimizers expect.

    The caller is under no_grad.

    Args:
        master: A placeholder, or a master that has values.
        remainder: Has the shape and strides of the master's local tensor.
    """
    local = to_local(master)
    for tensor in (master, local):
        if isinstance(tensor, _Placeholder):
            tensor.__class__ = tensor.replaced_class  # type: ignore[assignment]
    local.data = torch.empty_like(remainder, dtype=torch.float32)


class _Placeholder:
    """The methods of a placeholder; a mixin, because a master may be a Tensor or a DTensor."""

    __slots__ = ()
    replaced_class: type[Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse a function that writes to a placeholder; run all others as on a plain tensor."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        output = args[0] if args and _writes_first_argument(func, name) else kwargs.get("out")
        outputs = output if isinstance(output, list | tuple) else [output]
        if any(isinstance(tensor, _Placeholder) for tensor in outputs):
            operation = ".data =" if name == "__set__" else f"{name}()"
            raise CallOrderError(_WRITE_ERROR.format(operation=operation))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func in (Tensor.detach, Tensor.data.__get__):  # type: ignore[attr-defined]
            # The result is an alias, and writes to an alias would be lost as well.
            result.__class__ = type(args[0])
        return result


def _writes_first_argument(func: Any, name: str) -> bool:
    """Return whether a torch function is in-place, by torch's convention of a last underscore."""
    if name.endswith("_") and not name.endswith("__"):
        return name != "requires_grad_"
    return name == "__setitem__" or func == Tensor.data.__set__  # type: ignore[attr-defined]


@functools.cache
def _placeholder_class(replaced_class: type[Tensor]) -> type[Tensor]:
    """Return the class of placeholders for masters of this class."""
    attributes = {"__slots__": (), "replaced_class": replaced_class}
    name = f"Placeholder{replaced_class.__name__}"
    return type(name, (_Placeholder, replaced_class), attributes)
