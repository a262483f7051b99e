"""What the modules for trainers have in common: a scaler of ours, and what it is asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from distamp.autocast import autocast
from distamp.errors import SettingError, StageError
from distamp.scaler import DistGradScaler

__all__ = [
    "checked_scaler",
    "first_optimizer",
    "fp16_region",
    "scaler_for",
    "skipped_steps",
    "unscale_once",
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


def scaler_for(
    precision: str, given: object, device: str | None, settings: dict[str, Any]
) -> DistGradScaler | None:
    """Return the scaler of one of Lightning's precisions; None where losses are not scaled.

    Args:
        precision: ``"16-mixed"`` scales losses; ``"bf16-mixed"``, ``"32-true"`` and others do not.
        given: A `DistGradScaler`, or None to make one.
        device: Its device type where one is made.
        settings: Keyword settings where one is made.

    Raises:
        TypeError: ``given`` is another scaler.
        SettingError: A scaler or settings were given and are not used.
    """
    if precision == "16-mixed":
        return checked_scaler(given, device, settings)
    unused = [*(["scaler"] if given is not None else []), *sorted(settings)]
    if unused:
        raise SettingError(
            f"precision={precision!r} does not scale losses, so {', '.join(unused)} cannot be set; "
            "leave them out, or pass precision='16-mixed'"
        )
    return None


def fp16_region() -> autocast:
    """Return the autocast region of float16 under FSDP, for the device that is there.

    Lightning's own is for CUDA alone, and off without it.
    """
    accelerator = torch.accelerator.current_accelerator()
    return autocast("cpu" if accelerator is None else accelerator.type, dtype=torch.float16)


def first_optimizer(wrapped: Any) -> Any:
    """Return the optimizer inside a trainer's wrappers."""
    while (inner := getattr(wrapped, "optimizer", None)) is not None and inner is not wrapped:
        wrapped = inner
    return wrapped


def unscale_once(scaler: DistGradScaler | None, optimizer: Any) -> None:
    """Unscale the gradients of an optimizer that were not since the last ``update``."""
    if scaler is None:
        return
    optimizer = first_optimizer(optimizer)
    if scaler._per_optimizer_states[id(optimizer)]["stage"].name != "UNSCALED":
        scaler.unscale_(optimizer)


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
