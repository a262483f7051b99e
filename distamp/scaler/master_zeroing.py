"""Whether ``optimizer.zero_grad()`` was called, which reaches masters and not the model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from distamp.scaler.master_pair import local_of

__all__ = ["ZeroGradWitness"]


class ZeroGradWitness:
    """A gradient of one master that ``zero_grad`` takes away, or empties.

    While a backward pass is under way masters have no gradients, so one is made for the smallest:
    sparse, which takes one element of memory, and says without a wait whether it was emptied. After
    a step the gradient that was stepped serves.

    Attributes:
        in_backward: Whether it was laid as a backward pass began, so that whatever the model's
            gradients hold by then is older than a ``zero_grad`` seen afterwards.
    """

    def __init__(self) -> None:
        self.in_backward = False
        self._master: Tensor | None = None
        self._laid: Tensor | None = None
        self._stepped: weakref.ref[Tensor] | None = None
        self._version = 0

    def lay(self, masters: Iterable[Tensor], *, in_backward: bool) -> None:
        """Lay a gradient on the smallest of ``masters`` that has an element, if one has."""
        self.lift()
        smallest = min((m for m in masters if m.numel()), key=Tensor.numel, default=None)
        if smallest is None:
            return
        laid = torch.sparse_coo_tensor(
            torch.zeros(smallest.dim(), 1, dtype=torch.int64, device=smallest.device),
            torch.zeros(1, device=smallest.device),
            smallest.shape,
            check_invariants=False,
        )
        smallest.grad = laid
        self._master, self._laid, self.in_backward = smallest, laid, in_backward

    def find(self, masters: Sequence[Tensor]) -> None:
        """Let the smallest gradient that was stepped serve; lay one if there is none."""
        self.lift()
        held = [master for master in masters if master.numel() and master.grad is not None]
        if not held:
            self.lay(masters, in_backward=False)
            return
        smallest = min(held, key=Tensor.numel)
        assert smallest.grad is not None
        # Not kept alive: under FSDP1 it may be the gradient of the whole shard.
        self._master, self._stepped = smallest, weakref.ref(smallest.grad)
        self._version = local_of(smallest.grad)._version

    def saw_zero_grad(self) -> bool:
        """Return whether ``zero_grad`` was called since; the witness is gone then."""
        if self._master is None:
            return False
        now = self._master.grad
        if now is None:
            seen = True
        elif self._laid is not None:
            seen = now is self._laid and now._nnz() == 0
        else:
            assert self._stepped is not None
            seen = now is self._stepped() and local_of(now)._version != self._version
        if seen:
            self.lift()
        return seen

    def lift(self) -> None:
        """Take away what was laid."""
        if self._master is not None and self._laid is not None and self._master.grad is self._laid:
            self._master.grad = None
        self._master = self._laid = self._stepped = None
        self.in_backward = False
