"""What an optimizer's own kernel takes of a step: flag, divisor, or the scaler itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from distamp.errors import ConfigError
from distamp.optimizers import unwrapped

__all__ = [
    "leaves_garbage",
    "names_of_step",
    "refuse_mps",
    "refuse_names",
    "refuse_positional",
    "step_with",
    "stepping",
    "takes_flags",
]


def stepping(given: Any) -> Any:
    """Return whose own ``step`` runs: a wrapper that passes all names on has none."""
    return given if hasattr(type(given), "step") else unwrapped(given)


def takes_flags(optimizer: Any) -> bool:
    """Return whether the kernel of what `stepping` returned unscales and skips, as torch asks it.

    One that a loaded state has made unfused does not: torch leaves its mark on the optimizer and
    fails in the step.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return True  # a step of its own, also of a subclass, does what the mark says
    return all(group.get("fused", True) for group in optimizer.param_groups)


@functools.lru_cache(maxsize=64)
def names_of_step(kind: Hashable) -> tuple[str, ...]:
    """Return the names of the arguments that the ``step`` of a class takes, in order."""
    names = tuple(inspect.signature(kind.step).parameters)  # type: ignore[attr-defined]
    return names[1:] if names[:1] == ("self",) else names


def refuse_mps(device: torch.device | str) -> None:
    """Refuse a device that has no float64, in which norms are summed.

    Raises:
        ConfigError: It is MPS.
    """
    if torch.device(device).type == "mps":
        raise ConfigError(
            "MPS has no float64, in which norms and inverse scales are computed, and its fused "
            "kernels take neither flag nor scale: train there without a guard, in bfloat16 or "
            "float32, or with torch.amp.GradScaler"
        )


def leaves_garbage(optimizer: Any) -> bool:
    """Return whether a step skipped inside the kernel would spoil the optimizer's state.

    torch's fused SGD makes its momentum buffers uninitialised and fills them in the first step; if
    the kernel skips that one, the next takes what lies there for momentum. So does a parameter
    that came later.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    state = optimizer.state
    return not all(
        group["momentum"] == 0 or state.get(p, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    )


def refuse_names(optimizer: Any, *names: str) -> None:
    """Refuse arguments of ``step`` that the optimizer's own ``step`` takes, too.

    Raises:
        TypeError: The optimizer's ``step`` has a parameter of one of these names.
    """
    kind: Any = type(stepping(optimizer))
    taken = set(names_of_step(kind)).intersection(names)
    if taken:
        raise TypeError(
            f"The step of {kind.__name__} has a {min(taken)} of its own, so it is not known which "
            f"of the two {min(taken)}= is for. Call clip_grad_norm_(optimizer, max_norm) before "
            "step, or call step_all, which passes nothing on."
        )


def refuse_positional(optimizer: Any, args: tuple[Any, ...]) -> None:
    """Refuse a number that the optimizer's step would take for its closure.

    Raises:
        TypeError: The first of ``args`` would be the closure, and cannot be called.
    """
    if not args or args[0] is None or callable(args[0]):
        return
    kind: Any = type(stepping(optimizer))
    if names_of_step(kind)[:1] == ("closure",):
        value = args[0]
        text = f"{value!r:.80}"
        max_norm = "1.0"
        if isinstance(value, (int, float)):
            max_norm = text
        raise TypeError(
            f"step(optimizer, {text}) passes {text} to {kind.__name__}.step as its closure, and a "
            "closure must be a function. max_norm is a keyword: step(optimizer, "
            f"max_norm={max_norm})."
        )


def step_with(
    optimizer: Any,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step by torch's protocol: the kernel divides by ``grad_scale``, or does nothing."""
    try:
        optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
        return optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale
        del optimizer.found_inf
