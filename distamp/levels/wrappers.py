"""How a model is wrapped: what stands around it, and what that casts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from distamp.fsdp_unit import FSDPUnit
from distamp.grads import is_dtensor

__all__ = [
    "DDP",
    "FSDP1",
    "FSDP2",
    "SHARDED_DDP",
    "Wrapping",
    "casting_units",
    "compute_device",
    "name_of",
    "recognise",
    "units_of",
]

DDP, SHARDED_DDP = "DistributedDataParallel", "fairscale's ShardedDataParallel"
FSDP1, FSDP2 = "FullyShardedDataParallel", "fully_shard"
# By package and class, so that nothing is imported to look for it.
_NAMES = {
    ("torch", "FSDPModule"): FSDP2,
    ("torch", "FullyShardedDataParallel"): FSDP1,
    ("torch", "DistributedDataParallel"): DDP,
    ("torch", "DataParallel"): "DataParallel",
    ("fairscale", "ShardedDataParallel"): SHARDED_DDP,
}


class Wrapping(NamedTuple):
    """One model and what stands around it.

    Args:
        name: Of the wrapper; None for a plain model.
        inner: The user's own module, whose forward is the model's.
        policies: In which dtypes FSDP's own mixed precision gathers parameters and reduces
            gradients, for each part that it casts.
    """

    name: str | None
    inner: nn.Module
    policies: frozenset[tuple[torch.dtype, torch.dtype | None]]


def name_of(module: nn.Module) -> str | None:
    """Return what this very module is as a wrapper; None where it is none."""
    kinds = [(kind.__module__.split(".")[0], kind.__name__) for kind in type(module).__mro__]
    return next((_NAMES[kind] for kind in kinds if kind in _NAMES), None)


def recognise(model: nn.Module) -> Wrapping:
    """Return what stands around ``model``: DDP, FSDP1, FSDP2, OSS's wrapper, DataParallel, nothing.

    A model of which only parts are sharded counts as sharded, and is its own inner module.
    """
    model = _uncompiled(model)
    parts = [part for part in model.modules() if name_of(part)]
    name = name_of(parts[0]) if parts else None
    wraps = parts[:1] == [model] and name != FSDP2
    inner = _uncompiled(model.get_submodule("module")) if wraps else model
    policies = frozenset((dtype, _policy(p)[1]) for p in parts if (dtype := _policy(p)[0]))
    return Wrapping(name, inner, policies)


def compute_device(model: nn.Module) -> torch.device | None:
    """Return where a model computes, which under CPU offload is not where its parameters rest.

    None for a model without parameters. Of a DTensor it is the device type of its mesh.
    """
    for part in model.modules():
        if name_of(part) == FSDP1:
            return part.compute_device  # type: ignore[return-value]
    first = next(model.parameters(), None)
    if is_dtensor(first):
        return torch.device(first.device_mesh.device_type)
    return None if first is None else first.device


def units_of(
    module: nn.Module, around: nn.Module | None = None
) -> dict[nn.Module, nn.Module | None]:
    """Return every module with the unit of FSDP that has its weights, if any.

    Args:
        module: Where to begin.
        around: The unit that it is in.
    """
    around = module if name_of(module) in (FSDP1, FSDP2) else around
    found = {module: around}
    for child in module.children():
        found |= units_of(child, around)
    return found


def casting_units(model: nn.Module) -> dict[nn.Module, nn.Module | None]:
    """Return every module with the unit of FSDP whose mixed precision casts its weights, if any."""
    return {
        module: None if unit is None or _policy(unit)[0] in (None, torch.float32) else unit
        for module, unit in units_of(model).items()
    }


def _policy(module: nn.Module) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes that FSDP gathers and reduces one module in; None for the parameters'.

    What is reduced in the parameters' own dtype is taken for float32, which FSDP2's masters are.
    """
    if name_of(module) == FSDP2:
        unit = FSDPUnit(module)
        return unit.param_dtype, unit.reduce_dtype(torch.float32)
    policy: Any = getattr(module, "mixed_precision", None)
    return getattr(policy, "param_dtype", None), getattr(policy, "reduce_dtype", None)


def _uncompiled(model: nn.Module) -> nn.Module:
    inner = getattr(model, "_orig_mod", None)  # torch.compile's wrapper
    return inner if isinstance(inner, nn.Module) else model
