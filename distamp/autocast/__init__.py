"""Autocast that is right in every thread.

``from distamp import autocast`` is the class; this package holds it and what goes with it.
"""

from distamp.autocast.checkpoint import checkpoint, checkpoint_contexts
from distamp.autocast.functions import custom_bwd, custom_fwd
from distamp.autocast.op_lists import OpLists
from distamp.autocast.op_lists.reference import OpReference, op_reference
from distamp.autocast.pin import pin_precision
from distamp.autocast.preflight import Finding, Preflight, preflight
from distamp.autocast.region import autocast
from distamp.autocast.replicas import DataParallel, bind, parallel_apply, unbind
from distamp.autocast.report import PrecisionReport, compare_reports, precision_report
from distamp.autocast.threads.state import AutocastState, propagate

__all__ = [
    "AutocastState",
    "DataParallel",
    "Finding",
    "OpLists",
    "OpReference",
    "PrecisionReport",
    "Preflight",
    "autocast",
    "bind",
    "checkpoint",
    "checkpoint_contexts",
    "compare_reports",
    "custom_bwd",
    "custom_fwd",
    "op_reference",
    "parallel_apply",
    "pin_precision",
    "precision_report",
    "preflight",
    "propagate",
    "unbind",
]
