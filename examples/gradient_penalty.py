"""A penalty on the norm of the gradient, which is part of the loss.

    python examples/gradient_penalty.py

``autograd.grad`` of the scaled loss gives scaled gradients, so that fp16 holds them; they are
unscaled by hand, because no optimizer holds them; and the sum of loss and penalty is scaled again
for the backward pass that fills ``.grad``.
"""

from __future__ import annotations

import torch
from next_byte import NextByte, batches, device
from torch.nn import functional as F  # noqa: N812

from distamp import DistGradScaler, autocast

STEPS, WEIGHT = 30, 0.1


def train(enabled: bool = True) -> tuple[list[float], list[float]]:
    """Train with or without scaler and autocast; return losses and norms of the gradient."""
    torch.manual_seed(0)
    model = NextByte().to(device())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.3)
    scaler = DistGradScaler(
        device(), init_scale=2.0**12, growth_factor=2.0, backoff_factor=0.5, enabled=enabled
    )
    losses, norms = [], []
    for context, following in batches(STEPS):
        optimizer.zero_grad()
        with autocast(device(), dtype=torch.float16, enabled=enabled):
            logits = model(context.to(device()))
        loss = F.cross_entropy(logits.float(), following.to(device()))
        scaled = torch.autograd.grad(scaler.scale(loss), parameters, create_graph=True)
        gradients = [gradient / scaler.get_scale() for gradient in scaled]
        norm = torch.stack([g.float().square().sum() for g in gradients]).sum().sqrt()
        scaler.scale(loss + WEIGHT * norm).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        norms.append(norm.detach())
    return [x.item() for x in losses], [x.item() for x in norms]


def main() -> None:
    for enabled in (True, False):
        losses, norms = train(enabled)
        print(
            f"{'fp16' if enabled else 'fp32'}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
            f"gradient norm {norms[0]:.3f} -> {norms[-1]:.3f}"
        )


if __name__ == "__main__":
    main()
