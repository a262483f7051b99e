"""Gradients of a lower precision to fp32 gradients of masters, unscaled and checked in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from distamp.grads import to_local
from distamp.masters.blocks import blocks

__all__ = ["convert"]

#: A parameter of the model, whose gradient is read, and its master, whose gradient is written.
_Move = tuple[Tensor, Tensor]


def convert(moves: Iterable[_Move]) -> Iterator[list[Tensor]]:
    """Set each master's gradient to its parameter's in float32, and free the parameter's.

    Each is freed as soon as it is converted, so the gradient of the whole model never lies in
    memory twice.

    Args:
        moves: Parameters that have gradients, with their masters.

    Yields:
        Local dense gradients of one device, converted, while they lie in a cache.
    """
    for gradients, targets in blocks(_rows(moves)):
        torch._foreach_copy_(targets, gradients)
        del gradients  # before the next are made
        yield targets


def _rows(moves: Iterable[_Move]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each gradient and where it goes; what is yielded is the last that holds it."""
    for parameter, master in moves:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            # Values of one row are added up in float32, where they cannot overflow as in float16.
            master.grad = gradient.float().coalesce()
            gradient = values = master.grad.values()
        else:
            master.grad = torch.empty_like(gradient, dtype=torch.float32)
            gradient, values = to_local(gradient), to_local(master.grad)
        row = gradient, values
        del gradient
        yield row
        del row
