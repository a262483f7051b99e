"""Uneven inputs: what a rank without more of them does for the scaler inside ``Join``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from distamp.scaler.grad_scaler import DistGradScaler

__all__ = ["ShadowScaler"]


class ShadowScaler(JoinHook):
    """Stands in for a scaler on a rank that has no more inputs.

    Args:
        scaler: The rank's own, which goes on with the others'.
    """

    def __init__(self, scaler: DistGradScaler) -> None:
        self._scaler = scaler
