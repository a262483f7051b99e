"""Interfaces between a guard, communication hooks, replays and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

__all__ = ["COMM_HOOK_ATTR", "CommHookObserver", "ReplayObserver", "SnapshotSource"]

#: The attribute of a wrapper with the hook that `distamp.comm_hooks.register_comm_hook` gave it.
COMM_HOOK_ATTR = "_distamp_comm_hook"


@runtime_checkable
class CommHookObserver(Protocol):
    """A communication hook with error feedback, which follows a loss scale and skipped steps.

    The hook and the guard do not depend on each other's class.
    """

    def on_scale(self, scale: Tensor) -> None:
        """Receive the loss scale of the coming backward pass: 0-d float32."""

    def on_step(self, params: Sequence[Tensor] | None, found_inf: Tensor) -> None:
        """Receive whether the optimizer of ``params`` stepped (0) or skipped (1); None: of all."""

    def on_update(self) -> None:
        """Receive the end of an iteration, after the loss scale was updated."""


@runtime_checkable
class ReplayObserver(Protocol):
    """A replay of skipped steps that finds the reason: `distamp.report.StepReplay`."""

    def record(self, step: Callable[[], Any], *batches: Any) -> None:
        """Record a step before it runs."""

    def on_update(
        self,
        was_skipped: Callable[[], bool],
        has_loss_scale: bool,
        params: Sequence[Tensor],
        process_group: Any = None,
    ) -> None:
        """Replay the recorded step if it was skipped, before the loss scale is updated.

        Args:
            was_skipped: Reads whether a step was skipped, after a wait for the device.
            has_loss_scale: Whether a loss scale may be the reason.
            params: The tensors that the optimizers step: masters if there are some.
            process_group: The ranks that skipped the step.
        """


@runtime_checkable
class SnapshotSource(Protocol):
    """An object with state that `distamp.guard.Snapshots` saves and writes back in place."""

    def snapshot_state(self) -> Any:
        """Return the live tensors and other values, in dicts, lists and tuples.

        `Snapshots` calls this to save the state, and again to find the tensors to write to. Tensors
        that other code may hold, and that must not change, are copies.
        """

    def load_snapshot_state(self, state: Any) -> None:
        """Load a saved state.

        Args:
            state: As `snapshot_state` returned it. Its tensors are the live ones, which have the
                saved values now. A new tensor is there for each live tensor that is missing or has
                another shape.
        """
