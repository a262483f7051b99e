"""Two models, two losses and two optimizers under one scaler, with one message for both.

    python examples/several_optimizers.py

One scaler, one scale: each optimizer is skipped by its own overflow, and ``update`` moves the scale
once, for all of them. ``step_all`` (or ``unscale_(*optimizers)``) agrees on every flag in one
message; ``step`` for each would send one each.
"""

from __future__ import annotations

import torch
from next_byte import NextByte, batches, device
from torch.nn import functional as F  # noqa: N812

from distamp import DistGradScaler, autocast
from distamp.scaler import StepCounts

STEPS, POISONED = 30, 7


def train() -> tuple[list[list[float]], list[StepCounts], float]:
    """Train a narrow and a wide model; the wide one gets an inf at iteration ``POISONED``."""
    torch.manual_seed(0)
    models = [NextByte(width).to(device()) for width in (32, 64)]
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), lr=0.01),
        torch.optim.SGD(models[1].parameters(), lr=0.5, momentum=0.9),
    ]
    scaler = DistGradScaler(device(), init_scale=2.0**14, growth_factor=2.0, backoff_factor=0.5)
    losses: list[list[float]] = [[], []]
    for index, (context, following) in enumerate(batches(STEPS)):
        for optimizer, model, seen in zip(optimizers, models, losses, strict=True):
            optimizer.zero_grad()
            with autocast(device(), dtype=torch.float16):
                logits = model(context.to(device()))
            loss = F.cross_entropy(logits.float(), following.to(device()))
            scaler.scale(loss).backward()
            seen.append(loss.item())
        if index == POISONED:
            models[1].output.bias.grad[0] = torch.inf
        scaler.step_all(optimizers)
        scaler.update()
    return losses, [scaler.step_counts(o) for o in optimizers], scaler.get_scale()


def main() -> None:
    losses, counts, scale = train()
    for name, seen, count in zip(("AdamW", "SGD"), losses, counts, strict=True):
        print(
            f"{name}: loss {seen[0]:.3f} -> {seen[-1]:.3f}, "
            f"{count.taken} steps taken, {count.skipped} skipped"
        )
    print(f"loss scale {scale:g}")


if __name__ == "__main__":
    main()
