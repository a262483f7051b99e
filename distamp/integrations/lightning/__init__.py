"""distamp in Lightning's Trainer: precision plugins and callbacks.

Serves the packages ``lightning`` and ``pytorch_lightning``: import the one you use first.
"""

from distamp.integrations.lightning.callbacks import CommHook, SkippedSteps
from distamp.integrations.lightning.precision import FSDPPrecision, MixedPrecision

__all__ = ["CommHook", "FSDPPrecision", "MixedPrecision", "SkippedSteps"]
