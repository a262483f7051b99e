"""Activation checkpointing of torch's own inside a region with op lists, which is refused.

What it runs again in backward would run without the lists: torch carries over whether autocast is
on, its dtype and its cache flag, and nothing else.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

import torch
from torch.utils import checkpoint as torchs

from distamp.autocast.threads.thread_state import ThreadState
from distamp.errors import RegionError

__all__ = ["refuse_torchs_checkpoint"]

_REENTRANT: CodeType = torchs.CheckpointFunction.forward.__code__
_NOT_REENTRANT: str = torchs._checkpoint_hook.__init__.__qualname__
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def refuse_torchs_checkpoint(state: ThreadState) -> None:
    """Refuse to run an op by lists that its recomputation would not follow.

    Lists entered inside the checkpoint are entered again by the recomputation, and so are right;
    lists entered around it are not. To be called where gradients are off or there are hooks for
    saved tensors, as in every checkpoint.

    Raises:
        RegionError: The lists were entered around a checkpoint of torch's own.
    """
    if state.lists is None:
        return
    _, grad_enabled, hooks = state.lists
    now = _top_hooks(True)
    if now is not None and (hooks is None or now[0] is not hooks[0]):
        inside = getattr(now[0], "__qualname__", "").startswith(_NOT_REENTRANT)
    else:
        inside = grad_enabled and not torch.is_grad_enabled() and _is_running(_REENTRANT)
    if inside:
        raise RegionError(
            "torch.utils.checkpoint inside autocast(..., ops=...) would recompute without the op "
            "lists; use distamp.checkpoint, or context_fn=distamp.checkpoint_contexts"
        )


def _is_running(code: CodeType) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
