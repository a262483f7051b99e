"""pin_precision: one module in a precision of its own, whatever region it is called in."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from distamp.autocast.mixin import Mixin, add
from distamp.autocast.region import autocast
from distamp.autocast.tensors import tensors_in

__all__ = ["pin_precision"]

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


class pin_precision:  # noqa: N801 - reads as the verb it is, like torch.no_grad.
    """Pin one module, and all modules in it, to a precision.

    ``"fp32"`` runs the module with autocast off, and casts its fp16 and bf16 inputs to float32, so
    that it accepts half-precision results of other modules; with torch, you write both by hand.
    ``"fp16"`` and ``"bf16"`` run it in an autocast region of that dtype, also if it is called
    outside of a region. The pin applies to the device types of all inputs and parameters.

    It starts at once, and lasts until :meth:`undo`, or until the end of the ``with`` block if it is
    used as one. A module can be pinned again inside a pin; the last one counts. Backward
    needs no pin: it runs in the dtypes of forward. Copies, replicas and pickles of the module keep
    the pin.

    Args:
        module: The module to pin. Its parameters do not change.
        dtype: ``"fp32"``, ``"fp16"``, ``"bf16"``, or the :class:`torch.dtype`.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: ``dtype`` is another precision.
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
        add(module, _Pinned, chosen)
        self._pinned = type(module)

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

    def __enter__(self) -> pin_precision:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.undo()


class _Pinned(Mixin, nn.Module):
    _attribute = "_pinned_to"
    _pinned_to: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._pinned_to is torch.float32:
            args, kwargs = tree_map_only(Tensor, _to_fp32, (args, kwargs))
        tensors = (*tensors_in(args, kwargs), *self.parameters())
        devices = dict.fromkeys(each.device.type for each in tensors)
        return _pinned(
            super().forward,
            args,
            kwargs,
            [each for each in devices or ("cpu",) if torch.amp.is_autocast_available(each)],
            self._pinned_to,
        )


def _pinned(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device_types: list[str],
    dtype: torch.dtype,
) -> Any:
    """Call ``forward`` in a region for each device type."""
    if not device_types:
        return forward(*args, **kwargs)
    half = dtype is not torch.float32
    with autocast(device_types[0], dtype if half else None, half):
        return _pinned(forward, args, kwargs, device_types[1:], dtype)


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
