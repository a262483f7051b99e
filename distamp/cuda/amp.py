"""The names and signatures of ``torch.cuda.amp``, for CUDA, with no deprecation warning.

For code written against them; new code says ``distamp.autocast("cuda", ...)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from distamp.autocast.functions import custom_bwd as _custom_bwd
from distamp.autocast.functions import custom_fwd as _custom_fwd
from distamp.autocast.region import autocast as _autocast
from distamp.scaler import DistGradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]


class autocast(_autocast):  # noqa: N801
    """:class:`distamp.autocast` for CUDA, with the arguments of ``torch.cuda.amp.autocast``.

    Args:
        enabled: As in :class:`distamp.autocast`.
        dtype: What lower precision ops compute in.
        cache_enabled: As in :class:`distamp.autocast`.
    """

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.float16,
        cache_enabled: bool | Literal["step"] = True,
    ) -> None:
        super().__init__("cuda", dtype, enabled, cache_enabled)


class GradScaler(DistGradScaler):
    """:class:`distamp.DistGradScaler` for CUDA, as ``torch.cuda.amp.GradScaler``.

    Args:
        init_scale: As in :class:`distamp.DistGradScaler`, and so are the others.
        growth_factor: What the scale is multiplied by when it grows.
        backoff_factor: What it is multiplied by when it shrinks.
        growth_interval: Clean steps in a row before the scale grows.
        enabled: False makes every call a no-op.
        settings: Keyword settings of :class:`distamp.DistGradScaler`, such as ``process_group``.
    """

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
            "cuda",
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            **settings,
        )


def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None
) -> Any:
    """:func:`distamp.custom_fwd` for CUDA."""
    return _custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any] | None = None) -> Any:
    """:func:`distamp.custom_bwd` for CUDA."""
    return _custom_bwd(bwd, device_type="cuda")
