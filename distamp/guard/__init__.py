"""Steps taken together: which ranks agree, by one message, and how a step is taken or skipped."""

from distamp.guard.optimizer_state import StepCounts
from distamp.guard.step_guard import GUARD_SETTINGS, GUARDS, StepGuard
from distamp.guard.unscaled_clip import clip_grad_norm_

__all__ = ["GUARDS", "GUARD_SETTINGS", "StepCounts", "StepGuard", "clip_grad_norm_"]
