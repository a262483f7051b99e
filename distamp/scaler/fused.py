"""What torch's fused optimizers take from a scaler: the scale and the flag, for one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distamp.scaler.known import Known

__all__ = ["leaves_garbage", "step_with_flags", "takes_flags"]


def takes_flags(optimizer: torch.optim.Optimizer, known: Known) -> bool:
    """Return whether the optimizer's own kernel unscales and skips (torch's fused optimizers).

    One that wants the scaler itself is handed unscaled gradients instead, and so is one that a
    loaded state has made unfused: torch leaves its mark on the optimizer and fails in the step.
    """
    if known.wrapper or known.wants_scaler:
        return False
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return all(group.get("fused", True) for group in optimizer.param_groups)


def leaves_garbage(optimizer: torch.optim.Optimizer, known: Known) -> bool:
    """Return whether a step skipped inside the kernel would spoil the optimizer's state.

    torch's fused SGD makes its momentum buffers uninitialised and fills them in the first step; if
    the kernel skips that one, the next takes what lies there for momentum. So until every buffer is
    filled, the flag is read on the host and a skipped step is not called.
    """
    if known.buffers_filled or not isinstance(optimizer, torch.optim.SGD):
        return False
    known.buffers_filled = all(
        group["momentum"] == 0 or optimizer.state.get(p, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    )
    return not known.buffers_filled


def step_with_flags(
    optimizer: torch.optim.Optimizer,
    scale: Tensor | None,
    found_inf: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step by torch's protocol: the kernel divides by the scale, or does nothing on an overflow.

    Args:
        optimizer: One that `takes_flags`.
        scale: What its gradients are still multiplied by; None where they are unscaled.
        found_inf: 0-d, 1 where the kernel is to do nothing.
        args: Passed to ``optimizer.step``.
        kwargs: Passed to ``optimizer.step``.
    """
    grad_scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        grad_scale = scale if grad_scale is None else scale * grad_scale
    try:
        optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        return optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
        del optimizer.found_inf  # type: ignore[attr-defined]
