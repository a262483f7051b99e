"""Optimizers, their wrappers, and the parameters and gradients that an optimizer steps.

Two identities of an optimizer count. The optimizer as the user passed it is called for its step.
`OptimizerView.base` is the optimizer inside all wrappers: histories belong to it.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from distamp.grads import LocalGrads, local_grads, multiply_, no_grad_fast, unscale_

__all__ = [
    "OptimizerView",
    "describe_optimizer",
    "find_closure",
    "is_nested_step",
    "is_trained",
    "methods_beyond_torch",
    "param_names",
    "params_of",
    "set_view",
    "unwrap_optimizer",
    "view_of",
    "zero_local_optimizer",
]


# -- parameters ------------------------------------------------------------------------------------


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every parameter of every group, in order."""
    params: list[Tensor] = []
    for group in optimizer.param_groups:
        params.extend(group["params"])
    return params


def param_names(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield a name for each parameter: the optimizer's name, else group and index."""
    for group_index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for index in range(len(group["params"])):
            yield names[index] if names else f"group {group_index}, parameter {index}"


def is_trained(param: Tensor) -> bool:
    """Return whether optimizers step ``param``, also if it was frozen after the backward pass."""
    return param.requires_grad or param.grad is not None


def describe_optimizer(optimizer: Any) -> str:
    """Return the class and the number of parameters, for messages: "AdamW (12 parameters)"."""
    count = len(params_of(optimizer))
    plural = "" if count == 1 else "s"
    return f"{type(optimizer).__name__} ({count} parameter{plural})"


# -- wrappers --------------------------------------------------------------------------------------

#: Attributes under which wrappers keep an optimizer: those of ZeroRedundancyOptimizer and OSS, of
#: Lightning, Fabric and Accelerate, and of SAM.
_WRAPPED_ATTRS = ("optim", "optimizer", "_optim", "_optimizer", "base_optimizer")
_WRAPPED_ATTR_SET = frozenset(_WRAPPED_ATTRS)
_NO_ATTRS: Mapping[str, Any] = {}
#: Two wrappers may hold each other, so the search ends.
_MAX_WRAPPERS = 8


def _may_wrap(optimizer: Any) -> bool:
    attrs: Mapping[str, Any] = getattr(optimizer, "__dict__", _NO_ATTRS)
    return not _WRAPPED_ATTR_SET.isdisjoint(attrs)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer behind a framework's wrapper, which shares its parameters.

    Lightning, Fabric and Accelerate return objects with ``.optimizer`` or ``._optimizer`` and the
    ``param_groups`` of the optimizer inside; SAM has ``.base_optimizer``. A wrapper with other
    groups, or with masters, is returned itself.
    """
    if not _may_wrap(optimizer):
        return optimizer
    for _ in range(_MAX_WRAPPERS):
        wrapped = _unwrap_once(optimizer)
        if wrapped is None:
            break
        optimizer = wrapped
    return optimizer


def _unwrap_once(optimizer: Any) -> Any:
    attrs: Mapping[str, Any] = getattr(optimizer, "__dict__", _NO_ATTRS)
    if _VIEW_ATTR in attrs:
        # The optimizer inside has no view of these masters.
        return None
    for name in _WRAPPED_ATTRS:
        wrapped = attrs.get(name)
        if wrapped is optimizer or not hasattr(wrapped, "step"):
            continue
        groups = getattr(optimizer, "param_groups", None)
        if groups is None or groups is getattr(wrapped, "param_groups", None):
            return wrapped
    return None


def zero_local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return the optimizer of this rank's share in a wrapper that splits the parameters.

    ZeroRedundancyOptimizer and fairscale's OSS hold all parameters, and an optimizer over a share;
    a method gathers the states of all shares. An optimizer that steps only some of its parameters
    with another optimizer, as Muon with an AdamW inside, has no share.
    """
    if not _may_wrap(optimizer) or not hasattr(optimizer, "consolidate_state_dict"):
        return None
    for name in _WRAPPED_ATTRS:
        candidate = vars(optimizer).get(name)
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    return None


# -- the view of a step ----------------------------------------------------------------------------

_VIEW_ATTR = "_distamp_view"
_grad_of = operator.attrgetter("grad")


class OptimizerView:
    """The parameters and gradients of an optimizer, behind all of its wrappers.

    `MasterParameters` is a view, too: it overrides the methods in which fp32 masters differ.

    Attributes:
        holder: The optimizer that has the parameters: ZeroRedundancyOptimizer or OSS itself, but
            not the wrapper of a framework.
        base: The optimizer that steps them on this rank. It identifies the optimizer between
            iterations, because a wrapper and the optimizer inside share it.
        is_zero_sharded: Whether each rank steps another share of the parameters.
        has_masters: Whether fp32 masters take the gradients as they are unscaled. Float16
            gradients are allowed then, and a fused kernel must not unscale by itself.
    """

    has_masters = False
    is_zero_sharded = False

    def __init__(self, holder: torch.optim.Optimizer, base: torch.optim.Optimizer) -> None:
        self.holder, self.base = holder, base
        self.is_zero_sharded = base is not holder and getattr(holder, "world_size", 2) > 1
        self._local_grads: LocalGrads | None = None
        self._grads: list[Tensor | None] = []

    def model_params(self) -> list[Tensor]:
        """Return the parameters that receive gradients from a backward pass."""
        return params_of(self.holder)

    def param_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter of the model that this rank steps, with the tensor it steps.

        Both are the same tensor, unless the parameter has a master, which has the unscaled gradient
        after `unscale`.
        """
        params = params_of(self.base)
        return list(zip(params, params, strict=True))

    def has_grads(self) -> bool:
        """Return whether this rank has a gradient of the optimizer, before or after `unscale`."""
        return any(param.grad is not None for param in self.model_params())

    def local_grads(self) -> LocalGrads:
        """Return the gradients of `model_params`; a step converts their layout once.

        The result is computed again if the ``.grad`` of a parameter was replaced.
        """
        params = params_of(self.holder)
        cached = self._local_grads
        if cached is not None and len(params) == len(self._grads):
            is_same = all(map(operator.is_, map(_grad_of, params), self._grads))
            if is_same:
                return cached
        self._local_grads = local_grads(params)
        # Read afterwards, because float16 gradients that are sparse were replaced.
        self._grads = list(map(_grad_of, params))
        return self._local_grads

    def measured_grads(self) -> LocalGrads:
        """Return the gradients that this rank steps, each with the parameter of the model."""
        if self.base is self.holder:
            return self.local_grads()
        return local_grads(params_of(self.base))

    def release_grads(self) -> None:
        """Drop the references to gradients, which a step no longer needs."""
        self._local_grads, self._grads = None, []

    @no_grad_fast
    def unscale(
        self, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply the gradients by ``inv_scale``; return a found-inf flag for each device."""
        values = self.local_grads().values
        return unscale_(values, inv_scale, found_inf, allow_fp16=allow_fp16)

    def multiply_grads_(self, factor: Tensor) -> None:
        """Multiply in place the gradients that this rank steps, and that other ranks step."""
        multiply_(self.local_grads().values, factor)

    def master_tensors(self, stepped: Tensor) -> list[tuple[str, Tensor]]:
        """Return what the master of a stepped tensor adds to the parameter, each with its kind."""
        return []

    def fp32_value(self, stepped: Tensor) -> Tensor:
        """Return a stepped tensor with its value between steps; a copy if it has no storage."""
        return stepped.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the masters: nothing, because this view has no masters."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of another rank with the same parameters."""

    def take_over_writes(self) -> None:
        """Copy to masters the values that other code than the optimizer wrote to parameters."""

    def snapshot_state(self) -> dict[str, Any]:
        """See `distamp.observers.SnapshotSource`: nothing, because this view has no masters."""
        return {}

    def load_snapshot_state(self, state: dict[str, Any]) -> None:
        """See `distamp.observers.SnapshotSource`; parameters have their saved values already."""


def set_view(optimizer: torch.optim.Optimizer, view: OptimizerView) -> None:
    """Let `view_of` find ``view``, which the optimizer owns."""
    setattr(optimizer, _VIEW_ATTR, view)


def view_of(optimizer: Any) -> OptimizerView:
    """Return the view of an optimizer, which may be wrapped."""
    attrs: Mapping[str, Any] = getattr(optimizer, "__dict__", _NO_ATTRS)
    if _WRAPPED_ATTR_SET.isdisjoint(attrs):
        holder = base = optimizer
    else:
        holder = unwrap_optimizer(optimizer)
        local = zero_local_optimizer(holder)
        base = holder if local is None else unwrap_optimizer(local)
    view: OptimizerView | None = getattr(holder, _VIEW_ATTR, getattr(base, _VIEW_ATTR, None))
    return OptimizerView(holder, base) if view is None else view


# -- arguments and hooks of step -------------------------------------------------------------------


def find_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of ``optimizer.step``, given by position or name."""
    if not args and not kwargs:
        return None
    candidates = [*args, kwargs.get("closure")]
    return next((candidate for candidate in candidates if callable(candidate)), None)


#: The code of the function that torch wraps around the ``step`` of each class to call its hooks.
_STEP_HOOK_CODE = torch.optim.Optimizer.profile_hook_step(find_closure).__code__


def is_nested_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return, in a hook, whether its step is called by ``super()`` inside of another step.

    torch calls the hooks again for a parent class if an optimizer of that class exists.
    """
    steps = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP_HOOK_CODE and frame.f_locals.get("self") is optimizer:
            steps += 1
        frame = frame.f_back
    return steps > 1


def methods_beyond_torch(optimizer_type: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods of an optimizer's class that no class of torch has, with names.

    Such methods may write parameters outside of ``step``, as ``eval`` of schedulefree and
    ``first_step`` of SAM do. Static and class methods, which have no optimizer, are left out.
    """
    for name in dir(optimizer_type):
        method = inspect.getattr_static(optimizer_type, name)
        is_public = not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)
        if is_public and inspect.isfunction(method) and not method.__module__.startswith("torch."):
            yield name, method
