"""Steps taken together: which ranks agree, by one message, and how a step is taken or skipped."""

from distamp.guard.optimizer_state import StepCounts
from distamp.guard.step_guard import GUARD_SETTINGS, OLD_STATE_KEY, STATE_KEY, StepGuard
from distamp.guard.unscaled_clip import clip_grad_norm_

__all__ = [
    "GUARD_SETTINGS",
    "OLD_STATE_KEY",
    "STATE_KEY",
    "StepCounts",
    "StepGuard",
    "clip_grad_norm_",
]
