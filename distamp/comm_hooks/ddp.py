"""Hooks for DDP, with the names and signatures of torch's own."""

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from distamp.comm_hooks.adapter import ModelAdapter, TopologyByGroup
from distamp.comm_hooks.formats import CommFormat
from distamp.comm_hooks.hook import CommHook, real_numel, shared_hook

__all__ = [
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "compressed_hook",
    "ddp_adapter",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

State: TypeAlias = CommHook | dist.ProcessGroup | None
Hook: TypeAlias = Callable[[Any, dist.GradBucket], Future[Tensor]]


# torch's DDP compares annotations with the objects themselves, so this file has no string ones.
def fp16_compress_hook(state: State, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket through fp16 with an exponent for each block, summed in fp32.

    Unlike ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook``, which
    casts and adds in fp16, nothing over- or underflows at any loss scale and the error does not
    grow with the number of ranks.

    Args:
        state: A ProcessGroup, None for the default group, or a hook of `register_comm_hook`.
        bucket: DDP's bucket; its gradients are replaced by their mean over all ranks.

    Returns:
        A future of the averaged buffer.

    Raises:
        RuntimeError: An exchange failed on this rank, or did before.
        TypeError: ``state`` is something else.
    """
    return compressed_hook(shared_hook(state, "fp16"), bucket)


def bf16_compress_hook(state: State, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket through bf16, summed in fp32.

    Unlike torch's hook of this name it needs no NCCL and rounds twice, however many the ranks.
    The arguments, the result and the errors are as in `fp16_compress_hook`.
    """
    return compressed_hook(shared_hook(state, "bf16"), bucket)


def compressed_hook(hook: CommHook, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket of DDP in the format of the hook.

    Returns and raises as `fp16_compress_hook` does.
    """
    # torch.compile's Python reducer calls the hook with a tuple, against the annotation.
    argument: Any = bucket
    if isinstance(argument, tuple):
        raise RuntimeError(
            "torch.compile's Python reducer has no buckets for a communication hook: leave "
            "torch._dynamo.config.optimize_ddp at its default, or register no hook"
        )
    values = bucket.buffer()
    if values.is_sparse:
        group = hook.process_group
        return hook.all_reduce_uncompressed(values, group, group.size(), "sparse")
    return hook.all_reduce_mean(values, bucket.parameters())


# torch's DDP refuses hooks of two names if NCCL is missing, without a look at their code.
bf16_compress_hook.__name__ = "bf16_hook"


fp16_compress_wrapper = default_hooks.fp16_compress_wrapper


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Cast buckets to bf16 for ``hook``, and cast its results back, as torch's wrapper does.

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


def ddp_adapter(model: DistributedDataParallel) -> ModelAdapter:
    """Return the adapter of a DDP module."""
    numels: Counter[torch.dtype] = Counter()
    devices: list[torch.device] = []
    for name, param in model.module.named_parameters():
        if not param.requires_grad or name in model.parameters_to_ignore:
            continue
        numels[param.dtype.to_real()] += real_numel(param)
        if param.device not in devices:
            devices.append(param.device)
    ((dtype, _),) = numels.most_common(1)

    def install(hook: CommHook, param_format: CommFormat | None, _: TopologyByGroup) -> None:
        hook.name_parameters(model.module.named_parameters())
        if hook.format.is_compressed:
            model.register_comm_hook(hook, compressed_hook)

    return ModelAdapter(
        shard_groups=[],
        replicate_groups=[model.process_group],
        dtype=dtype,
        devices=devices,
        description=f"{sum(numels.values())} elements",
        install=install,
    )
