"""Loss scaling: `DistGradScaler` and the rules that move its loss scale."""

from distamp.guard.optimizer_history import StepCounts
from distamp.masters import MasterParameters, master_params, masters_of
from distamp.scaler.grad_scaler import DistGradScaler
from distamp.scaler.loss_scale import (
    DynamicLossScale,
    HysteresisLossScale,
    LossScale,
    ScaleState,
    StaticLossScale,
)

__all__ = [
    "DistGradScaler",
    "DynamicLossScale",
    "HysteresisLossScale",
    "LossScale",
    "MasterParameters",
    "ScaleState",
    "StaticLossScale",
    "StepCounts",
    "master_params",
    "masters_of",
]
