"""The code that the precision plugins for Lightning's Trainer and for Fabric share.

Trainer and Fabric have plugins of equal names and constructors, which are different classes. The
mixins of this module come before them in the list of bases.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from distamp.autocast import autocast
from distamp.guard import StepGuard
from distamp.integrations.trainer_scaler import (
    Scaler,
    is_loss_scaler,
    make_guard,
    make_loss_scaler,
)
from distamp.scaler import DistGradScaler

__all__ = [
    "FSDPPrecisionMixin",
    "FullPrecisionMixin",
    "MixedPrecisionMixin",
    "import_lightning",
    "step_and_update",
]

_STANDALONE_PACKAGES = {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"}

# A type checker takes the base class of the mixins for any class, because the next class in the
# method resolution order is a plugin of Lightning's.
_NextPlugin: Any = object


def import_lightning(part: str) -> Any:
    """Import ``lightning.pytorch`` or ``lightning.fabric``, or the package with that part alone.

    The two packages have different classes, so plugins must extend the classes of the package that
    the program imports. If neither or both are imported already, this function takes ``lightning``.

    Args:
        part: ``"pytorch"`` or ``"fabric"``.

    Raises:
        ModuleNotFoundError: Neither package is installed.
    """
    unified = f"lightning.{part}"
    standalone = _STANDALONE_PACKAGES[part]
    names = [unified, standalone]
    if standalone in sys.modules and unified not in sys.modules:
        names = [standalone, unified]
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            package = name.split(".")[0]
            if error.name not in (name, package):
                raise
    raise ModuleNotFoundError(
        f"distamp.integrations needs {unified} or {standalone}, and neither is installed. "
        "Run pip install lightning.",
        name="lightning",
    )


def step_and_update(scaler: Scaler, optimizer: Any, **kwargs: Any) -> Any:
    """Step the optimizer on all ranks or on none, and update the loss scale.

    Collective: every rank of the process group must call this.

    Args:
        scaler: The scaler or guard of the plugin.
        optimizer: The optimizer, or a wrapper that the trainer put around it.
        kwargs: Passed to the optimizer's ``step``.

    Returns:
        The result of the optimizer's ``step``; None for a skipped step.
    """
    output = scaler.step(optimizer, **kwargs)
    scaler.update()
    return output


class FullPrecisionMixin(_NextPlugin):
    """The constructor of ``Precision`` and ``HalfPrecision``, with a guard."""

    def __init__(self, *precision: str, **settings: Any) -> None:
        """Make the plugin and its guard.

        Args:
            precision: The argument of Lightning's plugin: nothing, ``"bf16-true"`` or
                ``"16-true"``.
            settings: Keyword settings of the `StepGuard`, such as ``max_consecutive_skips``.

        Raises:
            ValueError: The precision is unknown, or a setting belongs to a loss scale.
        """
        super().__init__(*precision)
        precision_text = precision[0] if precision else "32-true"
        self.scaler: DistGradScaler | StepGuard = make_guard(precision_text, None, settings)


class MixedPrecisionMixin(_NextPlugin):
    """The constructor of ``MixedPrecision``, with a scaler or guard."""

    def __init__(
        self, precision: str, device: str, scaler: DistGradScaler | None = None, **settings: Any
    ) -> None:
        """Make the plugin and its scaler or guard.

        Args:
            precision: ``"16-mixed"`` or ``"bf16-mixed"``.
            device: The device type of the autocast region and of the loss scale.
            scaler: A `DistGradScaler` for ``"16-mixed"``; None makes one.
            settings: Keyword settings of a new scaler or guard, such as ``init_scale`` and
                ``max_consecutive_skips``.

        Raises:
            ValueError: The precision is unknown, or a scaler or its settings were passed for
                ``"bf16-mixed"``.
            TypeError: ``scaler`` is a scaler of another class.
        """
        new_scaler = _make_scaler(precision, scaler, device, settings)
        # Lightning's constructor refuses a scaler for bf16, so it does not receive the guard.
        super().__init__(precision, device, new_scaler if is_loss_scaler(new_scaler) else None)
        self.scaler = new_scaler


class FSDPPrecisionMixin(_NextPlugin):
    """The constructor and the autocast region of ``FSDPPrecision``, with a scaler or guard."""

    def __init__(
        self, precision: str, scaler: DistGradScaler | None = None, **settings: Any
    ) -> None:
        """Make the plugin and its scaler or guard.

        Args:
            precision: The argument of Lightning's plugin, such as ``"16-mixed"``,
                ``"bf16-mixed"`` or ``"32-true"``.
            scaler: A `DistGradScaler` for ``"16-mixed"``; None makes one.
            settings: Keyword settings of a new scaler or guard, such as ``init_scale`` and
                ``max_consecutive_skips``.

        Raises:
            ValueError: The precision is unknown, or a scaler or its settings were passed for a
                precision that does not scale losses.
            TypeError: ``scaler`` is a scaler of another class.
        """
        super().__init__(precision)
        # Lightning's constructor has made a ShardedGradScaler. A DistGradScaler can replace it,
        # because FSDP reduces gradients in float16 and gives them to the optimizer in float32.
        self.scaler = _make_scaler(precision, scaler, None, settings)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the autocast region of a forward pass.

        For float16 Lightning opens a region for CUDA. This region is for the device of the process.
        """
        if is_loss_scaler(self.scaler):
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            device_type = "cpu" if accelerator is None else accelerator.type
            return autocast(device_type, dtype=torch.float16)
        region: AbstractContextManager[Any] = super().forward_context()
        return region


def _make_scaler(
    precision: str, scaler: object, device: str | None, settings: dict[str, Any]
) -> DistGradScaler | StepGuard:
    """Return the scaler for ``"16-mixed"``, or a guard for another precision of Lightning's."""
    if precision == "16-mixed":
        return make_loss_scaler(scaler, device, settings)
    return make_guard(precision, scaler, settings)
