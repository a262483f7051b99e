"""What a communication hook and a scaler know of each other, and whose gradients count for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["CommHook", "is_stepped"]


def is_stepped(parameter: Tensor) -> bool:
    """Return whether optimizers step it: one frozen after the backward pass has a gradient, too."""
    return parameter.requires_grad or parameter.grad is not None


@runtime_checkable
class CommHook(Protocol):
    """A communication hook that a scaler can be joined with.

    It is told the loss scale and which steps were skipped, which error feedback needs; neither of
    the two knows the other's class.
    """

    def scale_changed(self, scale: Tensor) -> None:
        """Take the loss scale of the coming backward pass: 0-d float32."""

    def step_ended(self, parameters: Sequence[Tensor] | None, found_inf: Tensor) -> None:
        """Note whether the optimizer of ``parameters`` stepped (0) or skipped (1); None: of all."""

    def iteration_ended(self) -> None:
        """Note that the gradients seen so far have been used."""
