"""Loss scaling: `DistGradScaler` and the schedules that move its scale."""

from distamp.guard.optimizer_state import StepCounts
from distamp.masters import MasterParameters, master_params, masters_of
from distamp.scaler.grad_scaler import DistGradScaler
from distamp.scaler.schedule import (
    DynamicSchedule,
    HysteresisSchedule,
    ScaleState,
    Schedule,
    StaticSchedule,
)

__all__ = [
    "DistGradScaler",
    "DynamicSchedule",
    "HysteresisSchedule",
    "MasterParameters",
    "ScaleState",
    "Schedule",
    "StaticSchedule",
    "StepCounts",
    "master_params",
    "masters_of",
]
