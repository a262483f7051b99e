"""Autocast for custom autograd functions: backward computes as forward did."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from distamp.autocast import op_lists
from distamp.autocast.region import autocast

__all__ = ["custom_bwd", "custom_fwd"]


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """``value`` with every floating tensor on ``device_type`` in ``dtype``; float64 stays."""
    if isinstance(value, torch.Tensor):
        eligible = (
            value.is_floating_point()
            and value.device.type == device_type
            and value.dtype is not torch.float64
        )
        return value.to(dtype) if eligible else value
    if isinstance(value, Mapping):
        return {key: _cast(item, device_type, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, device_type, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, device_type, dtype) for item in value)
    return value


def _check_device_type(device_type: str) -> None:
    if not isinstance(device_type, str):
        raise ValueError(f"device_type must be a str such as 'cuda', got {device_type!r}")


def custom_fwd(
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str,
    cast_inputs: torch.dtype | None = None,
) -> Any:
    """Decorate ``forward`` of a :class:`torch.autograd.Function` for use under autocast.

    As :func:`torch.amp.custom_fwd`, but named tuples among the inputs stay what they are.

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
    _check_device_type(device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_autocast_enabled(device_type)
        ctx._dtype = torch.get_autocast_dtype(device_type)
        ctx._fwd_used_autocast = enabled and cast_inputs is None
        if not is_dynamo_compiling():
            ctx._fwd_op_lists = op_lists.current()
        if not enabled or cast_inputs is None:
            return fwd(ctx, *args, **kwargs)
        with autocast(device_type, enabled=False):
            return fwd(
                ctx,
                *_cast(args, device_type, cast_inputs),
                **_cast(kwargs, device_type, cast_inputs),
            )

    return decorated


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str) -> Any:
    """Decorate ``backward`` so that it runs in the autocast state ``forward`` ran in.

    As :func:`torch.amp.custom_bwd`, but the op lists of ``forward``'s region hold too.

    Args:
        bwd: ``backward(ctx, *grads)`` of a function whose ``forward`` has :func:`custom_fwd`.
        device_type: As for :func:`custom_fwd`.

    Returns:
        The decorated function, or a decorator when ``bwd`` is not given.

    Raises:
        ValueError: ``device_type`` is not a string.
    """
    _check_device_type(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        with autocast(device_type, dtype=ctx._dtype, enabled=ctx._fwd_used_autocast):
            if is_dynamo_compiling() or not hasattr(ctx, "_fwd_op_lists"):
                return bwd(ctx, *args, **kwargs)
            found = op_lists.enter(ctx._fwd_op_lists)
            try:
                return bwd(ctx, *args, **kwargs)
            finally:
                op_lists.restore(found)

    return decorated
