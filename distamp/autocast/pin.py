"""pin_precision: one module of a model in a precision of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from distamp.autocast.op_names import nearest
from distamp.autocast.region import autocast

__all__ = ["pin_precision"]

_M = TypeVar("_M", bound=nn.Module)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HALF = (torch.float16, torch.bfloat16)


def pin_precision(module: _M, dtype: str | torch.dtype | None) -> _M:
    """Make a module, and the modules inside it, compute in one precision in whatever region.

    What torch needs a nested ``autocast(enabled=False)`` and casts of the inputs for, where the
    module is called. ``"fp32"`` runs it with autocast off and casts half precision inputs; a half
    precision runs it in a region of that dtype, inside a region or not. Apex's counterpart is
    ``@float_function`` on ``forward``. The module becomes an instance of a subclass of its class,
    so hooks, FSDP2, ``torch.compile``, copies and pickles keep working.

    Args:
        module: The module; it is changed in place.
        dtype: ``"fp32"``, ``"fp16"``, ``"bf16"`` or one of these as a :class:`torch.dtype`; None
            lets the module follow the region it is called in again.

    Returns:
        The module.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: Another ``dtype``; or a scripted module, or one whose ``forward`` is its own.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, got {type(module).__name__}; around a call "
            "use autocast(device_type, enabled=False)"
        )
    chosen: Any = _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if chosen is not None and chosen not in _DTYPES.values():
        hint = nearest(dtype, _DTYPES)
        raise ValueError(f"precision must be 'fp32', 'fp16' or 'bf16', got {dtype!r}{hint}")
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        raise ValueError(
            f"the forward of this {type(module).__name__} is not its class's, and cannot be "
            "pinned; pin it before it is scripted or its forward replaced"
        )
    plain: Any = module
    before: Any = getattr(module, "unpinned_class", type(module))
    plain.__class__ = before if chosen is None else _pinned_class(before, chosen)
    return module


class _Pinned:
    """What is put before a module's class, as an instance's forward would be shared by copies."""

    unpinned_class: type[nn.Module]
    pinned_to: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        dtype = self.pinned_to
        full = dtype is torch.float32
        if full:
            args, kwargs = tree_map_only(Tensor, _to_fp32, (args, kwargs))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        of = (*tensors, *module.parameters())
        devices = dict.fromkeys(each.device.type for each in of) or ["cpu"]
        run = functools.partial(super().forward, *args, **kwargs)  # type: ignore[misc]
        available = [each for each in devices if torch.amp.is_autocast_available(each)]
        return _in_regions(available, None if full else dtype, run)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the class before does, by its own methods, and pin again."""
        reduced: Any = super().__reduce_ex__(protocol)
        function, args, *rest = reduced
        args = tuple(self.unpinned_class if each is type(self) else each for each in args)
        return (_remade, (self.unpinned_class, self.pinned_to, function, args), *rest)


def _in_regions(devices: list[str], dtype: torch.dtype | None, run: Callable[[], Any]) -> Any:
    """Call ``run`` in a region for each device type, which is off where there is no dtype."""
    if not devices:
        return run()
    with autocast(devices[0], dtype, dtype is not None):
        return _in_regions(devices[1:], dtype, run)


@functools.cache
def _pinned_class(before: Any, dtype: torch.dtype) -> type[nn.Module]:
    """The one class for these, so that modules of it are of one type, before and after pickling."""
    body = {"unpinned_class": before, "pinned_to": dtype, "__doc__": before.__doc__}
    body |= {"__module__": before.__module__, "__qualname__": before.__qualname__}
    return type(before.__name__, (_Pinned, before), body)


def _remade(
    before: Any, dtype: torch.dtype, function: Callable[..., nn.Module], args: Any
) -> nn.Module:
    module = function(*args)
    module.__class__ = _pinned_class(before, dtype)
    return module


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
