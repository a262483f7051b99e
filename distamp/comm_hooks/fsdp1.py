"""FSDP1's gradients through a wire: torch's hooks for it, and ``register_comm_hook``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from distamp.comm_hooks.auto import as_it_is, choose_for_copies, choose_for_shards
from distamp.comm_hooks.choice import AUTO, Choice
from distamp.comm_hooks.fsdp_state import ShardedHookState, check_format, check_width
from distamp.comm_hooks.stats import Account, HookStats
from distamp.comm_hooks.wire import WIRE_FORMATS, WireFormat, wire_format
from distamp.comm_hooks.wire_reduce import agree, all_reduce, reduce_scatter

__all__ = [
    "LowPrecisionState",
    "fsdp_bf16_compress_hook",
    "fsdp_fp16_compress_hook",
    "register_fsdp1",
]


class LowPrecisionState(default_hooks.LowPrecisionState):
    """State of the FSDP1 hooks, as torch's ``LowPrecisionState``, and an account of its own.

    Args:
        process_group: The ranks that FSDP shards over.
        parameter_type: dtype of the parameters, to which reduced gradients are cast.
    """

    def __init__(
        self, process_group: ProcessGroup, parameter_type: torch.dtype = torch.float32
    ) -> None:
        super().__init__(process_group, parameter_type)  # type: ignore[no-untyped-call]
        self.account = Account()

    def stats(self) -> HookStats:
        """Return what this rank has sent, waited for and met so far."""
        return self.account.stats()


def fsdp_fp16_compress_hook(
    state: default_hooks.LowPrecisionState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average gradients of FSDP1 over the ranks through the ``fp16`` wire.

    Unlike torch's ``fp16_compress_hook`` for FSDP it adds up in fp32, neither over- nor underflows
    at any loss scale, sends half of what torch's does on gloo, and runs on a CPU.

    Args:
        state: Ours or torch's ``LowPrecisionState``; its two divide factors are honoured.
        grad: 1-D unsharded gradient; averaged in place where there is no ``output``.
        output: 1-D, this rank's shard of the average.
    """
    _low_precision_hook(wire_format("fp16"), state, grad, output)


def fsdp_bf16_compress_hook(
    state: default_hooks.LowPrecisionState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average gradients of FSDP1 over the ranks through the ``bf16`` wire.

    Unlike torch's ``bf16_compress_hook`` for FSDP it adds up in fp32 and runs on a CPU.

    Args:
        state: Ours or torch's ``LowPrecisionState``; its two divide factors are honoured.
        grad: 1-D unsharded gradient; averaged in place where there is no ``output``.
        output: 1-D, this rank's shard of the average.
    """
    _low_precision_hook(wire_format("bf16"), state, grad, output)


def register_fsdp1(model: FullyShardedDataParallel, wire: WireFormat | None) -> ShardedHookState:
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
    units = FullyShardedDataParallel.fsdp_modules(model)
    for unit in units:
        if unit._comm_hook is not None:
            raise ValueError("this FSDP1 model has a communication hook already: register one only")
        if unit.sharding_strategy in _HYBRID:
            raise ValueError(
                f"FSDP1 takes no communication hook with {unit.sharding_strategy}: use FSDP2, or "
                "one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"
            )
        if wire is not None:
            check_width(wire, _reduced_in(unit), "MixedPrecision(reduce_dtype=...)")
    assert model.process_group is not None
    assert model.compute_device is not None
    flat = [unit._flat_param for unit in units if unit._flat_param is not None]
    numel = sum(each._unpadded_unsharded_size.numel() for each in flat)
    agree(AUTO if wire is None else wire.name, numel, model.process_group, model.compute_device)
    choice = _choose(model, units) if wire is None else None
    if choice is not None:
        if not choice.compressed:
            return ShardedHookState(as_it_is(_reduced_in(model)), choice)
        wire = wire_format(choice.wire)
    assert wire is not None
    state = ShardedHookState(wire, choice)
    hook_state = LowPrecisionState(model.process_group, _dtype_of(model))
    hook_state.account = state.account
    model.register_comm_hook(hook_state, _HOOKS[wire.name])
    return state


def _low_precision_hook(
    wire: WireFormat,
    state: default_hooks.LowPrecisionState,
    grad: Tensor,
    output: Tensor | None,
) -> None:
    account = state.account if isinstance(state, LowPrecisionState) else Account()
    group = state.process_group
    divisor = state.gradient_predivide_factor * state.gradient_postdivide_factor
    if output is None:
        news = all_reduce(wire, grad, group, divisor=divisor, account=account)
        if grad.dtype != state.parameter_type:
            grad.data = grad.data.to(state.parameter_type)
    else:
        # FSDP1 takes what the hook makes of the shard, in whichever dtype it then is.
        if output.dtype != state.parameter_type:
            output.data = torch.empty_like(output, dtype=state.parameter_type)
        news = reduce_scatter(wire, grad, output, group, divisor=divisor, account=account)
    if grad.device.type == "cpu":
        account.nonfinite += bool(news.nonfinite)


def _hook(wire: WireFormat) -> Callable[[Any, Tensor, Tensor | None], None]:
    def hook(state: Any, grad: Tensor, output: Tensor | None = None) -> None:
        _low_precision_hook(wire, state, grad, output)

    hook.__name__ = hook.__qualname__ = f"fsdp_{wire.name}_hook"
    return hook


_HOOKS = {name: _hook(wire) for name, wire in WIRE_FORMATS.items()}
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def _choose(model: FullyShardedDataParallel, units: Sequence[FullyShardedDataParallel]) -> Choice:
    """Choose for the unit with the most parameters."""
    flat = [unit._flat_param for unit in units if unit._flat_param is not None]
    numel = max((each._unpadded_unsharded_size.numel() for each in flat), default=1)
    dtype = min((_reduced_in(unit) for unit in units), key=lambda dtype: dtype.itemsize)
    assert model.process_group is not None
    assert model.compute_device is not None
    whole = model.sharding_strategy is ShardingStrategy.NO_SHARD
    choosing = choose_for_copies if whole else choose_for_shards
    return choosing(numel, dtype, model.compute_device, model.process_group)


def _reduced_in(unit: FullyShardedDataParallel) -> torch.dtype:
    precision = unit.mixed_precision
    return precision.reduce_dtype or precision.param_dtype or _dtype_of(unit)


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)
