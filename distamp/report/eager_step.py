"""discard_updates: a block for a second run of a step without training the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distamp.fsdp_params import sharded_params
from distamp.optim_utils import params_of, view_of
from distamp.report.replay import StepSnapshot

__all__ = ["discard_updates"]


@contextmanager
def discard_updates(models: Sequence[nn.Module]) -> Iterator[None]:
    """Leave parameters, gradients, buffers, random states and optimizers as before the block.

    Optimizers of torch take no step inside, because they find no gradient.

    Args:
        models: The models that a step in the block trains.
    """
    snapshots = [StepSnapshot(model) for model in models]
    gradients: list[tuple[Tensor, Tensor | None]] = []
    for model in models:
        for param in sharded_params(model.parameters()):
            gradients.append((param, param.grad))
            param.grad = None
    hook = register_optimizer_step_pre_hook(_drop_gradients)
    try:
        yield
    finally:
        hook.remove()
        for snapshot in snapshots:
            snapshot.restore()
        for param, gradient in gradients:
            param.grad = gradient


def _drop_gradients(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Set the gradients of an optimizer, and of the parameters behind its masters, to None."""
    for param in params_of(optimizer):
        param.grad = None
    for param, stepped in view_of(optimizer).param_pairs():
        param.grad = stepped.grad = None
