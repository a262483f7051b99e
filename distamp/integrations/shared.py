"""What the modules for trainers have in common: a scaler of ours, and what it is asked."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from distamp.autocast import autocast
from distamp.errors import SettingError, StageError
from distamp.scaler import DistGradScaler

__all__ = [
    "MixedMixin",
    "ShardedMixin",
    "checked_scaler",
    "lightning_package",
    "skipped_steps",
    "unscale_once",
    "was_skipped",
]


def lightning_package(name: str) -> Any:
    """Import ``lightning.pytorch`` or ``lightning.fabric``, or the package it is alone.

    Both come in two packages, whose classes are not each other's. The one that is imported already
    is taken; ``lightning``'s where both or none are.

    Args:
        name: ``"pytorch"`` or ``"fabric"``.

    Raises:
        ModuleNotFoundError: Neither is installed.
    """
    names = [f"lightning.{name}", "pytorch_lightning" if name == "pytorch" else f"lightning_{name}"]
    if names[1] in sys.modules and names[0] not in sys.modules:
        names.reverse()
    for each in names:
        try:
            return importlib.import_module(each)
        except ModuleNotFoundError as error:
            if error.name not in (each, each.split(".")[0]):
                raise
    raise ModuleNotFoundError(
        f"distamp's part for Lightning needs {' or '.join(names)}, and neither is installed: "
        "pip install lightning",
        name="lightning",
    )


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


def _scaler_for(
    precision: str, given: object, device: str | None, settings: dict[str, Any]
) -> DistGradScaler | None:
    """Return the scaler of one of Lightning's precisions; None where losses are not scaled."""
    if precision == "16-mixed":
        return checked_scaler(given, device, settings)
    unused = [*(["scaler"] if given is not None else []), *sorted(settings)]
    if unused:
        raise SettingError(
            f"precision={precision!r} does not scale losses, so {', '.join(unused)} cannot be set; "
            "leave them out, or pass precision='16-mixed'"
        )
    return None


class MixedMixin:
    """Put before ``MixedPrecision`` of Lightning's Trainer or Fabric: its scaler is distamp's."""

    def __init__(
        self, precision: str, device: str, scaler: DistGradScaler | None = None, **settings: Any
    ) -> None:
        """Make the plugin, and its scaler.

        Args:
            precision: ``"16-mixed"`` or ``"bf16-mixed"``.
            device: The device type of the autocast region and of the loss scale.
            scaler: A `DistGradScaler`; None makes one.
            settings: Keyword settings of the scaler that is made, such as ``init_scale``.

        Raises:
            ValueError: Another precision, or a scaler or its settings at ``"bf16-mixed"``.
            TypeError: ``scaler`` is another scaler.
        """
        given: tuple[Any, ...] = (
            precision,
            device,
            _scaler_for(precision, scaler, device, settings),
        )
        super().__init__(*given)


class ShardedMixin:
    """Put before ``FSDPPrecision`` of Lightning's Trainer or Fabric: its scaler is distamp's."""

    def __init__(
        self, precision: str, scaler: DistGradScaler | None = None, **settings: Any
    ) -> None:
        """Make the plugin, and its scaler.

        Args:
            precision: What Lightning's takes: ``"16-mixed"``, ``"bf16-mixed"``, ``"32-true"``, ...
            scaler: A `DistGradScaler`; None makes one at ``"16-mixed"``.
            settings: Keyword settings of the scaler that is made, such as ``init_scale``.

        Raises:
            ValueError: Another precision, or a scaler or its settings where none is used.
            TypeError: ``scaler`` is another scaler.
        """
        theirs: Any = super()
        theirs.__init__(precision)
        # What FSDP reduced in float16 it gives to the optimizer in the parameters' float32.
        self.scaler = _scaler_for(precision, scaler, None, settings)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the region of float16 for the device that is there; Lightning's is for CUDA."""
        theirs: Any = super()
        if self.scaler is None:
            return theirs.forward_context()  # type: ignore[no-any-return]
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return autocast("cpu" if accelerator is None else accelerator.type, dtype=torch.float16)


def unscale_once(scaler: DistGradScaler | None, optimizer: Any) -> None:
    """Unscale the gradients of an optimizer that are not unscaled yet."""
    if scaler is not None and not scaler.is_unscaled(optimizer):
        scaler.unscale_(optimizer)


def was_skipped(scaler: DistGradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's last step was skipped; False before the first; may wait."""
    try:
        return not scaler.stepped(optimizer)
    except StageError:
        return False


def skipped_steps(scaler: DistGradScaler, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return how many steps of these optimizers were skipped so far; may wait."""
    scaler.add_optimizer(*optimizers)
    return sum(scaler.step_counts(optimizer).skipped for optimizer in optimizers)
