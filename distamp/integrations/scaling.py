"""What the modules for trainers have in common: a scaler of ours, and what it is asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from distamp.errors import SettingError, StageError
from distamp.scaler import DistGradScaler

__all__ = [
    "checked_scaler",
    "first_optimizer",
    "is_unscaled",
    "refuse_settings",
    "skipped_steps",
    "was_skipped",
]


def checked_scaler(given: object, device: str | None, settings: dict[str, Any]) -> DistGradScaler:
    """Return the scaler that a trainer was given, or one made from keyword settings.

    Args:
        given: A `DistGradScaler`, or None to make one.
        device: Its device type where one is made.
        settings: Keyword settings where one is made.

    Raises:
        TypeError: ``given`` is another scaler, whose ranks would not step together.
        SettingError: Both a scaler and settings were given.
    """
    if given is None:
        return DistGradScaler(device, **settings)
    if not isinstance(given, DistGradScaler):
        raise TypeError(
            f"scaler must be a distamp.DistGradScaler, not {type(given).__module__}."
            f"{type(given).__qualname__}; leave it out to have one made"
        )
    if settings:
        raise SettingError(
            f"{', '.join(sorted(settings))} belong to the scaler, and one was given; set them there"
        )
    return given


def refuse_settings(precision: str, scaler: object, settings: dict[str, Any]) -> None:
    """Refuse a scaler, or settings of one, at a precision that scales no losses.

    Raises:
        SettingError: One of them was given.
    """
    given = [*(["scaler"] if scaler is not None else []), *sorted(settings)]
    if given:
        raise SettingError(
            f"precision={precision!r} does not scale losses, so {', '.join(given)} cannot be set; "
            "leave them out, or pass precision='16-mixed'"
        )


def first_optimizer(wrapped: Any) -> Any:
    """Return the optimizer inside a trainer's wrappers."""
    while (inner := getattr(wrapped, "optimizer", None)) is not None and inner is not wrapped:
        wrapped = inner
    return wrapped


def is_unscaled(scaler: DistGradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's gradients were unscaled since the last ``update``."""
    stage = scaler._per_optimizer_states[id(first_optimizer(optimizer))]["stage"]
    return bool(stage.name == "UNSCALED")


def was_skipped(scaler: DistGradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's last step was skipped; False before the first; may wait."""
    try:
        return not scaler.stepped(first_optimizer(optimizer))
    except StageError:
        return False


def skipped_steps(scaler: DistGradScaler, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return how many steps of these optimizers were skipped so far; may wait."""
    skipped = 0
    for optimizer in map(first_optimizer, optimizers):
        try:
            skipped += scaler.step_counts(optimizer).skipped
        except StageError:  # has not been stepped yet
            continue
    return skipped
