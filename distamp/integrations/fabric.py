"""distamp in Lightning's Fabric: precision plugins whose ranks step or skip together.

Serves the packages ``lightning`` and ``lightning_fabric``: import the one you use first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from distamp.integrations.packages import lightning_package
from distamp.integrations.scaling import (
    first_optimizer,
    fp16_region,
    scaler_for,
    unscale_once,
)
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
        output = self.scaler.step(first_optimizer(optimizer), **kwargs)
        self.scaler.update()
        return output

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale before clipping, once, for fused optimizers too."""
        unscale_once(self.scaler, optimizer)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        _plugins.Precision.backward(self, tensor, model, *args, **kwargs)


class MixedPrecision(_Scaled, _plugins.MixedPrecision):
    """Fabric's ``MixedPrecision`` with a :class:`distamp.DistGradScaler`.

    For one device, DDP and ModelParallelStrategy: ``Fabric(plugins=MixedPrecision("16-mixed",
    "cuda"))``, without ``precision=``. Unlike Fabric's it clips with fused optimizers.

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        device: The device type of the autocast region and of the loss scale.
        scaler: A `DistGradScaler`; None makes one.
        settings: Keyword settings of the scaler that is made, such as ``init_scale``.

    Raises:
        ValueError: Another precision, or a scaler or its settings at ``"bf16-mixed"``.
        TypeError: ``scaler`` is another scaler.

    Source: Lightning's documentation of precision plugins.
    """

    def __init__(
        self, precision: str, device: str, scaler: DistGradScaler | None = None, **settings: Any
    ) -> None:
        scaler = scaler_for(precision, scaler, device, settings)
        _plugins.MixedPrecision.__init__(self, precision, device, scaler)


class FSDPPrecision(_Scaled, _plugins.FSDPPrecision):
    """Fabric's ``FSDPPrecision`` with a :class:`distamp.DistGradScaler`.

    Args:
        precision: What Fabric's takes: ``"16-mixed"``, ``"bf16-mixed"``, ``"32-true"``, ...
        scaler: A `DistGradScaler`; None makes one at ``"16-mixed"``.
        settings: Keyword settings of the scaler that is made, such as ``init_scale``.

    Raises:
        ValueError: Another precision, or a scaler or its settings where none is used.
        TypeError: ``scaler`` is another scaler.

    Source: Lightning's documentation of precision plugins.
    """

    def __init__(
        self, precision: str, scaler: DistGradScaler | None = None, **settings: Any
    ) -> None:
        _plugins.FSDPPrecision.__init__(self, precision)
        self.scaler = scaler_for(precision, scaler, None, settings)

    def forward_context(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = (
            super().forward_context() if self.scaler is None else fp16_region()
        )
        return context
