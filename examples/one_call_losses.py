"""Several models, losses and optimizers with `initialize`; each loss has a scale of its own.

    python examples/one_call_losses.py

Both losses reach both models. The second is thousands of times larger, so a scale that fits the
first overflows it; with ``num_losses=2`` each finds its own. ``step`` sends one message for
everything, and skips each optimizer by its own overflow.
"""

from __future__ import annotations

import torch
from next_byte import NextByte, batches, device
from torch.nn import functional as F  # noqa: N812

from distamp import initialize
from distamp.scaler import DynamicSchedule

STEPS = 30


def train(opt_level: str) -> tuple[list[list[float]], list[float], int]:
    """Train two models by two losses; return the losses, their scales, and the skipped steps."""
    torch.manual_seed(0)
    models = [NextByte(width).to(device()) for width in (32, 64)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-4) for m in models]
    amp = initialize(
        models, optimizers, opt_level, num_losses=2, schedule=DynamicSchedule(growth_interval=10)
    )
    losses: list[list[float]] = [[], []]
    skipped = 0
    for context, following in batches(STEPS):
        amp.zero_grad()
        with amp.autocast():
            first, second = (model(context.to(device())).float() for model in amp.models)
        answer = following.to(device())
        by_mean = F.cross_entropy((first + second) / 2, answer)
        by_each = 4096 * (F.cross_entropy(first, answer) + F.cross_entropy(second, answer))
        amp.backward(by_mean, loss_id=0, retain_graph=True)
        amp.backward(by_each, loss_id=1)
        skipped += not amp.step()
        for seen, loss in zip(losses, (by_mean, by_each), strict=True):
            seen.append(loss.item())
    scales = [state["scale"] for state in amp.state_dict()["loss_scalers"]]
    return losses, scales, skipped


def main() -> None:
    for level in ("O1", "O2"):
        losses, scales, skipped = train(level)
        for number, (seen, scale) in enumerate(zip(losses, scales, strict=True)):
            print(
                f"{level}, number {number}: loss {seen[0]:.3f} -> {seen[-1]:.3f}, scale {scale:g}"
            )
        print(f"{level}: {skipped} of {STEPS} steps skipped")


if __name__ == "__main__":
    main()
