"""What the modules for trainers have in common: what takes the steps, and what it is asked."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from distamp.autocast import autocast
from distamp.comm_hooks import comm_format
from distamp.errors import CallOrderError, ConfigError
from distamp.guard.step_guard import GUARD_KWARGS, StepGuard
from distamp.scaler import DistGradScaler

__all__ = [
    "MixedMixin",
    "PlainMixin",
    "ShardedMixin",
    "Stepper",
    "check_wire",
    "checked_scaler",
    "lightning_package",
    "scales",
    "skipped_steps",
    "stepper_for",
    "unscale_once",
    "was_skipped",
]


#: What takes the steps of a trainer on all ranks or on none.
Stepper: TypeAlias = DistGradScaler | StepGuard


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


def check_wire(name: str | None) -> None:
    """Refuse a wire format that there is not, where nothing is sent too, as in one process.

    Args:
        name: What `distamp.comm_hooks.register_comm_hook` takes; None for no hook.

    Raises:
        ValueError: There is none of that name.
    """
    if name is not None:
        comm_format(name)


def checked_scaler(given: object, device: str | None, settings: dict[str, Any]) -> DistGradScaler:
    """Return the scaler that a trainer was given, or one made from keyword settings.

    Args:
        given: A `DistGradScaler`, or None to make one.
        device: Its device type where one is made.
        settings: Keyword settings where one is made.

    Raises:
        TypeError: ``given`` is another scaler, whose ranks would not step together.
        ConfigError: Both a scaler and settings were given.
    """
    if given is None:
        return DistGradScaler(device, **settings)
    if not isinstance(given, DistGradScaler):
        raise TypeError(
            f"scaler must be a distamp.DistGradScaler, not {type(given).__module__}."
            f"{type(given).__qualname__}; leave it out to have one made"
        )
    if settings:
        raise ConfigError(
            f"{', '.join(sorted(settings))} belong to the scaler, and one was given; set them there"
        )
    return given


def stepper_for(
    scales: bool, precision: str, given: object, device: str | None, settings: dict[str, Any]
) -> Stepper:
    """Return what takes the steps of a trainer: a scaler where it scales losses, else a guard.

    Args:
        scales: Whether it does.
        precision: The trainer's own word for its precision, for a message.
        given: What the user gave, or None to make one.
        device: The device type of a scaler that is made.
        settings: Keyword settings of what is made.

    Raises:
        TypeError: ``given`` is another scaler, whose ranks would not step together.
        ConfigError: Settings beside one that was given, or of a scaler where none is.
    """
    if scales:
        return checked_scaler(given, device, settings)
    unused = ["scaler"] if given is not None else []
    unused += sorted(set(settings) - {*GUARD_KWARGS})
    if unused:
        raise ConfigError(
            f"precision {precision!r} does not scale losses, so {', '.join(unused)} cannot be set; "
            f"leave them out, or train in fp16 ({', '.join(sorted(GUARD_KWARGS))} can be set)"
        )
    return StepGuard(**settings)


class MixedMixin:
    """Put before ``MixedPrecision`` of Lightning's Trainer or Fabric: steps are distamp's."""

    def __init__(
        self, precision: str, device: str, scaler: DistGradScaler | None = None, **settings: Any
    ) -> None:
        """Make the plugin, and what takes its steps.

        Args:
            precision: ``"16-mixed"`` or ``"bf16-mixed"``.
            device: The device type of the autocast region and of the loss scale.
            scaler: At ``"16-mixed"`` a `DistGradScaler`; None makes one.
            settings: Keyword settings of the scaler or the guard that is made, such as
                ``init_scale`` and ``max_consecutive_skips``.

        Raises:
            ValueError: Another precision, or a scaler or its settings at ``"bf16-mixed"``.
            TypeError: ``scaler`` is another scaler.
        """
        scales = precision == "16-mixed"
        stepper = stepper_for(scales, precision, scaler, device, settings)
        # Lightning's own refuses one where losses are not scaled.
        given: tuple[Any, ...] = (precision, device, stepper if scales else None)
        super().__init__(*given)
        self.scaler = stepper


class PlainMixin:
    """Put before ``Precision`` or ``HalfPrecision`` of Lightning's Trainer or Fabric."""

    def __init__(self, *precision: str, **settings: Any) -> None:
        """Make the plugin, and the guard that takes its steps.

        Args:
            precision: What Lightning's takes: nothing, or ``"bf16-true"``, ``"16-true"``.
            settings: Keyword settings of the `StepGuard`, such as ``max_consecutive_skips``.

        Raises:
            ValueError: Another precision, or settings of a loss scale.
        """
        super().__init__(*precision)
        name = precision[0] if precision else "32-true"
        self.scaler = stepper_for(False, name, None, None, settings)


class ShardedMixin:
    """Put before ``FSDPPrecision`` of Lightning's Trainer or Fabric: steps are distamp's."""

    def __init__(
        self, precision: str, scaler: DistGradScaler | None = None, **settings: Any
    ) -> None:
        """Make the plugin, and what takes its steps.

        Args:
            precision: What Lightning's takes: ``"16-mixed"``, ``"bf16-mixed"``, ``"32-true"``, ...
            scaler: At ``"16-mixed"`` a `DistGradScaler`; None makes one.
            settings: Keyword settings of the scaler or the guard that is made, such as
                ``init_scale`` and ``max_consecutive_skips``.

        Raises:
            ValueError: Another precision, or a scaler or its settings where none is used.
            TypeError: ``scaler`` is another scaler.
        """
        theirs: Any = super()
        theirs.__init__(precision)
        # What FSDP reduced in float16 it gives to the optimizer in the parameters' float32.
        self.scaler = stepper_for(precision == "16-mixed", precision, scaler, None, settings)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the region of float16 for the device that is there; Lightning's is for CUDA."""
        theirs: Any = super()
        if not scales(self.scaler):
            return theirs.forward_context()  # type: ignore[no-any-return]
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return autocast("cpu" if accelerator is None else accelerator.type, dtype=torch.float16)


def scales(stepper: object) -> bool:
    """Return whether this is a scaler; a guard divides by nothing."""
    return isinstance(stepper, DistGradScaler)


def unscale_once(stepper: Stepper, optimizer: Any) -> None:
    """Unscale the gradients of an optimizer that are not unscaled yet.

    A guard has nothing to divide by, and looks at them once, when it clips or steps.
    """
    if scales(stepper) and not stepper.is_unscaled(optimizer):
        stepper.unscale_(optimizer)


def was_skipped(stepper: Stepper, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's last step was skipped; False before the first; may wait."""
    try:
        return not stepper.step_was_taken(optimizer)
    except CallOrderError:
        return False


def skipped_steps(stepper: Stepper, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return how many steps of these optimizers were skipped so far; may wait."""
    stepper.register_optimizers(*optimizers)
    return sum(stepper.step_counts(optimizer).skipped for optimizer in optimizers)
