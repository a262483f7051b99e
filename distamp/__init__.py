"""Automatic mixed precision that stays right when training is distributed.

Everything public is here, by the names in ``__all__``. ``distamp.autocast`` is the class and
``distamp.initialize`` the function; the packages of these names are import paths and nothing else.
"""

from distamp import cpu as cpu
from distamp import cuda as cuda
from distamp.autocast import (
    AutocastState,
    DataParallel,
    OpLists,
    autocast,
    checkpoint,
    checkpoint_contexts,
    custom_bwd,
    custom_fwd,
    pin_precision,
    propagate,
)
from distamp.errors import (
    DistampError,
    GradientError,
    LockstepError,
    LossScaleCollapse,
    NonFiniteGradients,
    SettingError,
    StageError,
)
from distamp.guard import StepGuard, clip_grad_norm_
from distamp.initialize import cast_model, float8_layers, initialize
from distamp.installation import install, uninstall
from distamp.precision import Precision
from distamp.report import (
    Breach,
    Breaches,
    Contract,
    Finding,
    NonFinite,
    PrecisionReport,
    Preflight,
    StepReplay,
    TensorRange,
    findings,
    first_nonfinite,
    precision_report,
    preflight,
)
from distamp.scaler import DistGradScaler

__version__ = "0.1.0"

GradScaler = DistGradScaler

__all__ = [
    "AutocastState",
    "Breach",
    "Breaches",
    "Contract",
    "DataParallel",
    "DistGradScaler",
    "DistampError",
    "Finding",
    "GradScaler",
    "GradientError",
    "LockstepError",
    "LossScaleCollapse",
    "NonFinite",
    "NonFiniteGradients",
    "OpLists",
    "Precision",
    "PrecisionReport",
    "Preflight",
    "SettingError",
    "StageError",
    "StepGuard",
    "StepReplay",
    "TensorRange",
    "__version__",
    "autocast",
    "cast_model",
    "checkpoint",
    "checkpoint_contexts",
    "clip_grad_norm_",
    "custom_bwd",
    "custom_fwd",
    "findings",
    "first_nonfinite",
    "float8_layers",
    "initialize",
    "install",
    "pin_precision",
    "precision_report",
    "preflight",
    "propagate",
    "uninstall",
]
