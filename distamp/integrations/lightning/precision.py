"""Precision plugins for Lightning's strategies, whose ranks step or skip together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from distamp.errors import SettingError
from distamp.integrations.packages import lightning_package
from distamp.integrations.scaling import (
    first_optimizer,
    fp16_region,
    scaler_for,
    unscale_once,
)
from distamp.scaler import DistGradScaler

__all__ = ["FSDPPrecision", "MixedPrecision"]

_plugins: Any = lightning_package("pytorch").plugins.precision


class _Scaled(_plugins.Precision):
    """What both plugins do with a scaler; everything else is Lightning's."""

    scaler: DistGradScaler | None

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        result: Tensor = _plugins.Precision.pre_backward(self, tensor, module)
        return result

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, clip and step, on all ranks or on none; LBFGS is refused."""
        if self.scaler is None:
            return _plugins.Precision.optimizer_step(
                self, optimizer, model=model, closure=closure, **kwargs
            )
        if isinstance(first_optimizer(optimizer), LBFGS):
            raise SettingError(
                "LBFGS evaluates the loss inside its step, with scaled gradients: train it in "
                "float32 or bfloat16"
            )
        result = closure()
        # Automatic optimization whose training_step returned None: no backward, so no step.
        if result is None and model.automatic_optimization:
            self._after_closure(model, optimizer)
            return None
        unscale_once(self.scaler, optimizer)
        self._after_closure(model, optimizer)
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clip unscaled gradients, of fused optimizers too, by the norm over all ranks.

        In manual optimization too, where ``self.clip_gradients`` comes before ``step``.
        """
        if self.scaler is None or clip_val <= 0:
            _plugins.Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)
        elif gradient_clip_algorithm == "value":
            unscale_once(self.scaler, optimizer)
            self.clip_grad_by_value(optimizer, clip_val)
        else:
            self.scaler.clip_grad_norm_(first_optimizer(optimizer), clip_val)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)


class MixedPrecision(_Scaled, _plugins.MixedPrecision):
    """Lightning's ``MixedPrecision`` with a :class:`distamp.DistGradScaler`.

    For one device, DDP and ModelParallelStrategy: ``Trainer(plugins=MixedPrecision("16-mixed",
    "cuda"))``, without ``precision=``. Unlike Lightning's it clips with fused optimizers, steps
    LBFGS, and computes in float16 on a CPU. Checkpoints are Lightning's: each loads the other's.

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
    """Lightning's ``FSDPPrecision`` with a :class:`distamp.DistGradScaler`.

    For FSDPStrategy: ``Trainer(strategy="fsdp", plugins=FSDPPrecision("16-mixed"))``. Unlike
    Lightning's it clips by the norm, takes a scaler, and steps fused optimizers and LBFGS.

    Args:
        precision: What Lightning's takes: ``"16-mixed"``, ``"bf16-mixed"``, ``"32-true"``, ...
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
        # What FSDP reduced in float16 it gives to the optimizer in the parameters' float32.
        self.scaler = scaler_for(precision, scaler, None, settings)

    def forward_context(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = (
            super().forward_context() if self.scaler is None else fp16_region()
        )
        return context

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each rank's part of the gradients: the same as clipping the whole."""
        torch.nn.utils.clip_grad_value_(list(self.main_params(optimizer)), clip_value=clip_val)
