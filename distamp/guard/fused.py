"""Steps of fused optimizers: their kernel unscales, clips and skips."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor

from distamp import device_utils
from distamp.clip_grad import StepDecision, as_found_inf_tensor
from distamp.errors import ConfigError
from distamp.optim_utils import OptimizerView, params_of, unwrap_optimizer

__all__ = [
    "check_device_supported",
    "check_step_arguments",
    "fused_step",
    "skip_corrupts_momentum",
    "step_arg_names",
    "step_owner",
    "supports_found_inf",
    "takes_grad_scaler",
]

_dtype_of = operator.attrgetter("dtype")


def step_owner(optimizer: Any) -> Any:
    """Return the object with the ``step`` that runs; a wrapper that forwards all names has none."""
    return optimizer if hasattr(type(optimizer), "step") else unwrap_optimizer(optimizer)


def supports_found_inf(optimizer: Any) -> bool:
    """Return whether the kernel of an optimizer unscales and skips, as torch finds that out.

    torch leaves its mark on an optimizer that a loaded state has made unfused, and fails in the
    step. Such an optimizer does not support it.
    """
    owner = step_owner(optimizer)
    if not getattr(owner, "_step_supports_amp_scaling", False):
        return False
    if not type(owner).step.__module__.startswith("torch.optim."):
        # A class with a step of its own, also a subclass, does as its mark says.
        return True
    return all(group.get("fused", True) for group in owner.param_groups)


@functools.lru_cache(maxsize=64)
def step_arg_names(optimizer_type: Hashable) -> tuple[str, ...]:
    """Return the names of the arguments that the ``step`` of a class takes, in order."""
    step = cast("Any", optimizer_type).step
    names = tuple(inspect.signature(step).parameters)
    return names[1:] if names[:1] == ("self",) else names


def takes_grad_scaler(optimizer: Any) -> bool:
    """Return whether ``step`` takes the scaler itself, by torch's older protocol."""
    owner_type: Any = type(step_owner(optimizer))
    return "grad_scaler" in step_arg_names(owner_type)


def check_device_supported(device: torch.device | str) -> None:
    """Refuse a device that has no float64, in which norms are summed.

    Raises:
        ConfigError: The device is MPS.
    """
    if torch.device(device).type == "mps":
        raise ConfigError(
            "MPS has no float64, in which norms and inverse scales are computed, and its fused "
            "kernels take neither flag nor scale. Train there without a guard, in bfloat16 or "
            "float32, or with torch.amp.GradScaler."
        )


def check_step_arguments(optimizer: Any, args: tuple[Any, ...], norm_arg_names: list[str]) -> None:
    """Refuse arguments that the optimizer's own ``step`` would take for others.

    Args:
        optimizer: The optimizer.
        args: The positional arguments for ``optimizer.step``.
        norm_arg_names: The names of the arguments of our own ``step`` that were given.

    Raises:
        TypeError: The optimizer's ``step`` has a parameter of one of these names, or it would take
            the first of ``args`` for its closure, although that cannot be called.
    """
    if not args and not norm_arg_names:
        return
    owner_type: Any = type(step_owner(optimizer))
    own_names = step_arg_names(owner_type)
    ambiguous = set(own_names).intersection(norm_arg_names)
    if ambiguous:
        raise TypeError(
            f"The step of {owner_type.__name__} has a {min(ambiguous)} of its own, so it is not "
            f"known which of the two {min(ambiguous)}= is for. Call "
            "clip_grad_norm_(optimizer, max_norm) before step, or call step_all, which passes "
            "nothing on."
        )
    if args and args[0] is not None and not callable(args[0]) and own_names[:1] == ("closure",):
        text = f"{args[0]!r:.80}"
        max_norm = text if isinstance(args[0], (int, float)) else "1.0"
        raise TypeError(
            f"step(optimizer, {text}) passes {text} to {owner_type.__name__}.step as its closure, "
            "and a closure must be a function. max_norm is a keyword: step(optimizer, "
            f"max_norm={max_norm})."
        )


def skip_corrupts_momentum(optimizer: Any) -> bool:
    """Return whether a step skipped inside the kernel would corrupt the optimizer's state.

    torch's fused SGD allocates its momentum buffers without values, and fills them in the first
    step. If the kernel skips that step, the next step reads the uninitialised values. So does a
    step with a parameter that was added later.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    state = optimizer.state
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        for param in group["params"]:
            has_buffer = state.get(param, {}).get("momentum_buffer") is not None
            if param.grad is not None and not has_buffer:
                return True
    return False


def fused_step(
    optimizer: Any,
    view: OptimizerView,
    scale: Tensor,
    is_scaled: bool,
    decision: StepDecision,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step a fused optimizer: its kernel unscales, clips and skips, and the host does not wait.

    Args:
        optimizer: The optimizer as the user passed it.
        view: Its view.
        scale: The loss scale, 0-d float32, on the device of the kernel.
        is_scaled: Whether the gradients are still scaled.
        decision: The decision of all ranks.
        args: Passed to ``optimizer.step``.
        kwargs: Passed to ``optimizer.step``.

    Returns:
        The result of ``optimizer.step``.
    """
    owner = step_owner(optimizer)
    is_torch_class = type(owner).__module__.startswith("torch.optim.")
    skip, clip_coef = decision.skip, decision.clip_coef
    is_clipped = isinstance(clip_coef, Tensor) or clip_coef < 1.0
    if is_clipped and torch.float64 in map(_dtype_of, params_of(view.holder)):
        # The kernel divides by a float32, which is not exact enough.
        view.multiply_grads_(decision.clip_coef_tensor(scale.device))
        is_clipped = False
    if skip is True and is_torch_class:
        # The kernel would do nothing, or leave an uninitialised momentum.
        return None
    # A kernel of torch need not read a flag that the host knows to be 0.
    is_known_clean = skip is False and is_torch_class
    found_inf = None if is_known_clean else as_found_inf_tensor(skip, scale.device)
    grad_scale = getattr(owner, "grad_scale", None)
    if is_scaled:
        grad_scale = scale if grad_scale is None else scale * grad_scale
    if is_clipped:
        inv_clip_coef = _inv_clip_coef(clip_coef, scale.device)
        grad_scale = inv_clip_coef if grad_scale is None else grad_scale * inv_clip_coef
    try:
        owner.grad_scale, owner.found_inf = grad_scale, found_inf
        return owner.step(*args, **kwargs)
    finally:
        del owner.grad_scale
        del owner.found_inf


def _inv_clip_coef(clip_coef: float | Tensor, device: torch.device) -> Tensor:
    """Return 1 / clip_coef as 0-d float32, because a kernel divides; a factor of 0 gives inf."""
    if isinstance(clip_coef, Tensor):
        return device_utils.to_device(clip_coef.reciprocal().float(), device)
    inverse = 1.0 / clip_coef if clip_coef else math.inf
    return torch.full((), inverse, dtype=torch.float32, device=device)
