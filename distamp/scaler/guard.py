"""Notice a backward pass through a scaled loss that adds to gradients already unscaled."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import Variable

from distamp.scaler.stages import Record

__all__ = ["watch_backward"]

Unscaled = Iterable[tuple[Record, list[Tensor]]]


def watch_backward(scaled: Tensor, unscaled: Callable[[], Unscaled]) -> None:
    """Mark records whose gradients change during a backward pass through ``scaled``.

    One hook on the scaled loss, none on parameters: it does nothing unless an optimizer is between
    ``unscale_`` and ``step`` when a backward pass starts. Gradients that a wrapper writes after the
    pass has ended (none of torch's does) would be missed.

    Args:
        scaled: What ``scale()`` returned.
        unscaled: Returns the record and the parameters of every optimizer in stage UNSCALED.
    """
    if not scaled.requires_grad or torch.compiler.is_compiling():
        return

    def on_backward(gradient: Tensor) -> None:
        before = [(record, ps, _versions(ps)) for record, ps in unscaled()]
        if before:
            _at_end_of_backward(lambda: _mark(before))

    scaled.register_hook(on_backward)


def _versions(parameters: list[Tensor]) -> list[tuple[int, int] | None]:
    return [None if (g := p.grad) is None else (id(g), g._version) for p in parameters]


def _mark(before: list[tuple[Record, list[Tensor], list[tuple[int, int] | None]]]) -> None:
    for record, parameters, versions in before:
        if _versions(parameters) != versions:
            record.late_gradients = True


def _at_end_of_backward(callback: Callable[[], None]) -> None:
    # Queued twice: wrappers that queue their own callbacks during the pass come before the second.
    queue = Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))
