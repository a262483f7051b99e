"""Clipping by norm: the scaler's own, which knows shards, and torch's after ``unscale_``.

    python examples/gradient_clipping.py

``scaler.clip_grad_norm_`` unscales first and returns the norm of the whole gradient, wherever its
parts lie (DDP, FSDP, tensor and pipeline parallel), in the same message as found-inf. On one
device, or where gradients are replicated, torch's function after ``unscale_`` gives the same.
"""

from __future__ import annotations

import torch
from next_byte import NextByte, batches, device
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distamp import DistGradScaler, autocast

STEPS, MAX_NORM = 30, 0.5


def train(clip: str) -> tuple[list[float], list[float]]:
    """Train with ``clip`` ("scaler" or "torch"); return losses and norms before clipping."""
    torch.manual_seed(0)
    model = NextByte().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = DistGradScaler(device(), init_scale=2.0**14, growth_factor=2.0, backoff_factor=0.5)
    losses, norms = [], []
    for context, following in batches(STEPS):
        optimizer.zero_grad()
        with autocast(device(), dtype=torch.float16):
            logits = model(context.to(device()))
        loss = F.cross_entropy(logits.float(), following.to(device()))
        scaler.scale(loss).backward()
        if clip == "scaler":
            norm = scaler.clip_grad_norm_(optimizer, MAX_NORM)
        else:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        norms.append(norm)
    return [x.item() for x in losses], [x.item() for x in norms]


def main() -> None:
    for clip in ("scaler", "torch"):
        losses, norms = train(clip)
        print(
            f"{clip}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
            f"norms {min(norms):.3f} to {max(norms):.3f} clipped to {MAX_NORM}"
        )


if __name__ == "__main__":
    main()
