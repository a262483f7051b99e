"""Checks of the arguments of a scaler."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from distamp.errors import ConfigError
from distamp.guard.check_settings import NO_CHECKS, CheckSettings
from distamp.guard.fused import check_device_supported
from distamp.guard.step_guard import check_skip_limit
from distamp.scaler.loss_scale import MAX_SCALE, MIN_SCALE, DynamicLossScale, LossScale

__all__ = ["ScalerSettings", "as_number", "make_loss_scale", "resolve_device"]

_FP16_GRADS = ("error", "inplace", "master")


def resolve_device(device: Any) -> tuple[Any, bool]:
    """Return the device type and whether this machine has it.

    Raises:
        TypeError: ``device`` is no device, such as a number or a list.
        ValueError: torch knows no such device.
        ConfigError: It is MPS.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = "cpu" if accelerator is None else accelerator.type
    if not isinstance(device, (str, torch.device)):
        raise TypeError(
            f"device must be a device type such as 'cuda' or 'cpu', not {device!r:.80}. Pass a "
            f"loss scale by keyword: init_scale={device!r:.80}"
        )
    try:
        device_type = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is not a device that torch knows: {error}") from None
    check_device_supported(device_type)
    is_available = device_type == "cpu"
    if accelerator is not None and accelerator.type == device_type:
        is_available = True
    return device_type, is_available


def make_loss_scale(
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    loss_scale: LossScale | None,
) -> LossScale:
    """Return the rule of a loss scale for a scaler's arguments.

    Raises:
        TypeError: ``loss_scale`` is not a LossScale.
        ConfigError: A setting is outside its range, or belongs into ``loss_scale``.
    """
    settings = (growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
    if loss_scale is None:
        return DynamicLossScale(*settings)
    if not isinstance(loss_scale, LossScale):
        raise TypeError(
            "loss_scale must be a LossScale, such as DynamicLossScale() or StaticLossScale(), not "
            f"{type(loss_scale).__name__}. Pass a number as init_scale, which is the first scale."
        )
    if settings != (2.0, 0.5, 2000, MIN_SCALE, MAX_SCALE):
        raise ConfigError(
            "growth_factor, backoff_factor, growth_interval, min_scale and max_scale were passed "
            "beside loss_scale=. They are arguments of that loss scale, so pass them to its class."
        )
    return loss_scale


def as_number(value: float | Tensor) -> float:
    """Return a new scale as a number.

    Raises:
        ConfigError: A tensor has more than one element, or requires a gradient.
    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1 or value.requires_grad:
        raise ConfigError(
            "new_scale should be a float or a 1-element tensor with requires_grad=False, not a "
            f"tensor of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
        )
    return float(value.item())


@dataclass(frozen=True)
class ScalerSettings:
    """Settings of a scaler; a change of a setting makes a new object.

    Args:
        loss_scale: The rule of the loss scale.
        fp16_grads: The treatment of float16 gradients.
        max_consecutive_skips: The limit on skipped steps in a row.
        checks: The checks of weights and replicas.

    Raises:
        ConfigError: ``fp16_grads`` or ``max_consecutive_skips`` is outside its range.
    """

    loss_scale: LossScale
    fp16_grads: str = "error"
    max_consecutive_skips: int | None = None
    checks: CheckSettings = NO_CHECKS

    def __post_init__(self) -> None:
        check_skip_limit(self.max_consecutive_skips)
        if self.fp16_grads not in _FP16_GRADS:
            raise ConfigError(f"fp16_grads must be one of {_FP16_GRADS}, not {self.fp16_grads!r}")

    @functools.cached_property
    def fingerprint(self) -> str:
        """The settings as ranks compare them: a line ``name=value`` for each."""
        rule = self.loss_scale
        values = {
            "loss_scale": type(rule).__name__,
            **{field.name: getattr(rule, field.name) for field in fields(rule)},
            "fp16_grads": self.fp16_grads,
            "max_consecutive_skips": self.max_consecutive_skips,
        }
        lines = [f"{name}={value}" for name, value in values.items()]
        return "\n".join(["class=DistGradScaler", *lines]) + self.checks.text()
