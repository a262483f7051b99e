"""Gradient clipping with `initialize`.

    python examples/one_call_clipping.py

``clip_grad_norm_`` unscales first and takes the norm of the whole model, whichever rank holds which
part; at O2 it clips what goes to the fp32 masters.
"""

from __future__ import annotations

import torch
from next_byte import NextByte, batches, device
from torch.nn import functional as F  # noqa: N812

from distamp import initialize

STEPS, MAX_NORM = 30, 0.5


def train(opt_level: str) -> tuple[list[float], list[float]]:
    """Train with clipped gradients; return losses and norms before clipping."""
    torch.manual_seed(0)
    model = NextByte().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp = initialize(model, optimizer, opt_level)
    losses, norms = [], []
    for context, following in batches(STEPS):
        amp.zero_grad()
        with amp.autocast():
            logits = amp.model(context.to(device()))
        loss = F.cross_entropy(logits.float(), following.to(device()))
        amp.backward(loss)
        norms.append(amp.clip_grad_norm_(MAX_NORM))
        amp.step()
        losses.append(loss.detach())
    return [x.item() for x in losses], [x.item() for x in norms]


def main() -> None:
    for level in ("O0", "O1", "O2"):
        losses, norms = train(level)
        print(f"{level}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, largest norm {max(norms):.3f}")


if __name__ == "__main__":
    main()
