"""A backward pass after ``unscale_``, which adds scaled gradients to unscaled ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distamp.gradients import local_of, version_of
from distamp.scaler.optimizer_state import Agreed
from distamp.sources import GradientSource

__all__ = ["watch"]


def watch(scaled: Tensor, unscaled: Sequence[tuple[Agreed, GradientSource]]) -> None:
    """Mark those whose gradients the backward pass of ``scaled`` changes.

    Called only while some optimizer is between ``unscale_`` and ``step``. Passes through compiled
    autograd, and gradients that a wrapper writes after the pass has ended, are not seen.
    """

    def begins(_: Tensor) -> None:
        before = [_versions(source) for _, source in unscaled]
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def ended() -> None:
            for (agreed, source), old in zip(unscaled, before, strict=True):
                agreed.late |= _versions(source) != old

        # Queued twice: wrappers that queue their own callbacks in the pass come before the second.
        queue(lambda: queue(ended))

    if scaled.requires_grad:
        scaled.register_hook(begins)


def _versions(source: GradientSource) -> list[tuple[int, int] | None]:
    """Return which tensor each gradient is, and how often it was written to."""
    tensors = {id(p): p for pair in source.stepped() for p in pair}
    tensors.update((id(p), p) for p in source.parameters())
    gradients = [tensor.grad for tensor in tensors.values()]
    return [None if g is None else (id(g), version_of(local_of(g))) for g in gradients]
