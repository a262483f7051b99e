"""Hooks for FullyShardedDataParallel, with the names and signatures of torch's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._comm_hooks import default_hooks

from distamp.comm_hooks.engine import Engine
from distamp.comm_hooks.layout import Layout
from distamp.comm_hooks.state import CommHookState, state_of
from distamp.comm_hooks.stats import HookStats

__all__ = [
    "LowPrecisionState",
    "fsdp1_hook",
    "fsdp_bf16_compress_hook",
    "fsdp_fp16_compress_hook",
]


class LowPrecisionState(default_hooks.LowPrecisionState):
    """State of the FSDP1 hooks, as torch's ``LowPrecisionState``, that counts what is sent.

    Args:
        process_group: The ranks that FSDP shards over.
        parameter_type: dtype of the parameters, to which reduced gradients are cast.
        hook: Of which hook this is a part; None for a hook of its own.
        name: Whose gradients it is for, for messages.
        index: Their number, the same on all ranks.
        boundaries: Where parameters begin in them, unsharded, ascending.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        parameter_type: torch.dtype = torch.float32,
        *,
        hook: CommHookState | None = None,
        name: str = "FSDP1's gradients",
        index: int = 0,
        boundaries: Sequence[int] = (),
    ) -> None:
        super().__init__(process_group, parameter_type)  # type: ignore[no-untyped-call]
        self.hook = hook
        self.step = 0
        self._name, self._index, self._boundaries = name, index, boundaries
        self._layouts: dict[tuple[int, torch.dtype, bool], Layout] = {}

    def stats(self) -> HookStats:
        """Return what this rank has sent, waited for and found so far."""
        return HookStats() if self.hook is None else self.hook.stats()

    def layout(self, engine: Engine, grad: Tensor, *, shards: bool) -> Layout:
        """Return how a gradient is exchanged."""
        key = (grad.numel(), grad.dtype, shards)
        if key not in self._layouts:
            inside = [each for each in self._boundaries if each < grad.numel()]
            self._layouts[key] = engine.layout(
                self._name, self._index, grad.numel(), grad.dtype, inside, shards=shards
            )
        return self._layouts[key]


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
    fsdp1_hook("fp16", state, grad, output)


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
    fsdp1_hook("bf16", state, grad, output)


def fsdp1_hook(
    wire: str,
    state: default_hooks.LowPrecisionState,
    grad: Tensor,
    output: Tensor | None = None,
) -> None:
    """Average a gradient of FSDP1 in the format of that name; as `fsdp_fp16_compress_hook`."""
    own = state if isinstance(state, LowPrecisionState) else None
    if own is None:
        hook = state_of(state.process_group, wire)
    else:
        hook = own.hook = own.hook or CommHookState(wire, state.process_group)
    if own is not None:
        own.step += 1
    divisor = state.gradient_predivide_factor * state.gradient_postdivide_factor
    if output is not None and output.dtype != state.parameter_type:
        # FSDP1 takes what the hook makes of the shard, in whichever dtype it then is.
        output.data = torch.empty_like(output, dtype=state.parameter_type)
    hook.exchange(
        grad,
        state.process_group,
        lambda engine: _layout(own, engine, grad, shards=output is not None),
        step=0 if own is None else own.step,
        out=output,
        divisor=divisor,
        terms=None if output is None else state.world_size,
    )
    if output is None and grad.dtype != state.parameter_type:
        grad.data = grad.data.to(state.parameter_type)


def _layout(own: LowPrecisionState | None, engine: Engine, grad: Tensor, *, shards: bool) -> Layout:
    if own is not None:
        return own.layout(engine, grad, shards=shards)
    numel = grad.numel()
    return engine.layout("FSDP1's gradients", 0, numel, grad.dtype, (), shards=shards)
