"""Hooks for FSDP1, with the names and signatures of torch's own.

torch's FSDP, which takes a second to import, is imported when it is used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms._comm_hooks import default_hooks

from distamp.comm_hooks.adapter import ModelAdapter, TopologyByGroup
from distamp.comm_hooks.formats import CommFormat
from distamp.comm_hooks.hook import CommHook, shared_hook

__all__ = [
    "LowPrecisionState",
    "fsdp1_adapter",
    "fsdp_bf16_compress_hook",
    "fsdp_fp16_compress_hook",
]

LowPrecisionState = default_hooks.LowPrecisionState


def fsdp_fp16_compress_hook(
    state: default_hooks.LowPrecisionState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average gradients of FSDP1 in ``fp16``.

    Unlike torch's ``fp16_compress_hook`` for FSDP it adds up in fp32, neither over- nor underflows
    at any loss scale, sends half of the bytes of torch's on gloo, and runs on a CPU.

    Args:
        state: torch's state, with the group, the dtype of the parameters and two divide factors.
        grad: 1-D unsharded gradient, which is averaged in place if ``output`` is None.
        output: 1-D, this rank's shard of the average.
    """
    _reduce(shared_hook(state.process_group, "fp16"), state, grad, output)


def fsdp_bf16_compress_hook(
    state: default_hooks.LowPrecisionState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average gradients of FSDP1 in ``bf16``.

    Unlike torch's ``bf16_compress_hook`` for FSDP it adds up in fp32 and runs on a CPU. It takes
    the arguments of `fsdp_fp16_compress_hook`.
    """
    _reduce(shared_hook(state.process_group, "bf16"), state, grad, output)


def _reduce(hook: CommHook, state: Any, grad: Tensor, output: Tensor | None = None) -> None:
    divisor = state.gradient_predivide_factor * state.gradient_postdivide_factor
    if output is None:
        hook.all_reduce(grad, state.process_group, divisor).wait()
        if grad.dtype != state.parameter_type:
            grad.data = grad.data.to(state.parameter_type)
        return
    if output.dtype != state.parameter_type:
        # FSDP1 uses the shard in the dtype that the hook leaves it in.
        output.data = torch.empty_like(output, dtype=state.parameter_type)
    hook.reduce_scatter(output, grad, state.process_group, divisor)


def fsdp1_adapter(model: Any) -> ModelAdapter:
    """Return the adapter of the outermost FSDP1 module of a model."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    units = FullyShardedDataParallel.fsdp_modules(model)
    param_dtype = next((param.dtype for param in model.parameters()), torch.float32)
    policy = units[0].mixed_precision
    group = model.process_group
    is_replicated = model.sharding_strategy.name == "NO_SHARD"

    def install(hook: CommHook, param_format: CommFormat | None, _: TopologyByGroup) -> None:
        if hook.format.is_compressed:
            state = LowPrecisionState(group, param_dtype)
            model.register_comm_hook(state, partial(_reduce, hook))

    return ModelAdapter(
        shard_groups=[] if is_replicated else [group],
        replicate_groups=[group] if is_replicated else [],
        dtype=policy.reduce_dtype or policy.param_dtype or param_dtype,
        devices=[model.compute_device],
        description=f"{len(units)} FullyShardedDataParallel",
        install=install,
        # FSDP1 reduces other buckets at another step.
        has_error_feedback=False,
    )
