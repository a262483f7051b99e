"""LBFGS, which evaluates the loss several times in one step, under the scaler.

    python examples/lbfgs.py

torch.amp.GradScaler refuses a closure given by keyword and runs one given by position on gradients
that are still scaled. Here each evaluation is unscaled and checked by itself; an overflow in any of
them ends the step and puts parameters and optimizer state back.
"""

from __future__ import annotations

import torch
from next_byte import CONTEXT, batches, device
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from distamp import DistGradScaler, autocast

STEPS = 6


def problem() -> tuple[Tensor, Tensor]:
    """Return inputs and labels of a convex problem: does a line break follow within these bytes?"""
    context, following = next(batches(1, size=512))
    inputs = torch.stack([(context == byte).float().mean(1) for byte in b" \n(),:=.'\"#_ae"], dim=1)
    labels = (torch.cat([context[:, -2:], following[:, None]], dim=1) == ord("\n")).any(1)
    assert context.shape[1] == CONTEXT
    return inputs, labels.float()


def train(enabled: bool = True) -> tuple[list[float], nn.Linear, list[bool]]:
    """Fit a logistic regression; return losses, the model and which steps were taken."""
    torch.manual_seed(0)
    inputs, labels = (part.to(device()) for part in problem())
    model = nn.Linear(inputs.shape[1], 1).to(device())
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    scaler = DistGradScaler(
        device(), init_scale=2.0**24, growth_factor=2.0, backoff_factor=2.0**-8, enabled=enabled
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        with autocast(device(), dtype=torch.float16, enabled=enabled):
            logits = model(inputs)
        decay = sum(p.square().sum() for p in model.parameters())
        loss = F.binary_cross_entropy_with_logits(logits.float()[:, 0], labels) + 1e-3 * decay
        scaler.scale(loss).backward()
        return loss

    losses, taken = [], []
    for _ in range(STEPS):
        loss = scaler.step(optimizer, closure)
        scaler.update()
        taken.append(scaler.stepped(optimizer))
        if taken[-1]:
            losses.append(loss.item())
    return losses, model, taken


def main() -> None:
    for enabled in (True, False):
        losses, _, taken = train(enabled)
        print(
            f"{'fp16' if enabled else 'fp32'}: {taken.count(True)} of {len(taken)} steps taken, "
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        )


if __name__ == "__main__":
    main()
