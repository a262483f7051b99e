"""Steps that all ranks take or skip together, and the norm of gradients over all ranks."""

from distamp.guard.nonfinite_report import NonFiniteReport
from distamp.guard.optimizer_history import StepCounts
from distamp.guard.replica_check import ReplicaComparison
from distamp.guard.snapshots import Snapshots
from distamp.guard.step_guard import StepGuard
from distamp.guard.unscaled_clip import clip_grad_norm_

__all__ = [
    "NonFiniteReport",
    "ReplicaComparison",
    "Snapshots",
    "StepCounts",
    "StepGuard",
    "clip_grad_norm_",
]
