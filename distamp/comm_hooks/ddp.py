"""Hooks for DistributedDataParallel, with the names and signatures of torch's own."""

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.state import CommHookState, reals_in, state_of
from distamp.comm_hooks.torch_compat import GradBucket
from distamp.comm_hooks.wrapped import Sample, Wrapped, ranks_of

__all__ = [
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "wire_hook",
    "wrapped",
]

State: TypeAlias = CommHookState | dist.ProcessGroup | None
Hook: TypeAlias = Callable[[Any, GradBucket], Future[Tensor]]


# torch's DDP compares annotations with the very objects, so they are not strings in this file.
def fp16_compress_hook(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket through fp16 with an exponent for each block, summed in fp32.

    Unlike ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook``, which
    casts and adds in fp16, nothing over- or underflows at any loss scale and the error does not
    grow with the number of ranks.

    Args:
        state: A ProcessGroup, None for the default group, or what `register` returned.
        bucket: DDP's bucket; its gradients are replaced by their mean over all ranks.

    Returns:
        A future of the averaged buffer.

    Raises:
        RuntimeError: An exchange failed on this rank, or did before.
        TypeError: ``state`` is something else.
    """
    return _average(state_of(state, "fp16"), bucket)


def bf16_compress_hook(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket through bf16, summed in fp32.

    Unlike torch's hook of this name it needs no NCCL and rounds twice, however many the ranks.
    Takes, returns and raises what `fp16_compress_hook` does.
    """
    return _average(state_of(state, "bf16"), bucket)


def wire_hook(state: CommHookState, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket in the format of ``state``, which `register` made.

    Returns and raises what `fp16_compress_hook` does.
    """
    return _average(state, bucket)


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


def _average(state: CommHookState, bucket: Any) -> Future[Tensor]:
    """Average what DDP, or its compiled reducer, hands to a hook."""
    if isinstance(bucket, tuple):
        # Its results are taken from the gradient itself, and the future is not looked at.
        return _average_compiled(state, bucket[0])  # type: ignore[return-value]
    buffer = bucket.buffer()
    if buffer.is_sparse:
        return state.all_reduce(buffer, "sparse gradient all-reduced as it is")
    return state.average(buffer, bucket.parameters())


def _average_compiled(state: CommHookState, gradient: Tensor) -> Tensor:
    """All-reduce one gradient of DDP's Python reducer, in place.

    The call is a part of a graph, which has no place for a thread or for futures.
    """
    group = state.process_group
    reason = "gradient all-reduced as it is by torch.compile's Python reducer"
    state.counts.fallbacks[reason] += 1
    mean = gradient / dist.get_world_size(group)
    if torch.compiler.is_compiling():
        mean = torch_compat.all_reduce_in_graph(mean, group)
    else:
        dist.all_reduce(mean, group=group)
    return gradient.copy_(mean)


def wrapped(model: DistributedDataParallel) -> Wrapped:
    """Return a DDP module as `register` takes it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for each in trained:
        kinds[each.dtype.to_real(), each.device] += reals_in(each)
    ((dtype, device), numel), *_ = kinds.most_common(1)
    bucket = max(1, model.bucket_bytes_cap // dtype.itemsize)
    name, refused = torch_compat.ddp_hook_name(model), None
    if name is not None:
        built_in = name.startswith("BuiltinCommHookType")
        refused = (
            "the model has a communication hook already "
            f"({'built into torch' if built_in else name}), and can have only one; to register "
            "another, wrap the model again"
        )

    def attach(state: CommHookState, compressed: bool) -> None:
        state.name_parameters(model.module.named_parameters())
        if compressed:
            model.register_comm_hook(state, wire_hook)

    group = model.process_group
    return Wrapped(
        groups=[group],
        ranks=ranks_of(group),
        shards=[],
        replicas=group,
        feedback=True,
        dtypes=list(dict.fromkeys(dtype for dtype, _ in kinds)),
        devices=list(dict.fromkeys(each.device for each in trained)),
        sample=Sample(min(numel, bucket), dtype, device),
        what=f"{sum(each.numel() for each in trained)} elements",
        refused=refused,
        attach=attach,
    )
