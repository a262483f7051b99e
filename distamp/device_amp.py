"""The names and signatures of torch's old ``torch.cuda.amp`` and ``torch.cpu.amp``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

import distamp.autocast.functions as functions
from distamp.autocast.region import autocast
from distamp.scaler import DistGradScaler

__all__ = ["DeviceAmp", "amp_of"]


class DeviceAmp(NamedTuple):
    """What such a module holds."""

    autocast: type[autocast]
    GradScaler: type[DistGradScaler]
    custom_fwd: Callable[..., Any]
    custom_bwd: Callable[..., Any]


def amp_of(device_type: str, lower_precision: torch.dtype, module: str) -> DeviceAmp:
    """Make the names of one device type, without torch's deprecation warnings.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
        lower_precision: The default dtype of its autocast.
        module: The module that will hold the names, for pickles.
    """

    def custom_fwd(
        fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None
    ) -> Any:
        return functions.custom_fwd(fwd, device_type=device_type, cast_inputs=cast_inputs)

    def custom_bwd(bwd: Callable[..., Any] | None = None) -> Any:
        return functions.custom_bwd(bwd, device_type=device_type)

    region, scaler = _autocast_of(device_type, lower_precision), _scaler_of(device_type)
    made = DeviceAmp(region, scaler, custom_fwd, custom_bwd)
    each: Any
    for name, each in made._asdict().items():
        each.__module__, each.__name__, each.__qualname__ = module, name, name
        each.__doc__ = (
            f"``torch.{device_type}.amp.{name}``: :obj:`distamp.{name}` for {device_type!r}, with "
            "the arguments of the old name."
        )
    return made


def _autocast_of(device_type: str, lower_precision: torch.dtype) -> type[autocast]:
    class DeviceAutocast(autocast):
        def __new__(
            cls,
            enabled: bool = True,
            dtype: torch.dtype = lower_precision,
            cache_enabled: bool = True,
        ) -> Any:
            if is_dynamo_compiling():
                return torch.autocast(device_type, dtype, enabled, cache_enabled)
            return object.__new__(cls)

        def __init__(
            self,
            enabled: bool = True,
            dtype: torch.dtype = lower_precision,
            cache_enabled: bool = True,
        ) -> None:
            super().__init__(device_type, dtype, enabled, cache_enabled)

    return DeviceAutocast


def _scaler_of(device_type: str) -> type[DistGradScaler]:
    class DeviceGradScaler(DistGradScaler):
        def __init__(
            self,
            init_scale: float = 2.0**16,
            growth_factor: float = 2.0,
            backoff_factor: float = 0.5,
            growth_interval: int = 2000,
            enabled: bool = True,
            **settings: Any,
        ) -> None:
            super().__init__(
                device_type,
                init_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                enabled=enabled,
                **settings,
            )

    return DeviceGradScaler
