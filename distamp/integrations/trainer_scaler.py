"""The scaler that a trainer's adapter calls: its methods, and functions to make and query one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from distamp.comm_hooks import comm_format
from distamp.errors import CallOrderError, ConfigError
from distamp.guard.step_guard import GUARD_KWARGS, StepGuard
from distamp.scaler import DistGradScaler

__all__ = [
    "Scaler",
    "ensure_unscaled",
    "is_loss_scaler",
    "make_guard",
    "make_loss_scaler",
    "skipped_steps",
    "validate_format",
    "was_skipped",
]


@runtime_checkable
class Scaler(Protocol):
    """The eight methods of a scaler or guard that an adapter for a trainer needs.

    `distamp.DistGradScaler` has these methods for fp16, and `distamp.StepGuard` for every other
    precision. An adapter that calls no other method therefore works in all precisions. The page
    docs/howto/adapter.md writes such an adapter.
    """

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the loss scale, before the backward pass."""

    def unscale_(self, *optimizers: Optimizer) -> None:
        """Divide the gradients of optimizers by the loss scale, and check them on all ranks.

        Collective: every rank of the process group must call this.
        """

    def clip_grad_norm_(
        self,
        optimizer_or_parameters: Optimizer | Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2.0,
    ) -> Tensor:
        """Unscale gradients, clip them by the norm of the whole model, and return the norm.

        Collective: every rank of the process group must call this.
        """

    def step(
        self,
        optimizer: Optimizer,
        *args: Any,
        max_norm: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer if no rank found inf or NaN, else skip the step on every rank.

        Collective: every rank of the process group must call this.
        """

    def update(self) -> None:
        """Update the loss scale after the steps of an iteration, and begin the next iteration.

        Collective: every rank of the process group must call this.
        """

    def step_was_taken(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer's last step was taken, equally on all ranks.

        Raises:
            CallOrderError: The optimizer has not stepped yet.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint of the trainer."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from a checkpoint of the trainer."""


# -- making a scaler -------------------------------------------------------------------------------


def make_loss_scaler(
    scaler: object, device: str | None, settings: dict[str, Any]
) -> DistGradScaler:
    """Return the scaler that the user passed to a trainer, or make one.

    Args:
        scaler: A `DistGradScaler`, or None to make one.
        device: The device type of a new scaler.
        settings: The keyword settings of a new scaler.

    Raises:
        TypeError: ``scaler`` has another class, with which ranks would step or skip separately.
        ConfigError: The user passed both a scaler and settings.
    """
    if scaler is None:
        return DistGradScaler(device, **settings)
    if not isinstance(scaler, DistGradScaler):
        scaler_type = type(scaler)
        raise TypeError(
            f"scaler must be a distamp.DistGradScaler, not a {scaler_type.__module__}."
            f"{scaler_type.__qualname__}. Leave scaler= out, and a new one is made."
        )
    if settings:
        raise ConfigError(
            f"scaler= was passed together with {_join(settings)}. A scaler has its own settings. "
            "Pass them to DistGradScaler(...)."
        )
    return scaler


def make_guard(precision: str, scaler: object, settings: dict[str, Any]) -> StepGuard:
    """Make the guard for a precision of a trainer in which no loss is scaled.

    Args:
        precision: The precision as the trainer's user spells it, for the error message.
        scaler: The scaler that the user passed, which must be None.
        settings: The keyword settings of the guard.

    Raises:
        ConfigError: The user passed a scaler, or a setting of a loss scale.
    """
    unused = set(settings) - set(GUARD_KWARGS)
    if scaler is not None:
        unused.add("scaler")
    if unused:
        raise ConfigError(
            f"Precision {precision!r} does not scale losses, so {_join(unused)} cannot be set. "
            f"Train in fp16, or leave out everything except {_join(GUARD_KWARGS)}."
        )
    return StepGuard(**settings)


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def validate_format(name: str | None) -> None:
    """Raise an error for a communication format that does not exist.

    A single process sends no gradients and never looks the format up, so adapters call this first.

    Args:
        name: A format of `distamp.comm_hooks.register_comm_hook`, or None for no hook.

    Raises:
        ValueError: No format has the name.
    """
    if name is not None:
        comm_format(name)


# -- querying a scaler -----------------------------------------------------------------------------


def is_loss_scaler(scaler: object) -> TypeGuard[DistGradScaler]:
    """Return whether the object scales losses; a guard does not."""
    return isinstance(scaler, DistGradScaler)


def ensure_unscaled(scaler: Scaler, optimizer: Any) -> None:
    """Unscale the gradients of an optimizer, unless they are unscaled already.

    A guard has no loss scale. It checks the gradients when it clips or steps.
    """
    if is_loss_scaler(scaler) and not scaler.is_unscaled(optimizer):
        scaler.unscale_(optimizer)


def was_skipped(scaler: Scaler, optimizer: Optimizer) -> bool:
    """Return whether the optimizer's last step was skipped; may wait for the device.

    Returns:
        False also before the first step.
    """
    try:
        return not scaler.step_was_taken(optimizer)
    except CallOrderError:
        return False


def skipped_steps(scaler: DistGradScaler | StepGuard, optimizers: Sequence[Optimizer]) -> int:
    """Return the number of steps of the optimizers that were skipped; may wait for the device."""
    scaler.register_optimizers(*optimizers)
    count = 0
    for optimizer in optimizers:
        count += scaler.step_counts(optimizer).skipped
    return count
