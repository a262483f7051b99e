"""Autocast that is right in every thread.

``from distamp import autocast`` is the class; this package holds it and what goes with it.
"""

from distamp.autocast.findings import Finding, findings
from distamp.autocast.op_lists import OpLists
from distamp.autocast.pin import pin_precision
from distamp.autocast.preflight import Preflight, preflight
from distamp.autocast.recording import precision_report
from distamp.autocast.region import autocast
from distamp.autocast.report import PrecisionReport
from distamp.autocast.state import (
    AutocastState,
    DataParallel,
    checkpoint,
    checkpoint_contexts,
    custom_bwd,
    custom_fwd,
    parallel_apply,
    propagate,
)

__all__ = [
    "AutocastState",
    "DataParallel",
    "Finding",
    "OpLists",
    "PrecisionReport",
    "Preflight",
    "autocast",
    "checkpoint",
    "checkpoint_contexts",
    "custom_bwd",
    "custom_fwd",
    "findings",
    "parallel_apply",
    "pin_precision",
    "precision_report",
    "preflight",
    "propagate",
]
