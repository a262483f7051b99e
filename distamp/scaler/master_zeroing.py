"""Whether ``optimizer.zero_grad()`` was called, which reaches masters and not the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["ZeroGradWitness"]


class ZeroGradWitness:
    """An empty gradient on the smallest master, laid there when a backward pass begins.

    ``zero_grad`` takes it away, or empties it with ``set_to_none=False``; nothing else does. It is
    sparse, so that it takes one element of memory and its emptiness is known without a wait.
    """

    def __init__(self) -> None:
        self._laid: tuple[Tensor, Tensor] | None = None

    @property
    def is_laid(self) -> bool:
        """Whether it lies somewhere, or was taken away from there."""
        return self._laid is not None

    def lay(self, masters: Iterable[Tensor]) -> None:
        """Lay it on the smallest of ``masters`` that has an element; on none if none has."""
        smallest = min((m for m in masters if m.numel()), key=Tensor.numel, default=None)
        if smallest is None:
            return
        empty = torch.sparse_coo_tensor(
            torch.zeros(smallest.dim(), 1, dtype=torch.int64, device=smallest.device),
            torch.zeros(1, device=smallest.device),
            smallest.shape,
            check_invariants=False,
        )
        smallest.grad = empty
        self._laid = (smallest, empty)

    def saw_zero_grad(self) -> bool:
        """Return whether ``zero_grad`` was called since it was laid; then it lies nowhere."""
        if self._laid is None:
            return False
        master, empty = self._laid
        if master.grad is None or (master.grad is empty and empty._nnz() == 0):
            self.lift()
            return True
        return False

    def lift(self) -> None:
        """Take it away."""
        if self._laid is not None:
            master, empty = self._laid
            if master.grad is empty:
                master.grad = None
            self._laid = None
