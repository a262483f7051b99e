"""Levels of precision, and `initialize`, which prepares a model and its optimizers for one."""

from distamp.levels.amp import Amp, StepResult
from distamp.levels.casting import cast_model
from distamp.levels.float8 import float8_layers
from distamp.levels.initialize import initialize
from distamp.precision_level import LEVELS, PrecisionLevel

__all__ = [
    "LEVELS",
    "Amp",
    "PrecisionLevel",
    "StepResult",
    "cast_model",
    "float8_layers",
    "initialize",
]
