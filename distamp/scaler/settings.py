"""What a scaler is made with, checked."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from distamp.errors import ConfigError
from distamp.guard.kernels import refuse_mps
from distamp.guard.steps import checked_limit
from distamp.scaler.loss_scale import MAX_SCALE, MIN_SCALE, DynamicLossScale, LossScale
from distamp.sources import GradientSource

__all__ = ["Settings", "one_number", "resolve_device", "resolve_loss_scale"]

_FP16_GRADS = ("error", "inplace", "master")


def resolve_device(device: Any) -> tuple[Any, bool]:
    """Return the device type and whether this machine has it.

    Raises:
        TypeError: Something that is no device: a number, a list.
        ValueError: torch knows no such device.
        ConfigError: It is MPS.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = "cpu" if accelerator is None else accelerator.type
    if not isinstance(device, (str, torch.device)):
        raise TypeError(
            f"device must be a device type such as 'cuda' or 'cpu', not {device!r:.80}; a loss "
            f"scale is given by keyword: init_scale={device!r:.80}"
        )
    try:
        device_type = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is not a device that torch knows: {error}") from None
    refuse_mps(device_type)
    there = device_type == "cpu" or (accelerator is not None and accelerator.type == device_type)
    return device_type, there


def resolve_loss_scale(
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    loss_scale: LossScale | None,
) -> LossScale:
    """Return the loss scale that a scaler's settings ask for.

    Raises:
        TypeError: ``loss_scale`` is not a LossScale.
        ConfigError: A setting is outside its range, or belongs to the loss scale that is given.
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
            "growth_factor, backoff_factor, growth_interval, min_scale and max_scale belong to "
            "the loss scale when one is given; set them there"
        )
    return loss_scale


def one_number(value: float | Tensor) -> float:
    """Return a new scale as a number; raise where a tensor of it has no one value."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1 or value.requires_grad:
        raise ConfigError(
            "new_scale should be a float or a 1-element tensor with requires_grad=False, not a "
            f"tensor of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
        )
    return float(value.item())


@dataclass(frozen=True)
class Settings:
    """What a scaler was made with; made anew where a setting changes.

    Args:
        loss_scale: How the scale moves.
        fp16_grads: What to do with float16 gradients.
        max_consecutive_skips: The limit on skipped steps in a row.

    Raises:
        ConfigError: ``fp16_grads`` or ``max_consecutive_skips`` is none of what is allowed.
    """

    loss_scale: LossScale
    fp16_grads: str = "error"
    max_consecutive_skips: int | None = None

    def __post_init__(self) -> None:
        checked_limit(self.max_consecutive_skips)
        if self.fp16_grads not in _FP16_GRADS:
            raise ConfigError(f"fp16_grads must be one of {_FP16_GRADS}, not {self.fp16_grads!r}")

    @functools.cached_property
    def text(self) -> str:
        """The settings as ranks compare them: a line ``name=value`` for each."""
        rule = self.loss_scale
        values = {
            "loss_scale": type(rule).__name__,
            **{field.name: getattr(rule, field.name) for field in fields(rule)},
            "fp16_grads": self.fp16_grads,
            "max_consecutive_skips": self.max_consecutive_skips,
        }
        lines = [f"{name}={value}" for name, value in values.items()]
        return "\n".join(["class=DistGradScaler", *lines])

    def check_masters(self, optimizer: Any, source: GradientSource) -> None:
        """Refuse masters that the scaler does not know of, and the other way round.

        Raises:
            ConfigError: The optimizer has masters and the settings do not say so, or has float16
                parameters without masters although they do.
        """
        if source.casts == (self.fp16_grads == "master"):
            return
        name = type(optimizer).__name__
        if source.casts:
            raise ConfigError(
                f"{name} has master parameters and the scaler has fp16_grads="
                f"{self.fp16_grads!r}: make it with fp16_grads='master', which unscales on the way "
                "to them"
            )
        if any(p.dtype is torch.float16 for p in source.parameters()):
            raise ConfigError(
                f"fp16_grads='master', and {name} holds float16 parameters without masters: call "
                "MasterParameters(optimizer) before the first step"
            )
