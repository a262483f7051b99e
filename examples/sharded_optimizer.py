"""ZeRO and fairscale's OSS: each rank holds and steps a part of the optimizer's state.

    torchrun --nproc-per-node 2 examples/sharded_optimizer.py zero
    torchrun --nproc-per-node 2 examples/sharded_optimizer.py oss

If only one rank sees an overflow in its part, torch's GradScaler deadlocks: that rank skips the
broadcast for which every rank waits. fairscale's ShardedGradScaler raises the scale when two
ranks overflow at once. With DistGradScaler all ranks skip the step.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from next_byte import NextByte, batches, device
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, autocast

STEPS, OVERFLOW_STEP = 30, 10


def wrap(kind: str, model: nn.Module) -> tuple[nn.Module, Any]:
    """Return the wrapped model and an optimizer that divides its state over the ranks."""
    if kind == "zero":
        ddp = DistributedDataParallel(model)
        return ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.01)
    return ShardedDataParallel(model, optimizer), optimizer


def train(kind: str) -> tuple[list[float], int, list[float]]:
    """Return the losses of this rank, the number of skipped steps, and the last layer's bias."""
    torch.manual_seed(0)
    model = NextByte().to(device())
    wrapped, optimizer = wrap(kind, model)
    scaler = DistGradScaler(device(), init_scale=2.0**14)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step, batch in enumerate(batches(STEPS)):
        context, next_bytes = (tensor.chunk(world_size)[rank].to(device()) for tensor in batch)
        wrapped.zero_grad()
        with autocast(device(), dtype=torch.float16):
            logits = wrapped(context)
        loss = F.cross_entropy(logits.float(), next_bytes)
        scaler.scale(loss).backward()
        # Under OSS only the rank that steps a parameter has its gradient.
        grad = model.output.bias.grad
        overflows_here = grad is not None and (kind == "oss" or rank == 0)
        if step == OVERFLOW_STEP and overflows_here:
            grad[0] = torch.inf
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    skipped = scaler.step_counts(optimizer).skipped
    return losses, skipped, model.output.bias.tolist()


def main() -> None:
    dist.init_process_group()
    losses, skipped, _ = train(sys.argv[1])
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {skipped} skipped")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
