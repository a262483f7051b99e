"""How the model is spread over the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from launch.ranks import Ranks

__all__ = ["last_microbatch_syncs", "spread"]


def spread(model: nn.Module, ranks: Ranks, device: torch.device, sample: Tensor) -> nn.Module:
    """Wrap the model in DistributedDataParallel; one process alone needs no wrapper.

    DDP lays its buckets out anew after its first backward pass, and the order in which ranks'
    gradients are added depends on the layout. One pass over ``sample`` is therefore thrown away
    here, so that the first step of a resumed run adds in the same order as the step it repeats.
    """
    if ranks.world_size == 1:
        return model
    ids = None if device.type == "cpu" else [device.index]
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    wrapped(sample).sum().backward()
    wrapped.zero_grad(set_to_none=True)
    return wrapped


def last_microbatch_syncs(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Reduce gradients over the ranks in a step's last microbatch alone."""
    if last or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    context: AbstractContextManager[None] = model.no_sync()
    return context
