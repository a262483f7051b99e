"""A first program: the scaler and the region in a plain loop, on a GPU if there is one.

    python examples/first_run.py

It is typed as a strict type checker wants it, and needs torch and distamp alone.
"""

import torch
from torch import Tensor, nn

from distamp import DistGradScaler, autocast

STEPS = 60


def batch(device: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return points and what a model is to make of them."""
    points = torch.rand(64, 2, generator=generator)
    return points.to(device), points.prod(dim=1, keepdim=True).to(device)


def train(device: str, steps: int = STEPS) -> tuple[float, float]:
    """Return the loss before and after so many steps."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    # A scale this high overflows at first: those steps are skipped, and the scale backs off.
    scaler = DistGradScaler(device, init_scale=2.0**24)
    losses: list[float] = []
    for _ in range(steps):
        inputs, targets = batch(device, generator)
        optimizer.zero_grad()
        with autocast(device, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        norm: Tensor = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if scaler.step_was_taken(optimizer):
            schedule.step()
            assert norm.isfinite()
        losses.append(loss.item())
    counts = scaler.step_counts(optimizer)
    print(f"took {counts.taken} steps, skipped {counts.skipped}; loss scale {scaler.get_scale():g}")
    return losses[0], losses[-1]


def main() -> None:
    """Train, and print what became of the loss."""
    before, after = train("cuda" if torch.cuda.is_available() else "cpu")
    print(f"loss {before:.4f} -> {after:.4f}")


if __name__ == "__main__":
    main()
