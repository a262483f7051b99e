"""Autocast that is right in every thread.

``from distamp import autocast`` is the class; this package holds it and what goes with it.
"""

from distamp.autocast.cache import (
    CastCacheStats,
    cast_cache_stats,
    clear_cast_cache,
    set_cast_cache_limit,
)
from distamp.autocast.functions import custom_bwd, custom_fwd
from distamp.autocast.op_lists import OpLists
from distamp.autocast.op_lists.module import precision
from distamp.autocast.op_reference import OpReference, op_reference
from distamp.autocast.preflight import Finding, Preflight, preflight
from distamp.autocast.region import autocast
from distamp.autocast.replicas import DataParallel, bind, parallel_apply, unbind
from distamp.autocast.report import PrecisionReport, compare_reports, precision_report
from distamp.autocast.threads.executors import AutocastExecutor, AutocastThreadPoolExecutor
from distamp.autocast.threads.state import AutocastState, checkpoint_contexts, propagate

__all__ = [
    "AutocastExecutor",
    "AutocastState",
    "AutocastThreadPoolExecutor",
    "CastCacheStats",
    "DataParallel",
    "Finding",
    "OpLists",
    "OpReference",
    "PrecisionReport",
    "Preflight",
    "autocast",
    "bind",
    "cast_cache_stats",
    "checkpoint_contexts",
    "clear_cast_cache",
    "compare_reports",
    "custom_bwd",
    "custom_fwd",
    "op_reference",
    "parallel_apply",
    "precision",
    "precision_report",
    "preflight",
    "propagate",
    "set_cast_cache_limit",
    "unbind",
]
