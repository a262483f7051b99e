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
    checkpoint_context_fn,
    custom_bwd,
    custom_fwd,
    propagate,
    set_module_precision,
)
from distamp.errors import (
    CallOrderError,
    ConfigError,
    DistampError,
    GradientError,
    LossScaleCollapseError,
    NonFiniteGradientsError,
    RankMismatchError,
)
from distamp.guard import StepGuard, clip_grad_norm_
from distamp.installation import install, uninstall
from distamp.levels import cast_model, float8_layers, initialize
from distamp.precision_level import PrecisionLevel
from distamp.report import (
    ContractReport,
    Finding,
    NonFiniteOrigin,
    PrecisionContract,
    PrecisionReport,
    Preflight,
    StepReplay,
    TensorRange,
    Violation,
    find_first_nonfinite,
    precision_report,
    preflight,
)
from distamp.scaler import DistGradScaler

__version__ = "0.1.0"

GradScaler = DistGradScaler

__all__ = [
    "AutocastState",
    "CallOrderError",
    "ConfigError",
    "ContractReport",
    "DataParallel",
    "DistGradScaler",
    "DistampError",
    "Finding",
    "GradScaler",
    "GradientError",
    "LossScaleCollapseError",
    "NonFiniteGradientsError",
    "NonFiniteOrigin",
    "OpLists",
    "PrecisionContract",
    "PrecisionLevel",
    "PrecisionReport",
    "Preflight",
    "RankMismatchError",
    "StepGuard",
    "StepReplay",
    "TensorRange",
    "Violation",
    "__version__",
    "autocast",
    "cast_model",
    "checkpoint",
    "checkpoint_context_fn",
    "clip_grad_norm_",
    "custom_bwd",
    "custom_fwd",
    "find_first_nonfinite",
    "float8_layers",
    "initialize",
    "install",
    "precision_report",
    "preflight",
    "propagate",
    "set_module_precision",
    "uninstall",
]
