"""Automatic mixed precision that stays right when training is distributed.

The public names are in ``__all__``; ``distamp.autocast`` is both this class and the package
that the rest of the autocast names are imported from.
"""

from distamp import cpu as cpu
from distamp import cuda as cuda
from distamp.autocast import autocast, custom_bwd, custom_fwd, precision_report, preflight
from distamp.scaler import DistGradScaler

__version__ = "0.1.0.dev0"

GradScaler = DistGradScaler

__all__ = [
    "DistGradScaler",
    "GradScaler",
    "__version__",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "precision_report",
    "preflight",
]
