"""fairscale: OSS and ShardedDataParallel, where a gradient goes only to the rank that steps it.

    torchrun --nproc-per-node 2 examples/fairscale_oss.py

fairscale's own ShardedGradScaler grows the scale when two ranks overflow at once. DistGradScaler
takes its place, and nothing else changes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from next_byte import NextByte, batches, device
from torch.nn import functional as F  # noqa: N812

from distamp import DistGradScaler, autocast

STEPS, OVERFLOW = 30, 10


def train() -> tuple[list[float], int, list[float]]:
    """Return this rank's losses, how many steps were skipped, and the weights of the last layer."""
    torch.manual_seed(0)
    inner = NextByte().to(device())
    optimizer = OSS(inner.parameters(), torch.optim.AdamW, lr=0.01)
    model = ShardedDataParallel(inner, optimizer)
    scaler = DistGradScaler(device(), init_scale=2.0**14)
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step, batch in enumerate(batches(STEPS)):
        context, following = (part.chunk(world)[rank].to(device()) for part in batch)
        model.zero_grad()
        with autocast(device(), dtype=torch.float16):
            logits = model(context)
        loss = F.cross_entropy(logits.float(), following)
        scaler.scale(loss).backward()
        if step == OVERFLOW and inner.output.bias.grad is not None:  # on the rank that steps it
            inner.output.bias.grad[0] = torch.inf
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, scaler.step_counts(optimizer).skipped, inner.output.bias.tolist()


def main() -> None:
    dist.init_process_group()
    losses, skipped, _ = train()
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {skipped} skipped")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
