"""Gradient accumulation: several backward passes, one unscale, one step, one update.

    python examples/accumulation.py

The scale stays as it is within an iteration, so that all summands carry the same factor. One
``unscale_`` after the last backward pass; gradients added later are refused at ``step``. Under DDP,
put all but the last microbatch under ``model.no_sync()``.
"""

from __future__ import annotations

import torch
from next_byte import NextByte, batches, device
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distamp import DistGradScaler, autocast

STEPS = 30


def train(microbatches: int) -> tuple[list[float], nn.Module]:
    """Train with each batch split in so many; return the losses and the model."""
    torch.manual_seed(0)
    model = NextByte().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = DistGradScaler(device(), init_scale=2.0**14, growth_factor=2.0, backoff_factor=0.5)
    losses = []
    for contexts, following in batches(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), device=device())
        for context, target in zip(
            contexts.to(device()).chunk(microbatches),
            following.to(device()).chunk(microbatches),
            strict=True,
        ):
            with autocast(device(), dtype=torch.float16):
                logits = model(context)
            loss = F.cross_entropy(logits.float(), target) / microbatches
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(total)
    return [loss.item() for loss in losses], model


def main() -> None:
    for microbatches in (1, 4):
        losses, _ = train(microbatches)
        print(f"{microbatches} microbatch(es): loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
