"""Mixed-precision training that keeps all ranks consistent.

The names that most training scripts need are here, in ``__all__``. All others are in
``distamp.guard``, ``distamp.scaler``, ``distamp.masters``, ``distamp.autocast``,
``distamp.report``, ``distamp.comm_hooks``, ``distamp.errors``, ``distamp.levels`` and
``distamp.integrations``. ``distamp.autocast`` is the class, and ``from distamp.autocast import
...`` its package.
"""

import importlib
import typing

from distamp import comm_hooks as comm_hooks
from distamp import cpu as cpu
from distamp import cuda as cuda
from distamp import errors as errors
from distamp import guard as guard
from distamp import levels as levels
from distamp import masters as masters
from distamp import scaler as scaler
from distamp.autocast import (
    AutocastState,
    DataParallel,
    OpLists,
    autocast,
    custom_bwd,
    custom_fwd,
    set_module_precision,
)
from distamp.errors import DistampError, RankMismatchError
from distamp.guard import StepGuard, clip_grad_norm_
from distamp.installation import patch_torch, unpatch_torch
from distamp.levels import PrecisionLevel, cast_model, initialize
from distamp.scaler import DistGradScaler

if typing.TYPE_CHECKING:
    from distamp import report as report
    from distamp.report import (
        PrecisionContract,
        find_first_nonfinite,
        precision_report,
        preflight,
    )

__version__ = "0.1.0rc1"

GradScaler = DistGradScaler

__all__ = [
    "AutocastState",
    "DataParallel",
    "DistGradScaler",
    "DistampError",
    "GradScaler",
    "OpLists",
    "PrecisionContract",
    "PrecisionLevel",
    "RankMismatchError",
    "StepGuard",
    "__version__",
    "autocast",
    "cast_model",
    "clip_grad_norm_",
    "custom_bwd",
    "custom_fwd",
    "find_first_nonfinite",
    "initialize",
    "patch_torch",
    "precision_report",
    "preflight",
    "set_module_precision",
    "unpatch_torch",
]

#: Names of `distamp.report`. Its import takes as long as the import of all other packages.
_REPORT_NAMES = ("PrecisionContract", "find_first_nonfinite", "precision_report", "preflight")


def __getattr__(name: str) -> typing.Any:
    """Import `distamp.report` when one of its names is first used."""
    if name != "report" and name not in _REPORT_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    report = importlib.import_module("distamp.report")
    globals().update({public: getattr(report, public) for public in _REPORT_NAMES})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_REPORT_NAMES, "report"})
