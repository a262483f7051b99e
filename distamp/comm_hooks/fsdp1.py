"""Hooks for FullyShardedDataParallel, with the names and signatures of torch's own.

torch's FSDP, which takes a second to import, is imported when it is used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms._comm_hooks import default_hooks

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.state import CommHookState, state_of
from distamp.comm_hooks.wrapped import Sample, Wrapped, ranks_of

__all__ = ["LowPrecisionState", "fsdp_bf16_compress_hook", "fsdp_fp16_compress_hook", "wrapped"]

# Elements that `auto` sends: of a unit's gradients this torch says nothing in public.
SAMPLE = 1 << 20


LowPrecisionState = default_hooks.LowPrecisionState


def fsdp_fp16_compress_hook(
    state: default_hooks.LowPrecisionState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average gradients of FSDP1 over the ranks through the ``fp16`` wire.

    Unlike torch's ``fp16_compress_hook`` for FSDP it adds up in fp32, neither over- nor underflows
    at any loss scale, sends half of what torch's does on gloo, and runs on a CPU.

    Args:
        state: Its group and two divide factors are honoured.
        grad: 1-D unsharded gradient; averaged in place where there is no ``output``.
        output: 1-D, this rank's shard of the average.
    """
    _reduce(state_of(state.process_group, "fp16"), state, grad, output)


def fsdp_bf16_compress_hook(
    state: default_hooks.LowPrecisionState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average gradients of FSDP1 over the ranks through the ``bf16`` wire.

    Unlike torch's ``bf16_compress_hook`` for FSDP it adds up in fp32 and runs on a CPU. Takes what
    `fsdp_fp16_compress_hook` does.
    """
    _reduce(state_of(state.process_group, "bf16"), state, grad, output)


def _reduce(hook: CommHookState, state: Any, grad: Tensor, output: Tensor | None = None) -> None:
    if output is not None and output.dtype != state.parameter_type:
        # FSDP1 takes what the hook makes of the shard, in whichever dtype it then is.
        output.data = torch.empty_like(output, dtype=state.parameter_type)
    divisor = state.gradient_predivide_factor * state.gradient_postdivide_factor
    hook.reduce(grad, state.process_group, divisor, output)
    if output is None and grad.dtype != state.parameter_type:
        grad.data = grad.data.to(state.parameter_type)


def wrapped(model: Any) -> Wrapped:
    """Return the outermost FSDP1 module of a model as `register` takes it."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    units = FullyShardedDataParallel.fsdp_modules(model)
    refused = None
    if any(torch_compat.fsdp1_hook(unit) is not None for unit in units):
        refused = "this FSDP1 model has a communication hook already: register one only"
    elif "HYBRID" in model.sharding_strategy.name:
        refused = (
            f"FSDP1 takes no communication hook with {model.sharding_strategy}: use FSDP2, or one "
            "of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"
        )
    elif not model.check_is_root():
        refused = "this FullyShardedDataParallel is inside another: register on the outermost one"
    own = next((each.dtype for each in model.parameters()), torch.float32)
    policies = [unit.mixed_precision for unit in units]
    dtypes = [each.reduce_dtype or each.param_dtype or own for each in policies]

    def attach(state: CommHookState, compressed: bool) -> None:
        if compressed:
            low = LowPrecisionState(group, own)
            model.register_comm_hook(low, partial(_reduce, state))

    group, device = model.process_group, model.compute_device
    whole = model.sharding_strategy.name == "NO_SHARD"
    return Wrapped(
        groups=[group],
        ranks=ranks_of(group),
        shards=[] if whole else [group],
        replicas=group if whole else None,
        feedback=False,
        dtypes=dtypes,
        devices=[device],
        sample=Sample(SAMPLE // group.size() * group.size(), dtypes[0], device),
        what=f"{len(units)} FullyShardedDataParallel",
        refused=refused,
        attach=attach,
    )
