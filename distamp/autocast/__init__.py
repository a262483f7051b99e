"""Autocast that is right in every thread.

``from distamp import autocast`` is the class; this package holds it and what goes with it.
"""

from torch.amp import custom_bwd, custom_fwd

from distamp.autocast.op_lists import OpLists
from distamp.autocast.pin import set_module_precision
from distamp.autocast.region import autocast
from distamp.autocast.state import (
    AutocastState,
    DataParallel,
    checkpoint,
    checkpoint_context_fn,
)

__all__ = [
    "AutocastState",
    "DataParallel",
    "OpLists",
    "autocast",
    "checkpoint",
    "checkpoint_context_fn",
    "custom_bwd",
    "custom_fwd",
    "set_module_precision",
]
