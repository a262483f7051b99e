"""Precision plugins for Lightning's Fabric, with which all ranks step or skip together.

The plugins extend classes of ``lightning`` or ``lightning_fabric``. If both are installed, import
the package of your program before this module.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from distamp.guard import StepGuard
from distamp.integrations.lightning_plugins import (
    FSDPPrecisionMixin,
    FullPrecisionMixin,
    MixedPrecisionMixin,
    import_lightning,
    step_and_update,
)
from distamp.integrations.trainer_scaler import ensure_unscaled
from distamp.scaler import DistGradScaler

__all__ = ["FSDPPrecision", "HalfPrecision", "MixedPrecision", "Precision"]

_plugins: Any = import_lightning("fabric").plugins.precision


class _StepMixin(_plugins.Precision):
    """The methods in which the plugins differ from Fabric's: backward pass, unscaling and step."""

    scaler: DistGradScaler | StepGuard

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        # Fabric's MixedPrecision.backward would scale the loss again.
        loss = self.scaler.scale(tensor)
        _plugins.Precision.backward(self, loss, model, *args, **kwargs)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale gradients before Fabric clips them, also for fused optimizers."""
        ensure_unscaled(self.scaler, optimizer)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        return step_and_update(self.scaler, optimizer, **kwargs)


class Precision(FullPrecisionMixin, _StepMixin):
    """Fabric's ``Precision``, ``"32-true"``, with ranks that step or skip together.

    Source: Lightning's documentation of precision plugins.
    """


class HalfPrecision(FullPrecisionMixin, _StepMixin, _plugins.HalfPrecision):
    """Fabric's ``HalfPrecision``, ``"bf16-true"``, with ranks that step or skip together.

    Source: Lightning's documentation of precision plugins.
    """


class MixedPrecision(MixedPrecisionMixin, _StepMixin, _plugins.MixedPrecision):
    """Fabric's ``MixedPrecision``, with ranks that step or skip together.

    The plugin is for one device, DDP and ModelParallelStrategy. Pass it as
    ``Fabric(plugins=MixedPrecision("bf16-mixed", "cuda"))``, without ``precision=``. Unlike
    Fabric's plugin, it clips the gradients of fused optimizers at ``"16-mixed"``.

    Source: Lightning's documentation of precision plugins.
    """


class FSDPPrecision(FSDPPrecisionMixin, _StepMixin, _plugins.FSDPPrecision):
    """Fabric's ``FSDPPrecision``, with ranks that step or skip together.

    Source: Lightning's documentation of precision plugins.
    """
