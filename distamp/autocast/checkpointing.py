"""Activation checkpointing that recomputes in the autocast state of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint
from torch._guards import TracingContext
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from distamp.autocast.autocast_state import AutocastState

__all__ = ["checkpoint", "checkpoint_context_fn"]


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **settings: Any
) -> Any:
    """Run a function, keep only its inputs, and run it again in the backward pass.

    :func:`torch.utils.checkpoint.checkpoint` recomputes with autocast on or off, in the same dtype,
    for the CPU and one more device type. This function carries over the whole
    :class:`AutocastState`, op lists included, with either value of ``use_reentrant``.

    Args:
        function: The function to run, as for torch's.
        args: Its arguments, as for torch's.
        use_reentrant: torch's implementation. Pass a value, and better False.
        settings: As for torch's: ``preserve_rng_state``, ``context_fn``, ``determinism_check`` and
            ``debug``, and keyword arguments of ``function`` if ``use_reentrant`` is False.

    Returns:
        The result of ``function``.

    Source: https://pytorch.org/docs/stable/checkpoint.html.
    """
    # A compiled graph contains the casts of the lists, and recomputes them without this function.
    if not is_dynamo_compiling():
        function = AutocastState.wrap(function)
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=use_reentrant, **settings
    )


def checkpoint_context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts that carry the autocast state of the forward pass to the recomputation.

    Pass the function as ``context_fn`` in code that calls torch's checkpoint itself, with
    ``use_reentrant=False``: ``model.gradient_checkpointing_enable({"use_reentrant": False,
    "context_fn": checkpoint_context_fn})`` of Hugging Face, or ``checkpoint_wrapper`` of FSDP.

    Returns:
        The context of the forward pass and the context of the recomputation.
    """
    # torch.compile calls this function while it traces a checkpoint, and accepts dispatch modes
    # only. The traced graph contains the casts, so the modes with which torch traces a checkpoint
    # without a context_fn serve. On a torch without `TracingContext` this module fails to import.
    if TracingContext.try_get() is not None:
        forward, recompute = create_selective_checkpoint_contexts(_always_recompute)
        return forward, recompute
    state = AutocastState.capture()
    return state.apply(), state.apply()


def _always_recompute(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE
