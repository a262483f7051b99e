"""Steps that all ranks take or skip together, and the norm of gradients over all ranks."""

from distamp.guard.optimizer_state import StepCounts
from distamp.guard.overflow import NonFiniteReport
from distamp.guard.step_guard import StepGuard
from distamp.guard.unscaled_clip import clip_grad_norm_

__all__ = ["NonFiniteReport", "StepCounts", "StepGuard", "clip_grad_norm_"]
