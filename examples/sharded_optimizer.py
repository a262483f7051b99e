"""ZeRO and fairscale's OSS: each rank has a part of the optimizer's state, and steps a part.

    torchrun --nproc-per-node 2 examples/sharded_optimizer.py zero
    torchrun --nproc-per-node 2 examples/sharded_optimizer.py oss

An overflow that only the rank with that part sees would deadlock torch's GradScaler: this rank
skips the broadcast in which the others wait. fairscale's own ShardedGradScaler grows the scale when
two ranks overflow at once. With DistGradScaler all ranks skip, and nothing else changes.
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

STEPS, OVERFLOW = 30, 10


def wrap(kind: str, inner: nn.Module) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer, each rank of which has a part of the state."""
    if kind == "zero":
        model = DistributedDataParallel(inner)
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(inner.parameters(), torch.optim.AdamW, lr=0.01)
    return ShardedDataParallel(inner, optimizer), optimizer


def train(kind: str) -> tuple[list[float], int, list[float]]:
    """Return this rank's losses, how many steps were skipped, and the weights of the last layer."""
    torch.manual_seed(0)
    inner = NextByte().to(device())
    model, optimizer = wrap(kind, inner)
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
        mine = inner.output.bias.grad  # OSS: None but on the rank that steps it
        if step == OVERFLOW and mine is not None and (kind == "oss" or rank == 0):
            mine[0] = torch.inf
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, scaler.step_counts(optimizer).skipped, inner.output.bias.tolist()


def main() -> None:
    dist.init_process_group()
    losses, skipped, _ = train(sys.argv[1])
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {skipped} skipped")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
