"""What computes later as it did before: activation checkpoints and custom autograd functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils import checkpoint as torchs

from distamp.autocast.op_lists import following
from distamp.autocast.state import AutocastState, propagate
from distamp.autocast.thread_state import local

__all__ = ["checkpoint", "checkpoint_contexts", "custom_bwd", "custom_fwd"]


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


def custom_fwd(
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str,
    cast_inputs: torch.dtype | None = None,
) -> Any:
    """Decorate ``forward`` of a :class:`torch.autograd.Function` for use under autocast.

    :func:`torch.amp.custom_fwd`, which also notes the op lists for :func:`custom_bwd`.

    Args:
        fwd: ``forward(ctx, *args)``.
        device_type: The device type whose autocast counts, ``"cuda"``, ``"cpu"`` and so on.
        cast_inputs: In an enabled region, cast floating inputs (not float64) to this dtype and
            run ``forward`` with autocast disabled. None runs it in the region as it is. Outside
            an enabled region this has no effect.

    Returns:
        The decorated function, or a decorator when ``fwd`` is not given.

    Raises:
        ValueError: ``device_type`` is not a string.

    Source: torch's page on automatic mixed precision, custom autograd functions.
    """
    if fwd is None:
        torch.amp.custom_fwd(device_type=device_type)
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    run = torch.amp.custom_fwd(fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            ctx.op_lists = local.lists
        return run(ctx, *args, **kwargs)

    return decorated


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str) -> Any:
    """Decorate ``backward`` so that it runs in the autocast state ``forward`` ran in.

    :func:`torch.amp.custom_bwd`, but the op lists of ``forward``'s region are in force too.

    Args:
        bwd: ``backward(ctx, *grads)`` of a function whose ``forward`` has :func:`custom_fwd`.
        device_type: As for :func:`custom_fwd`.

    Returns:
        The decorated function, or a decorator when ``bwd`` is not given.

    Raises:
        ValueError: ``device_type`` is not a string.
    """
    if bwd is None:
        torch.amp.custom_bwd(device_type=device_type)
        return functools.partial(custom_bwd, device_type=device_type)
    run = torch.amp.custom_bwd(bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return run(ctx, *args, **kwargs)
        with following(ctx.op_lists):
            return run(ctx, *args, **kwargs)

    return decorated
