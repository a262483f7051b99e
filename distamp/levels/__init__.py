"""One call from a model and its optimizers to training at a level of precision.

``from distamp import initialize`` is the function; this package holds it and what goes with it.
"""

from distamp.levels.amp import Amp, StepResult
from distamp.levels.casting import cast_model
from distamp.levels.float8 import float8_layers
from distamp.levels.initialize import initialize

__all__ = ["Amp", "StepResult", "cast_model", "float8_layers", "initialize"]
