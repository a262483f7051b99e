"""Which arithmetic writes and reads wires on a device: torch's own ops, or kernels."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from distamp.comm_hooks import reference
from distamp.comm_hooks.error_feedback import Feedback
from distamp.comm_hooks.rows import Rows
from distamp.comm_hooks.wire import WireFormat

__all__ = ["Arithmetic", "arithmetic_for"]


class Arithmetic(Protocol):
    """Four pure functions, described in `distamp.comm_hooks.reference`."""

    NAME: str

    def encode_rows(
        self,
        wire: WireFormat,
        values: Tensor,
        out: Tensor,
        rows: Rows,
        *,
        divisor: float = 1.0,
        head: Tensor | None = None,
        feedback: Feedback | None = None,
    ) -> Tensor | None:
        """Write the wires of rows."""

    def decode_rows(self, wire: WireFormat, wires: Tensor, values: Tensor, rows: Rows) -> None:
        """Read the wires of rows."""

    def sum_rows(self, wire: WireFormat, wires: Tensor, total: Tensor, rows: Rows) -> None:
        """Add up several wires of the same row."""

    def sum_encode_rows(
        self,
        wire: WireFormat,
        wires: Tensor,
        out: Tensor,
        rows: Rows,
        *,
        head: Tensor | None = None,
        feedback: Feedback | None = None,
    ) -> Tensor | None:
        """Add up several wires of the same row, and write the wire of the sum."""


WITHOUT_TRITON = "torch ops, as Triton is not installed"


def arithmetic_for(device: torch.device) -> tuple[Arithmetic, str]:
    """Return the arithmetic for tensors of a device, and its name for `HookStats`."""
    if device.type != "cuda":
        return reference, reference.NAME
    try:
        from distamp.comm_hooks import kernels
    except ImportError:
        return reference, WITHOUT_TRITON
    return kernels, kernels.NAME
