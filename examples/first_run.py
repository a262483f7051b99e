"""A first program: the scaler and an autocast region in a plain loop, on a GPU if possible.

    python examples/first_run.py

It passes a strict type checker, and needs only torch and distamp.
"""

import torch
from torch import Tensor, nn

from distamp import DistGradScaler, autocast

STEPS = 60


def make_batch(device: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random points and the product of their coordinates as the targets."""
    points = torch.rand(64, 2, generator=generator)
    products = points.prod(dim=1, keepdim=True)
    return points.to(device), products.to(device)


def train(device: str, steps: int = STEPS) -> tuple[float, float]:
    """Return the losses of the first and the last step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    # This scale overflows at first. The scaler skips such steps and lowers the scale.
    scaler = DistGradScaler(device, init_scale=2.0**24)
    losses: list[float] = []
    for _ in range(steps):
        inputs, targets = make_batch(device, generator)
        optimizer.zero_grad()
        with autocast(device, dtype=torch.float16):
            outputs = model(inputs)
            loss = nn.functional.mse_loss(outputs.float(), targets)
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
    """Train, and print the first and the last loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    first_loss, last_loss = train(device)
    print(f"loss {first_loss:.4f} -> {last_loss:.4f}")


if __name__ == "__main__":
    main()
