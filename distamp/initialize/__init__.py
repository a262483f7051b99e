"""One call from a model and its optimizers to training at a level of precision.

``from distamp import initialize`` is the function; this package holds it and what goes with it.
"""

from distamp.initialize.amp import Amp, StepResult
from distamp.initialize.casting import cast_model
from distamp.initialize.entry import initialize
from distamp.initialize.float8 import float8_layers

__all__ = ["Amp", "StepResult", "cast_model", "float8_layers", "initialize"]
