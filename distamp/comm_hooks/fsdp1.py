"""Hooks for FullyShardedDataParallel, with the names and signatures of torch's own.

Imported when it is used: torch's FSDP takes a second to import.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._comm_hooks import default_hooks

from distamp.comm_hooks.state import CommHookState, state_of
from distamp.comm_hooks.stats import HookStats

__all__ = ["LowPrecisionState", "fsdp_bf16_compress_hook", "fsdp_fp16_compress_hook"]


class LowPrecisionState(default_hooks.LowPrecisionState):
    """State of the FSDP1 hooks, as torch's ``LowPrecisionState``, that counts what is sent.

    Args:
        process_group: The ranks that FSDP shards over.
        parameter_type: dtype of the parameters, to which reduced gradients are cast.
        hook: Of which hook this is a part; None for a hook of its own.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        parameter_type: torch.dtype = torch.float32,
        *,
        hook: CommHookState | None = None,
    ) -> None:
        super().__init__(process_group, parameter_type)  # type: ignore[no-untyped-call]
        self.hook = hook

    def stats(self) -> HookStats:
        """Return what this rank has sent so far."""
        return HookStats() if self.hook is None else self.hook.stats()


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
    _reduce("fp16", state, grad, output)


def fsdp_bf16_compress_hook(
    state: default_hooks.LowPrecisionState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average gradients of FSDP1 over the ranks through the ``bf16`` wire.

    Unlike torch's ``bf16_compress_hook`` for FSDP it adds up in fp32 and runs on a CPU. Takes what
    `fsdp_fp16_compress_hook` does.
    """
    _reduce("bf16", state, grad, output)


def _reduce(wire: str, state: Any, grad: Tensor, output: Tensor | None) -> None:
    if isinstance(state, LowPrecisionState):
        hook = state.hook = state.hook or CommHookState(wire, state.process_group)
    else:
        hook = state_of(state.process_group, wire)
    if output is not None and output.dtype != state.parameter_type:
        # FSDP1 takes what the hook makes of the shard, in whichever dtype it then is.
        output.data = torch.empty_like(output, dtype=state.parameter_type)
    divisor = state.gradient_predivide_factor * state.gradient_postdivide_factor
    hook.reduce(grad, state.process_group, divisor, output)
    if output is None and grad.dtype != state.parameter_type:
        grad.data = grad.data.to(state.parameter_type)
