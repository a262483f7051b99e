"""What a guard or scaler knows of hooks and replays, and whose gradients count for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

__all__ = ["CommHook", "Replay", "is_stepped"]


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


@runtime_checkable
class Replay(Protocol):
    """Replay of a skipped step, which finds the reason: `distamp.report.StepReplay`."""

    def record(self, step: Callable[[], Any], *batches: Any) -> None:
        """Record a step before it runs."""

    def step_ended(
        self,
        skipped: Callable[[], bool],
        scaled: bool,
        stepped: Sequence[Tensor],
        process_group: Any = None,
    ) -> None:
        """Replay the step that was kept, if there is one and it was skipped.

        Before the scale moves. ``skipped`` waits for the device; ``scaled`` is whether a loss scale
        may be why; ``stepped`` are the optimizers' parameters, masters if they have some;
        ``process_group`` has the ranks that skipped it.
        """
