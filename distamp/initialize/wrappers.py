"""How a model is wrapped: what holds it, what that casts by itself, and how its sync is paused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from distamp.precision import Precision

__all__ = [
    "Wrapping",
    "batchnorms_cast_by_wrapper",
    "gathers_for_region",
    "is_fsdp2",
    "no_sync",
    "outermost_wrapper",
    "recognise",
]


@dataclass(frozen=True)
class Wrapping:
    """One model and what stands around it.

    Args:
        name: Of the wrapper, for people and for comparison; None for a plain model.
        inner: The user's own module, whose forward is the model's.
        computes_in: The dtype that the wrapper itself casts parameters to for the forward pass,
            from the float32 that the optimizer steps; None if it does not.
    """

    name: str | None
    inner: nn.Module
    computes_in: torch.dtype | None

    @property
    def is_ddp(self) -> bool:
        """Whether torch's DistributedDataParallel reduces the gradients."""
        return self.name == _DDP

    @property
    def keeps_buckets(self) -> bool:
        """Whether gradients are views of buckets, which setting them to None would detach."""
        return self.name == _SHARDED_DDP

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the parameters."""
        return self.name in _SHARDING


def recognise(model: nn.Module) -> Wrapping:
    """Return what stands around ``model``: DDP, FSDP1, FSDP2, fairscale, DataParallel or nothing.

    A model whose parts alone are wrapped counts as wrapped, and is its own inner module.
    """
    model = _uncompiled(model)
    name = _name(model)
    if name is None:
        parts = [part for part in model.modules() if _name(part) is not None]
        if not parts:
            return Wrapping(None, model, None)
        return Wrapping(_name(parts[0]), model, _computes_in(parts))
    inner = model if is_fsdp2(model) else _uncompiled(getattr(model, "module"))  # noqa: B009
    return Wrapping(name, inner, _computes_in(list(model.modules())))


def outermost_wrapper(model: nn.Module) -> str | None:
    """Return the name of what stands around ``model`` or a part of it; None for a plain one."""
    return recognise(model).name


def gathers_for_region(model: nn.Module, precision: Precision) -> bool:
    """Return whether ``fully_shard`` gathers weights in the dtype of the autocast region.

    And reduces gradients in the level's, as it does without a policy.
    """
    parts: list[Any] = [part for part in model.modules() if is_fsdp2(part)]
    policies = [part._get_fsdp_state()._mp_policy for part in parts]
    casting = [policy for policy in policies if policy.param_dtype is not None]
    return bool(casting) and all(
        (p.param_dtype, p.reduce_dtype) == (precision.compute, precision.reduce) for p in casting
    )


def batchnorms_cast_by_wrapper(model: nn.Module) -> list[str]:
    """Return the batch norms whose parameters a sharding wrapper casts along with the rest.

    A wrapper casts what it holds, down to the next wrapper; a batch norm is spared by one of its
    own that casts nothing.
    """
    found: list[str] = []

    def walk(module: nn.Module, name: str, dtype: torch.dtype | None) -> None:
        dtype = _own_dtype(module) if _name(module) in _SHARDING else dtype
        affine = isinstance(module, _BatchNorm) and module.affine
        if affine and dtype not in (None, torch.float32):
            found.append(name)
        for child_name, child in module.named_children():
            walk(child, f"{name}.{child_name}" if name else child_name, dtype)

    walk(model, "", None)
    return found


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Leave gradients unreduced in what runs inside, forward and backward, whatever the wrapper."""
    model = _uncompiled(model)
    if hasattr(model, "no_sync"):  # DDP, FSDP1, fairscale's
        with model.no_sync():  # type: ignore[operator]
            yield
        return
    sharded = [part for part in model.modules() if is_fsdp2(part)]
    for part in sharded:
        part.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for part in sharded:
            part.set_requires_gradient_sync(True, recurse=False)


_DDP = "DistributedDataParallel"
_FSDP1, _FSDP2 = "FullyShardedDataParallel", "fully_shard"
_SHARDED_DDP = "fairscale's ShardedDataParallel"
_FAIRSCALE_FSDP = "fairscale's FullyShardedDataParallel"
_SHARDING = (_FSDP1, _FSDP2, _FAIRSCALE_FSDP)


def is_fsdp2(module: object) -> TypeGuard[Any]:
    """Return whether ``fully_shard`` was applied to a module; does not import what defines it."""
    return _is_of_torchs_fsdp(module, "FSDPModule")


def _is_of_torchs_fsdp(module: object, name: str) -> bool:
    return any(
        kind.__name__ == name and kind.__module__.startswith("torch.distributed.fsdp")
        for kind in type(module).__mro__
    )


def _name(module: nn.Module) -> str | None:
    if is_fsdp2(module):
        return _FSDP2
    if _is_of_torchs_fsdp(module, _FSDP1):
        return _FSDP1
    if isinstance(module, DistributedDataParallel):
        return _DDP
    if isinstance(module, DataParallel):
        return "DataParallel"
    for kind in type(module).__mro__:  # without importing it
        if kind.__module__.startswith("fairscale.") and kind.__name__ in (
            "ShardedDataParallel",
            "FullyShardedDataParallel",
        ):
            return f"fairscale's {kind.__name__}"
    return None


def _computes_in(parts: list[nn.Module]) -> torch.dtype | None:
    for part in parts:
        if _name(part) in _SHARDING and (dtype := _own_dtype(part)) is not None:
            return dtype
    return None


def _own_dtype(module: nn.Module) -> torch.dtype | None:
    if is_fsdp2(module):
        # torch has no public way to ask for the policy.
        policy: Any = module._get_fsdp_state()._mp_policy
        return None if policy is None else policy.param_dtype
    if _is_of_torchs_fsdp(module, _FSDP1):
        settings: Any = module.mixed_precision
        return None if settings is None else settings.param_dtype
    fairscale: Any = module
    return fairscale.compute_dtype if getattr(fairscale, "mixed_precision", False) else None


def _uncompiled(model: nn.Module) -> nn.Module:
    inner = getattr(model, "_orig_mod", None)  # torch.compile's wrapper
    return inner if isinstance(inner, nn.Module) else model
