"""distamp in Lightning's Fabric: precision plugins whose ranks step or skip together.

Serves the packages ``lightning`` and ``lightning_fabric``: import the one you use first.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from distamp.integrations.shared import (
    MixedMixin,
    PlainMixin,
    ShardedMixin,
    Stepper,
    lightning_package,
    unscale_once,
)

__all__ = ["FSDPPrecision", "HalfPrecision", "MixedPrecision", "Precision"]

_plugins: Any = lightning_package("fabric").plugins.precision


class _Stepped(_plugins.Precision):
    """What the plugins do together: step on all ranks or on none. Everything else is Fabric's."""

    scaler: Stepper

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale before clipping, once, for fused optimizers too."""
        unscale_once(self.scaler, optimizer)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        _plugins.Precision.backward(self, self.scaler.scale(tensor), model, *args, **kwargs)


class Precision(PlainMixin, _Stepped):
    """Fabric's ``Precision``, ``"32-true"``, whose ranks step or skip together.

    Source: Lightning's documentation of precision plugins.
    """


class HalfPrecision(PlainMixin, _Stepped, _plugins.HalfPrecision):
    """Fabric's ``HalfPrecision``, ``"bf16-true"``, whose ranks step or skip together.

    Source: Lightning's documentation of precision plugins.
    """


class MixedPrecision(MixedMixin, _Stepped, _plugins.MixedPrecision):
    """Fabric's ``MixedPrecision``, whose ranks step or skip together.

    For one device, DDP and ModelParallelStrategy: ``Fabric(plugins=MixedPrecision("bf16-mixed",
    "cuda"))``, without ``precision=``. Unlike Fabric's it clips with fused optimizers at
    ``"16-mixed"``.

    Source: Lightning's documentation of precision plugins.
    """


class FSDPPrecision(ShardedMixin, _Stepped, _plugins.FSDPPrecision):
    """Fabric's ``FSDPPrecision``, whose ranks step or skip together.

    Source: Lightning's documentation of precision plugins.
    """
