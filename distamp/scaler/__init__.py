"""Loss scaling: `DistGradScaler` and the schedules that move its scale."""

from distamp.scaler.grad_scaler import DistGradScaler
from distamp.scaler.headroom import HeadroomSchedule
from distamp.scaler.known import StepCounts
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
    "HeadroomSchedule",
    "HysteresisSchedule",
    "ScaleState",
    "Schedule",
    "StaticSchedule",
    "StepCounts",
]
