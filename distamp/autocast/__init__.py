"""Autocast that is right in every thread.

``from distamp import autocast`` is the class; this package holds it and what goes with it.
"""

from distamp.autocast.data_parallel import DataParallel, parallel_apply
from distamp.autocast.findings import Finding, findings
from distamp.autocast.functions import checkpoint, checkpoint_contexts, custom_bwd, custom_fwd
from distamp.autocast.op_lists import OpLists
from distamp.autocast.pin import pin_precision
from distamp.autocast.preflight import Preflight, preflight
from distamp.autocast.recording import precision_report
from distamp.autocast.region import autocast
from distamp.autocast.report import PrecisionReport, compare_reports
from distamp.autocast.state import AutocastState, propagate

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
    "compare_reports",
    "custom_bwd",
    "custom_fwd",
    "findings",
    "parallel_apply",
    "pin_precision",
    "precision_report",
    "preflight",
    "propagate",
]
