"""What an optimizer steps and what wraps it, whichever library it comes from."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "describe",
    "find_closure",
    "inner_optimizer",
    "innermost",
    "is_inner_step",
    "methods_beyond_torch",
    "parameter_names",
    "parameters_of",
    "unwrapped",
]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every parameter of every group, in order."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    return parameters


def parameter_names(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield a name for each of `parameters_of`: the optimizer's own, else group and index."""
    for group_index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for index in range(len(group["params"])):
            yield names[index] if names else f"group {group_index}, parameter {index}"


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return the optimizer that steps this rank's share for a wrapper that splits the parameters.

    ZeroRedundancyOptimizer and fairscale's OSS hold all parameters, and an optimizer over a part;
    a method gathers the states of all parts. One that steps a part of its parameters by another
    optimizer, and the rest itself, as Muon with an AdamW inside, has no share.
    """
    attributes: Mapping[str, Any] = getattr(optimizer, "__dict__", _NOTHING)
    if _INSIDE.isdisjoint(attributes) or not hasattr(optimizer, "consolidate_state_dict"):
        return None
    candidates = [attributes[name] for name in _HOLDING if name in attributes]
    for candidate in candidates:
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    return None


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer behind a framework's wrapper, which has no parameters of its own.

    Lightning, Fabric and Accelerate hand out objects with ``.optimizer`` or ``._optimizer`` and
    the ``param_groups`` of the one inside. A wrapper with groups of its own is itself returned.
    """
    if _INSIDE.isdisjoint(getattr(optimizer, "__dict__", _NOTHING)):
        return optimizer
    for _ in range(8):  # wrappers may hold each other
        inner = _inside(optimizer)
        if inner is None:
            break
        optimizer = inner
    return optimizer


_NOTHING: Mapping[str, Any] = {}
_HOLDING = ("optim", "optimizer", "_optim", "_optimizer")
_INSIDE = frozenset(_HOLDING)


def _inside(optimizer: Any) -> Any:
    attributes: Mapping[str, Any] = getattr(optimizer, "__dict__", _NOTHING)
    for name in ("optimizer", "_optimizer"):
        inner = attributes.get(name)
        if inner is not optimizer and hasattr(inner, "step"):
            groups = getattr(optimizer, "param_groups", None)
            if groups is None or groups is getattr(inner, "param_groups", None):
                return inner
    return None


def innermost(optimizer: Any) -> Any:
    """Return what is inside all wrappers: the optimizer that steps on this rank."""
    if _INSIDE.isdisjoint(getattr(optimizer, "__dict__", _NOTHING)):
        return optimizer
    holder = unwrapped(optimizer)
    inner = inner_optimizer(holder)
    return holder if inner is None else unwrapped(inner)


def find_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of ``optimizer.step``, given by position or name."""
    if not args and not kwargs:
        return None
    candidates = [*args, kwargs.get("closure")]
    return next((candidate for candidate in candidates if callable(candidate)), None)


#: What torch lays around the ``step`` of each class, to call hooks: all have one code.
_CALLS_HOOKS = torch.optim.Optimizer.profile_hook_step(find_closure).__code__


def is_inner_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return, in a hook, whether the step it is called for is a part of another, by ``super()``.

    torch calls the hooks again for a parent class of which it has seen an optimizer by itself.
    """
    steps = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALLS_HOOKS and frame.f_locals.get("self") is optimizer:
            steps += 1
        frame = frame.f_back
    return steps > 1


def methods_beyond_torch(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods of an optimizer's class that no class of torch has, with names.

    Such methods may write parameters outside of ``step``, as ``eval`` of schedulefree and
    ``first_step`` of SAM do. Static and class methods, which have no optimizer, are left out.
    """
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        public = not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)
        if public and inspect.isfunction(method) and not method.__module__.startswith("torch."):
            yield name, method


def describe(optimizer: Any) -> str:
    """Return the class and the number of parameters, for messages: "AdamW (12 parameters)"."""
    count = len(parameters_of(optimizer))
    plural = "" if count == 1 else "s"
    return f"{type(optimizer).__name__} ({count} parameter{plural})"
