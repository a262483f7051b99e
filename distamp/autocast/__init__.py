"""Autocast that is right in every thread.

``from distamp import autocast`` imports the class. The package has the same name.
"""

from torch.amp import custom_bwd, custom_fwd

from distamp.autocast.autocast_state import AutocastState
from distamp.autocast.checkpointing import checkpoint, checkpoint_context_fn
from distamp.autocast.data_parallel import DataParallel
from distamp.autocast.module_precision import set_module_precision
from distamp.autocast.op_lists import OpLists
from distamp.autocast.region import autocast

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
