"""FSDP1's gradients through a wire: torch's hooks for it, and ``register_comm_hook``.

Imported when it is used: torch's FSDP takes a second to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.agreement import agree
from distamp.comm_hooks.auto import as_it_is, choose_for_copies, choose_for_shards
from distamp.comm_hooks.choice import AUTO, Choice
from distamp.comm_hooks.fsdp1_hooks import LowPrecisionState, fsdp1_hook
from distamp.comm_hooks.shards import check_format, check_width
from distamp.comm_hooks.state import CommHookState
from distamp.comm_hooks.wire import WIRE_FORMATS, WireFormat, wire_format

__all__ = ["register_fsdp1"]


def register_fsdp1(model: FullyShardedDataParallel, wire: WireFormat | None) -> CommHookState:
    """Send the gradients of an FSDP1 model through ``wire``.

    Args:
        model: The outermost ``FullyShardedDataParallel``; not run yet.
        wire: The format on the way; None to choose one by time, or none.

    Returns:
        The state of all its hooks.

    Raises:
        ValueError: not the outermost wrapper, a hook is there already, a hybrid strategy, a
            format that needs error feedback, or gradients in a dtype not wider than the wire.
        LockstepError: a rank holds another format or model; on all ranks.
    """
    if wire is not None:
        check_format(wire)
    if not model.check_is_root():
        raise ValueError(
            "this FullyShardedDataParallel is inside another: register on the outermost one"
        )
    units = torch_compat.fsdp1_units(model)
    for unit in units:
        _check_unit(unit, wire)
    group, device = model.process_group, model.compute_device
    assert group is not None
    assert device is not None
    numel = sum(sum(_numels(unit)) for unit in units)
    agree(AUTO if wire is None else wire.name, {group: numel})
    choice = _choose(model, units, group, device) if wire is None else None
    if choice is not None:
        if not choice.compressed:
            return CommHookState(as_it_is(_reduced_in(model)), group, choice)
        wire = wire_format(choice.wire)
    assert wire is not None
    state = CommHookState(wire, group, choice)
    model.register_comm_hook(
        LowPrecisionState(group, _dtype_of(model), hook=state), _HOOKS[wire.name]
    )
    if group.size() > 1:
        state.channel(device)
    for index, unit in enumerate(units):
        own = LowPrecisionState(
            group,
            _dtype_of(unit),
            hook=state,
            name=f"the gradients of FSDP1 unit {index}",
            index=index,
            boundaries=list(accumulate(_numels(unit)))[:-1],
        )
        torch_compat.set_fsdp1_hook(unit, own, _HOOKS[wire.name])
    return state


def _hook(name: str) -> Callable[[Any, Tensor, Tensor | None], None]:
    def hook(state: Any, grad: Tensor, output: Tensor | None = None) -> None:
        fsdp1_hook(name, state, grad, output)

    hook.__name__ = hook.__qualname__ = f"fsdp_{name}_hook"
    return hook


_HOOKS = {name: _hook(name) for name in WIRE_FORMATS}
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def _check_unit(unit: FullyShardedDataParallel, wire: WireFormat | None) -> None:
    if torch_compat.take_fsdp1_hook(unit) is not None:
        raise ValueError("this FSDP1 model has a communication hook already: register one only")
    if unit.sharding_strategy in _HYBRID:
        raise ValueError(
            f"FSDP1 takes no communication hook with {unit.sharding_strategy}: use FSDP2, or "
            "one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"
        )
    if wire is not None:
        check_width(wire, _reduced_in(unit), "MixedPrecision(reduce_dtype=...)")


def _numels(unit: FullyShardedDataParallel) -> list[int]:
    """Return the elements of each parameter of a unit, unsharded, as they lie there."""
    flat = torch_compat.flat_parameter(unit)
    return [] if flat is None else list(torch_compat.numels_in(flat))


def _choose(
    model: FullyShardedDataParallel,
    units: Sequence[FullyShardedDataParallel],
    group: ProcessGroup,
    device: torch.device,
) -> Choice:
    """Choose for the unit with the most parameters."""
    numel = max((sum(_numels(unit)) for unit in units), default=1)
    dtype = min((_reduced_in(unit) for unit in units), key=lambda dtype: dtype.itemsize)
    whole = model.sharding_strategy is ShardingStrategy.NO_SHARD
    choosing = choose_for_copies if whole else choose_for_shards
    return choosing(numel, dtype, device, group)


def _reduced_in(unit: FullyShardedDataParallel) -> torch.dtype:
    precision = unit.mixed_precision
    return precision.reduce_dtype or precision.param_dtype or _dtype_of(unit)


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)
