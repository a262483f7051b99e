"""Activation checkpointing that recomputes in the whole autocast state of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.compiler import is_dynamo_compiling
from torch.utils import checkpoint as torchs

from distamp.autocast.threads.state import AutocastState, propagate

__all__ = ["checkpoint", "checkpoint_contexts"]


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **settings: Any
) -> Any:
    """Run ``function`` and keep nothing of it but its inputs; run it again in backward.

    As :func:`torch.utils.checkpoint.checkpoint`, which recomputes with autocast enabled or not, in
    the same dtype, for the CPU and one more device type. This one carries over the whole
    :class:`AutocastState`, op lists included, with either value of ``use_reentrant``.

    Args:
        function: What to run, as for torch's.
        args: Its arguments, as for torch's.
        use_reentrant: Which of torch's two implementations; to be given, and better False.
        settings: As for torch's: ``preserve_rng_state``, ``context_fn``, ``determinism_check`` and
            ``debug``, and keyword arguments of ``function`` where ``use_reentrant`` is False.

    Returns:
        What ``function`` returns.

    Source: https://pytorch.org/docs/stable/checkpoint.html.
    """
    # A compiled graph has the casts of the lists in it, and is not run again through here.
    again = function if is_dynamo_compiling() else propagate(function)
    return torchs.checkpoint(again, *args, use_reentrant=use_reentrant, **settings)


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Have a ``context_fn`` that carries over the whole autocast state of the forward pass.

    For code that calls torch's function itself, with ``use_reentrant=False``:
    ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn":
    checkpoint_contexts})`` of Hugging Face's, or ``checkpoint_wrapper`` of FSDP's.

    Returns:
        The context of the forward pass and that of the recomputation.
    """
    state = AutocastState.capture()
    return state.apply(), state.apply()
