"""The wrapper of a model, and the dtypes to which FSDP's own mixed precision casts its parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from distamp.fsdp_unit import FSDPUnit
from distamp.grads import is_dtensor

__all__ = [
    "DATA_PARALLEL",
    "DDP",
    "FSDP1",
    "FSDP2",
    "SHARDED_DDP",
    "WrapperInfo",
    "casting_fsdp_unit_by_module",
    "compute_device",
    "fsdp_unit_by_module",
    "inspect_wrapper",
    "wrapper_name",
]

DDP = "DistributedDataParallel"
DATA_PARALLEL = "DataParallel"
FSDP1 = "FullyShardedDataParallel"
FSDP2 = "fully_shard"
SHARDED_DDP = "fairscale's ShardedDataParallel"

# By package and class, so that no package is imported to look for its class.
_NAMES = {
    ("torch", "FSDPModule"): FSDP2,
    ("torch", "FullyShardedDataParallel"): FSDP1,
    ("torch", "DistributedDataParallel"): DDP,
    ("torch", "DataParallel"): DATA_PARALLEL,
    ("fairscale", "ShardedDataParallel"): SHARDED_DDP,
}


class WrapperInfo(NamedTuple):
    """The wrapper of one model.

    Args:
        name: The name of the wrapper, or None for a plain model.
        inner: The user's own module without the wrapper.
        policies: For each part that FSDP's own mixed precision casts, the dtype of the gathered
            parameters and the dtype of the reduced gradients.
    """

    name: str | None
    inner: nn.Module
    policies: frozenset[tuple[torch.dtype, torch.dtype | None]]


def wrapper_name(module: nn.Module) -> str | None:
    """Return the name of the wrapper that this very module is, or None."""
    for cls in type(module).__mro__:
        package = cls.__module__.split(".")[0]
        name = _NAMES.get((package, cls.__name__))
        if name is not None:
            return name
    return None


def inspect_wrapper(model: nn.Module) -> WrapperInfo:
    """Return the wrapper of a model: DDP, FSDP1, FSDP2, fairscale's, DataParallel, or none.

    A model with sharded parts counts as sharded, and has no inner module but itself.
    """
    model = _uncompiled(model)
    wrappers = [module for module in model.modules() if wrapper_name(module) is not None]
    if not wrappers:
        return WrapperInfo(None, model, frozenset())
    name = wrapper_name(wrappers[0])
    inner = model
    if wrappers[0] is model and name != FSDP2:
        inner = _uncompiled(model.get_submodule("module"))
    policies: set[tuple[torch.dtype, torch.dtype | None]] = set()
    for wrapper in wrappers:
        param_dtype, reduce_dtype = _policy(wrapper)
        if param_dtype is not None:
            policies.add((param_dtype, reduce_dtype))
    return WrapperInfo(name, inner, frozenset(policies))


def compute_device(model: nn.Module) -> torch.device | None:
    """Return the device on which a model computes; None for a model without parameters.

    Under CPU offload, parameters rest on another device. The device of a DTensor is the device type
    of its mesh.
    """
    for module in model.modules():
        if wrapper_name(module) == FSDP1:
            return module.compute_device  # type: ignore[return-value]
    first = next(model.parameters(), None)
    if is_dtensor(first):
        return torch.device(first.device_mesh.device_type)
    return None if first is None else first.device


def fsdp_unit_by_module(
    module: nn.Module, outer_unit: nn.Module | None = None
) -> dict[nn.Module, nn.Module | None]:
    """Return each module with the unit of FSDP that has its parameters, or None.

    Args:
        module: The root of the search.
        outer_unit: The unit around the root.
    """
    unit = module if wrapper_name(module) in (FSDP1, FSDP2) else outer_unit
    units = {module: unit}
    for child in module.children():
        units.update(fsdp_unit_by_module(child, unit))
    return units


def casting_fsdp_unit_by_module(model: nn.Module) -> dict[nn.Module, nn.Module | None]:
    """Return each module with the unit of FSDP that casts its parameters, or None.

    A module without parameters has the casting unit around it.
    """
    casting_units: dict[nn.Module, nn.Module | None] = {}
    for module, unit in fsdp_unit_by_module(model).items():
        casting_units[module] = None
        if unit is not None and _casts_parameters(unit, module):
            casting_units[module] = unit
    return casting_units


def _casts_parameters(unit: nn.Module, module: nn.Module) -> bool:
    """Return whether a unit of FSDP casts the parameters of one of its modules."""
    param_dtype, _ = _policy(unit)
    if param_dtype in (None, torch.float32):
        return False
    if wrapper_name(unit) != FSDP2:
        return True
    # Since torch 2.15 ``param_dtype_override_fn`` of a policy may keep a parameter in float32.
    fsdp_unit = FSDPUnit(unit)
    params = list(module.parameters(recurse=False))
    dtypes = {fsdp_unit.param_dtype_of(param) for param in params}
    return dtypes != {torch.float32}


def _policy(module: nn.Module) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes in which FSDP gathers and reduces one module; None for the parameters'.

    A reduction in the parameters' own dtype counts as float32, the dtype of FSDP2's shards.
    """
    if wrapper_name(module) == FSDP2:
        unit = FSDPUnit(module)
        return unit.param_dtype, unit.reduce_dtype(torch.float32)
    policy: Any = getattr(module, "mixed_precision", None)
    return getattr(policy, "param_dtype", None), getattr(policy, "reduce_dtype", None)


def _uncompiled(model: nn.Module) -> nn.Module:
    inner = getattr(model, "_orig_mod", None)  # torch.compile's wrapper
    return inner if isinstance(inner, nn.Module) else model
