"""precision: one module in a precision of its own, whatever region it is called in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

__all__ = ["precision"]

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


class precision:  # noqa: N801 - reads as the verb it is, like torch.no_grad.
    """Pin one module, and all modules in it, to a precision.

    ``"fp32"`` runs the module with autocast off, and casts the fp16 and bf16 tensors it is called
    with to float32, so that a half result of the module before it does not stop it; torch has the
    user write both by hand. ``"fp16"`` and ``"bf16"`` run it in an autocast region of that dtype,
    also where it is called outside of one.

    The pin takes hold at once. It lasts until :meth:`undo`, or until the end of the ``with`` block
    if it is used as one. A module can be pinned again inside a pin; the last one counts. Backward
    needs no pin: it runs in the dtypes of forward. Copies, replicas and pickles of the module keep
    the pin.

    Args:
        module: The module to pin. Its parameters are left as they are.
        dtype: ``"fp32"``, ``"fp16"``, ``"bf16"``, or the :class:`torch.dtype`.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: Another precision.
    """

    def __init__(self, module: nn.Module, dtype: str | torch.dtype) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if chosen is None or chosen not in _DTYPES.values():
            raise ValueError(f"precision must be 'fp32', 'fp16' or 'bf16', got {dtype!r}")
        self.module = module
        self.dtype: torch.dtype = chosen
        if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
            raise ValueError(
                f"the forward of this {type(module).__name__} is not its class's, and cannot be "
                "pinned; pin it before it is scripted or its forward replaced"
            )
        self._undone = False
        self._before = type(module)
        unpinned: type[nn.Module] = vars(self._before).get("_unpinned", self._before)
        self._pinned = _pinned_class(unpinned, self.dtype)
        module.__class__ = self._pinned

    def undo(self) -> None:
        """Let the module follow the region it is called in again.

        Raises:
            RuntimeError: The module was pinned again since; undo that first.
        """
        if self._undone:
            return
        if type(self.module) is not self._pinned:
            raise RuntimeError(
                f"the module became a {type(self.module).__name__} since it was pinned; undo that "
                "first"
            )
        self.module.__class__ = self._before
        self._undone = True

    def __enter__(self) -> precision:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.undo()


_classes: dict[tuple[type[nn.Module], torch.dtype], type[nn.Module]] = {}


def _pinned_class(base: type[nn.Module], dtype: torch.dtype) -> type[nn.Module]:
    """``base`` with its forward in a precision of its own.

    A class and not a wrapped ``module.forward``, which copies and replicas of the module would
    share with it, weights and all.
    """
    if (base, dtype) in _classes:
        return _classes[base, dtype]
    fp32 = dtype is torch.float32

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device_type = _device_type(self, args, kwargs)
        if fp32:
            args, kwargs = tree_map_only(Tensor, _to_fp32, (args, kwargs))
        with torch.autocast(device_type, dtype=None if fp32 else dtype, enabled=not fp32):
            return base.forward(self, *args, **kwargs)

    def reduce(self: nn.Module) -> Any:
        return _rebuild, (base, dtype), vars(self).copy()

    body = {"forward": forward, "__reduce__": reduce, "_unpinned": base, "__doc__": base.__doc__}
    pinned = type(base.__name__, (base,), body)
    pinned.__module__, pinned.__qualname__ = base.__module__, base.__qualname__
    return _classes.setdefault((base, dtype), pinned)


def _rebuild(base: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    pinned = _pinned_class(base, dtype)
    return pinned.__new__(pinned)


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _device_type(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Where the module computes: where its inputs lie, else its parameters."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor):
            return arg.device.type
    for parameter in module.parameters():
        return parameter.device.type
    return "cpu"
