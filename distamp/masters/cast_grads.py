"""Casts of half-precision gradients to the fp32 gradients of masters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from distamp.grads import to_local
from distamp.masters.chunks import iter_chunks

__all__ = ["cast_grads_"]


def cast_grads_(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[Tensor]]:
    """Set each master's gradient to its parameter's gradient in float32, and free the parameter's.

    A gradient is freed as soon as it is cast, so the gradients of the whole model never take memory
    twice. The caller unscales and checks each chunk while a cache holds it.

    Args:
        pairs: Parameters that have gradients, each with its master.

    Yields:
        Local dense gradients of masters on one device, after the cast.
    """
    for grads, master_grads in iter_chunks(_iter_local_grads(pairs)):
        torch._foreach_copy_(master_grads, grads)
        # The variable would hold this chunk's gradients while the next chunk is created.
        del grads
        yield master_grads


def _iter_local_grads(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the local gradients of each parameter and master, and hold no reference to them."""
    for param, master in pairs:
        grad, param.grad = param.grad, None
        assert grad is not None
        if grad.is_sparse:
            # Values of the same row are summed in float32, because float16 may overflow.
            master.grad = grad.float().coalesce()
            local_master_grad = master.grad.values()
            local_grad = local_master_grad
        else:
            master.grad = torch.empty_like(grad, dtype=torch.float32)
            local_master_grad = to_local(master.grad)
            local_grad = to_local(grad)
        row = (local_grad, local_master_grad)
        del grad, local_grad, local_master_grad
        yield row
        del row
