"""The names and signatures of ``torch.cpu.amp``, with no deprecation warning.

For code written against them; new code says ``distamp.autocast("cpu", ...)``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

import distamp.autocast as regions
from distamp.scaler import DistGradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]

custom_fwd = functools.partial(regions.custom_fwd, device_type="cpu")
custom_bwd = functools.partial(regions.custom_bwd, device_type="cpu")


def autocast(
    enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True
) -> regions.autocast:
    """Return an :obj:`distamp.autocast` for ``"cpu"``, by the arguments of the old name."""
    return regions.autocast("cpu", dtype, enabled, cache_enabled)


class GradScaler(DistGradScaler):
    """:obj:`distamp.DistGradScaler` for ``"cpu"``, with the arguments of the old name."""

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
            "cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled, **settings
        )
