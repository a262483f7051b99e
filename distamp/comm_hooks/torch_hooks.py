"""Hooks for DDP and FSDP1, with the names and signatures of torch's own.

torch's FSDP, which takes a second to import, is imported when it is used.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks import default_hooks as fsdp_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from distamp.comm_hooks.formats import COMM_FORMATS, CommFormat
from distamp.comm_hooks.state import CommHook, reals_in, state_of
from distamp.comm_hooks.wrapped import Tables, Wrapped

__all__ = [
    "LowPrecisionState",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "ddp",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "fsdp1",
    "fsdp_bf16_compress_hook",
    "fsdp_fp16_compress_hook",
    "wire_hook",
]

State: TypeAlias = CommHook | dist.ProcessGroup | None
Hook: TypeAlias = Callable[[Any, dist.GradBucket], Future[Tensor]]


# torch's DDP compares annotations with the very objects, so they are not strings in this file.
def fp16_compress_hook(state: State, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket through fp16 with an exponent for each block, summed in fp32.

    Unlike ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook``, which
    casts and adds in fp16, nothing over- or underflows at any loss scale and the error does not
    grow with the number of ranks.

    Args:
        state: A ProcessGroup, None for the default group, or what `register_comm_hook` returned.
        bucket: DDP's bucket; its gradients are replaced by their mean over all ranks.

    Returns:
        A future of the averaged buffer.

    Raises:
        RuntimeError: An exchange failed on this rank, or did before.
        TypeError: ``state`` is something else.
    """
    return wire_hook(state_of(state, "fp16"), bucket)


def bf16_compress_hook(state: State, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket through bf16, summed in fp32.

    Unlike torch's hook of this name it needs no NCCL and rounds twice, however many the ranks.
    Takes, returns and raises what `fp16_compress_hook` does.
    """
    return wire_hook(state_of(state, "bf16"), bucket)


def wire_hook(state: CommHook, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average what DDP hands to a hook, in the format of ``state``.

    Returns and raises what `fp16_compress_hook` does.
    """
    given: Any = bucket
    if isinstance(given, tuple):
        raise RuntimeError(
            "torch.compile's Python reducer has no buckets for a communication hook: leave "
            "torch._dynamo.config.optimize_ddp as it is, or register no hook"
        )
    buffer = bucket.buffer()
    if buffer.is_sparse:
        group = state.process_group
        return state.reduce_as_it_is(buffer, group, group.size(), None, "sparse")
    return state.average(buffer, bucket.parameters())


# torch's DDP refuses hooks of two names where NCCL is missing, whatever they do.
bf16_compress_hook.__name__ = "bf16_hook"


fp16_compress_wrapper = default_hooks.fp16_compress_wrapper


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Cast buckets to bf16 for ``hook`` and what it returns back, as torch's wrapper does.

    For hooks with a compression of their own, such as PowerSGD. Unlike torch's it is accepted by
    DDP on every backend.

    Args:
        hook: A DDP communication hook.

    Returns:
        A hook with the same state.
    """
    casting: Hook = default_hooks.bf16_compress_wrapper(hook)
    casting.__name__ = "bf16_wrapper"
    return casting


def ddp(model: DistributedDataParallel) -> Wrapped:
    """Return a DDP module as `register_comm_hook` takes it."""
    ignored = model.parameters_to_ignore
    named = model.module.named_parameters()
    trained = [p for name, p in named if p.requires_grad and name not in ignored]
    numels: Counter[torch.dtype] = Counter()
    for each in trained:
        numels[each.dtype.to_real()] += reals_in(each)
    ((dtype, _),) = numels.most_common(1)

    def attach(state: CommHook, gather: CommFormat | None, tables: Tables) -> None:
        state.name_parameters(model.module.named_parameters())
        if state.format.encodes:
            model.register_comm_hook(state, wire_hook)

    return Wrapped(
        shards=[],
        replicas=[model.process_group],
        formats=list(COMM_FORMATS),
        dtype=dtype,
        devices=list(dict.fromkeys(each.device for each in trained)),
        what=f"{sum(numels.values())} elements",
        attach=attach,
    )


# -- FSDP1 -------------------------------------------------------------------------------------

LowPrecisionState = fsdp_hooks.LowPrecisionState


def fsdp_fp16_compress_hook(
    state: fsdp_hooks.LowPrecisionState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average gradients of FSDP1 over the ranks through the ``fp16`` wire.

    Unlike torch's ``fp16_compress_hook`` for FSDP it adds up in fp32, neither over- nor underflows
    at any loss scale, sends half of what torch's does on gloo, and runs on a CPU.

    Args:
        state: Its group and two divide factors are honoured.
        grad: 1-D unsharded gradient; averaged in place where there is no ``output``.
        output: 1-D, this rank's shard of the average.
    """
    _reduce_fsdp1(state_of(state.process_group, "fp16"), state, grad, output)


def fsdp_bf16_compress_hook(
    state: fsdp_hooks.LowPrecisionState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average gradients of FSDP1 over the ranks through the ``bf16`` wire.

    Unlike torch's ``bf16_compress_hook`` for FSDP it adds up in fp32 and runs on a CPU. Takes what
    `fsdp_fp16_compress_hook` does.
    """
    _reduce_fsdp1(state_of(state.process_group, "bf16"), state, grad, output)


def _reduce_fsdp1(hook: CommHook, state: Any, grad: Tensor, output: Tensor | None = None) -> None:
    if output is not None and output.dtype != state.parameter_type:
        # FSDP1 takes what the hook makes of the shard, in whichever dtype it then is.
        output.data = torch.empty_like(output, dtype=state.parameter_type)
    divisor = state.gradient_predivide_factor * state.gradient_postdivide_factor
    hook.reduce(grad, state.process_group, divisor, output).wait()
    if output is None and grad.dtype != state.parameter_type:
        grad.data = grad.data.to(state.parameter_type)


def fsdp1(model: Any) -> Wrapped:
    """Return the outermost FSDP1 module of a model as `register_comm_hook` takes it."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    units = FullyShardedDataParallel.fsdp_modules(model)
    own = next((each.dtype for each in model.parameters()), torch.float32)
    policy, group = units[0].mixed_precision, model.process_group
    whole = model.sharding_strategy.name == "NO_SHARD"

    def attach(state: CommHook, gather: CommFormat | None, tables: Tables) -> None:
        if state.format.encodes:
            low = LowPrecisionState(group, own)
            model.register_comm_hook(low, partial(_reduce_fsdp1, state))

    return Wrapped(
        shards=[] if whole else [group],
        replicas=[group] if whole else [],
        # Units are not reduced in the same buckets at every step, as error feedback needs.
        formats=["fp16", "bf16"],
        dtype=policy.reduce_dtype or policy.param_dtype or own,
        devices=[model.compute_device],
        what=f"{len(units)} FullyShardedDataParallel",
        attach=attach,
    )
