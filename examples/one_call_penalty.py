"""A gradient penalty with `initialize`.

    python examples/one_call_penalty.py

``amp.grad`` scales the loss on its way and unscales what comes back, in fp32; the sum of loss and
penalty then goes through ``backward`` like any other loss.
"""

from __future__ import annotations

import torch
from next_byte import NextByte, batches, device
from torch.nn import functional as F  # noqa: N812

from distamp import initialize

STEPS, WEIGHT = 30, 0.1


def train(opt_level: str) -> tuple[list[float], list[float]]:
    """Train with a penalty on the norm of the gradient; return losses and norms."""
    torch.manual_seed(0)
    model = NextByte().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    amp = initialize(model, optimizer, opt_level)
    losses, norms = [], []
    for context, following in batches(STEPS):
        amp.zero_grad()
        with amp.autocast():
            logits = amp.model(context.to(device()))
        loss = F.cross_entropy(logits.float(), following.to(device()))
        gradients = amp.grad(loss, list(model.parameters()), create_graph=True)
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        amp.backward(loss + WEIGHT * norm)
        amp.step()
        losses.append(loss.detach())
        norms.append(norm.detach())
    return [x.item() for x in losses], [x.item() for x in norms]


def main() -> None:
    for level in ("O0", "O1", "O2"):
        losses, norms = train(level)
        print(
            f"{level}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
            f"gradient norm {norms[0]:.3f} -> {norms[-1]:.3f}"
        )


if __name__ == "__main__":
    main()
