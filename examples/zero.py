"""ZeroRedundancyOptimizer: DDP, and each rank has a part of the optimizer's state.

    torchrun --nproc-per-node 2 examples/zero.py

A gradient that overflows on one rank alone, after the reduction, would deadlock torch's GradScaler
here: that rank skips the broadcast in which the others wait. With DistGradScaler all skip.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from next_byte import NextByte, batches, device
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, autocast

STEPS, OVERFLOW = 30, 10


def train() -> tuple[list[float], int, list[float]]:
    """Return this rank's losses, how many steps were skipped, and the weights of the last layer."""
    torch.manual_seed(0)
    model = DistributedDataParallel(NextByte().to(device()))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    scaler = DistGradScaler(device(), init_scale=2.0**14)
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step, batch in enumerate(batches(STEPS)):
        context, following = (part.chunk(world)[rank].to(device()) for part in batch)
        optimizer.zero_grad()
        with autocast(device(), dtype=torch.float16):
            logits = model(context)
        loss = F.cross_entropy(logits.float(), following)
        scaler.scale(loss).backward()
        if step == OVERFLOW and rank == 0:
            model.module.output.bias.grad[0] = torch.inf
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, scaler.step_counts(optimizer).skipped, model.module.output.bias.tolist()


def main() -> None:
    dist.init_process_group()
    losses, skipped, _ = train()
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {skipped} skipped")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
