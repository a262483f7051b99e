"""What a communication hook and a scaler know of each other, and whose gradients count for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["CommHook", "GradientWatch", "is_stepped"]


def is_stepped(parameter: Tensor) -> bool:
    """Return whether optimizers step it: one frozen after the backward pass has a gradient, too."""
    return parameter.requires_grad or parameter.grad is not None


class GradientWatch(Protocol):
    """What a communication hook knows of the gradients of some parameters."""

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole of each, and not a shard."""

    def exchanged(self) -> bool:
        """Return whether all of them came through the hook in this iteration; never waits."""

    def found_inf(self) -> Tensor:
        """Return a 0-d float32 flag, exactly 0 or 1 and the same on all ranks; never waits."""


@runtime_checkable
class CommHook(Protocol):
    """A communication hook that a scaler can be joined with.

    It yields found-inf of parameters, and hears of the loss scale and of skips; neither of the two
    knows the other's class.
    """

    def watch(self, parameters: Sequence[Tensor], ranks: Sequence[int]) -> GradientWatch | None:
        """Return what is known of the gradients of ``parameters``.

        Args:
            parameters: Those of one optimizer.
            ranks: The ranks, of the default group, that must agree.

        Returns:
            None unless all of them came through the hook at least once, dense, and were agreed on
            by all of ``ranks``.
        """

    def scale_changed(self, scale: Tensor, word: int) -> None:
        """Hear of the loss scale of the coming backward pass.

        Args:
            scale: 0-d float32.
            word: What must be the same on all ranks; not 0. The next exchange carries both.
        """

    def step_ended(self, parameters: Sequence[Tensor] | None, found_inf: Tensor) -> None:
        """Hear whether the optimizer of ``parameters`` stepped (0) or skipped (1); None: of all."""

    def iteration_ended(self) -> None:
        """Hear that the gradients seen so far have been used."""

    def ranks_mismatched(self) -> bool:
        """Return whether ranks sent different words since the last call.

        On an accelerator the answer is that of the iteration before, so that nothing is waited for.
        """
