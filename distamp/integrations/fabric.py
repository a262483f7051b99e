"""distamp in Lightning's Fabric: precision plugins whose ranks step or skip together.

Serves the packages ``lightning`` and ``lightning_fabric``: import the one you use first.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from distamp.integrations.shared import MixedMixin, ShardedMixin, lightning_package, unscale_once
from distamp.scaler import DistGradScaler

__all__ = ["FSDPPrecision", "MixedPrecision"]

_plugins: Any = lightning_package("fabric").plugins.precision


class _Scaled(_plugins.Precision):
    """What both plugins do with a scaler; everything else is Fabric's."""

    scaler: DistGradScaler | None

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step on all ranks or on none."""
        if self.scaler is None:
            return _plugins.Precision.optimizer_step(self, optimizer, **kwargs)
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale before clipping, once, for fused optimizers too."""
        unscale_once(self.scaler, optimizer)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        scaled = tensor if self.scaler is None else self.scaler.scale(tensor)
        _plugins.Precision.backward(self, scaled, model, *args, **kwargs)


class MixedPrecision(MixedMixin, _Scaled, _plugins.MixedPrecision):
    """Fabric's ``MixedPrecision`` with a :class:`distamp.DistGradScaler`.

    For one device, DDP and ModelParallelStrategy: ``Fabric(plugins=MixedPrecision("16-mixed",
    "cuda"))``, without ``precision=``. Unlike Fabric's it clips with fused optimizers.

    Source: Lightning's documentation of precision plugins.
    """


class FSDPPrecision(ShardedMixin, _Scaled, _plugins.FSDPPrecision):
    """Fabric's ``FSDPPrecision`` with a :class:`distamp.DistGradScaler`.

    Source: Lightning's documentation of precision plugins.
    """
