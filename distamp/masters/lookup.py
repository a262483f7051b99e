"""From an optimizer to its masters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distamp.optimizers import unwrapped
from distamp.sources import source_of

if TYPE_CHECKING:
    from distamp.masters.masters import MasterParameters

__all__ = ["master_params", "masters_of"]


def masters_of(optimizer: torch.optim.Optimizer) -> MasterParameters | None:
    """Return the master parameters of an optimizer, or of the one it wraps; None without any."""
    source = source_of(unwrapped(optimizer))
    return source if source.has_masters else None  # type: ignore[return-value]


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield what the optimizer steps on this rank: masters, and parameters that have none.

    As ``apex.amp.master_params``: what to clip by hand, after ``scaler.unscale_(optimizer)``.
    """
    yield from source_of(unwrapped(optimizer)).stepped()
