"""Gradient accumulation with `initialize`: a large batch in parts, reduced over ranks once.

    python examples/one_call_accumulation.py
    torchrun --nproc-per-node 2 examples/one_call_accumulation.py

The scale must be the same for all parts of a step, and is: it moves in ``step`` alone. In
``no_sync`` gradients stay on their rank, under DDP and under FSDP alike; in one process it does
nothing.
"""

from __future__ import annotations

import contextlib
import os

import torch
import torch.distributed as dist
from next_byte import NextByte, batches, device
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from distamp import cast_model, initialize

STEPS = 20


def train(opt_level: str, parts: int) -> list[float]:
    """Train on batches in so many parts; return the losses of whole batches."""
    torch.manual_seed(0)
    model: torch.nn.Module = cast_model(NextByte().to(device()), opt_level)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp = initialize(model, optimizer, opt_level)
    losses = []
    for context, following in batches(STEPS):
        amp.zero_grad()
        mine = zip(context.chunk(ranks * parts), following.chunk(ranks * parts), strict=True)
        whole = torch.zeros((), device=device())
        for part, (some, after) in enumerate(list(mine)[rank::ranks]):
            last = part == parts - 1
            with contextlib.nullcontext() if last else amp.no_sync():
                with amp.autocast():
                    logits = amp.model(some.to(device()))
                loss = F.cross_entropy(logits.float(), after.to(device())) / parts
                amp.backward(loss)
            whole += loss.detach()
        amp.step()
        losses.append(whole.item())
    return losses


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group()
    for level in ("O1", "O2"):
        losses = train(level, parts=4)
        print(f"{level}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, each batch in 4 parts")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
