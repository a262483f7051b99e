"""Automatic mixed precision that stays right when training is distributed.

The public names are in ``__all__``; ``distamp.autocast`` is both this class and the package
that the rest of the autocast names are imported from, as ``distamp.initialize`` is both the
function and its package.
"""

from distamp import cpu as cpu
from distamp import cuda as cuda
from distamp.autocast import autocast, custom_bwd, custom_fwd, precision_report, preflight
from distamp.initialize import cast_model, initialize
from distamp.installation import install, uninstall
from distamp.precision import Precision
from distamp.scaler import DistGradScaler

__version__ = "0.1.0.dev0"

GradScaler = DistGradScaler

__all__ = [
    "DistGradScaler",
    "GradScaler",
    "Precision",
    "__version__",
    "autocast",
    "cast_model",
    "custom_bwd",
    "custom_fwd",
    "initialize",
    "install",
    "precision_report",
    "preflight",
    "uninstall",
]
