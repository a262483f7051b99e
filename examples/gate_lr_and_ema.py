"""A learning-rate schedule and an average of the weights that do not advance on skipped steps.

    python examples/gate_lr_and_ema.py

The loss scale of 2**24 is too large on purpose: the first steps overflow and are skipped. A
schedule that advanced on skipped steps would warm up before the first update.

`step_was_taken()` returns a bool. On a CPU, and with an optimizer that is not fused, the host
already has the answer. With a fused optimizer on a GPU the call would wait for the device. The
schedule therefore reads `found_inf()` there, which is a tensor on the device.
"""

import copy
from dataclasses import dataclass

import torch
from next_byte import NextByte, batches, device
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from distamp import DistGradScaler, autocast

STEPS, WARMUP, RATE, DECAY = 40, 10, 0.01, 0.9


@dataclass(frozen=True)
class Result:
    """The end of a run: its losses, step counts, learning rate and averaged model."""

    losses: list[float]
    rate: float
    taken: int
    skipped: int
    average: nn.Module


def compute_lr(taken: Tensor) -> Tensor:
    """Return the learning rate after this number of taken steps."""
    warmup_fraction = (taken + 1) / WARMUP
    return RATE * warmup_fraction.clamp(max=1.0)


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, weight: float | Tensor) -> None:
    """Move an average towards a model. A weight of 0 changes nothing."""
    for mean, param in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(param, weight)


def train(on_device: bool) -> Result:
    """Train with ``step_was_taken()`` on the host, or with ``found_inf()`` on the device."""
    torch.manual_seed(0)
    model = NextByte().to(device())
    average = copy.deepcopy(model)
    num_taken = torch.zeros((), device=device())
    # A fused optimizer reads a learning rate that is a tensor on the device.
    lr = compute_lr(num_taken)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    scaler = DistGradScaler(device(), init_scale=2.0**24)
    losses = []
    for context, next_bytes in batches(STEPS):
        optimizer.zero_grad()
        with autocast(device(), dtype=torch.float16):
            logits = model(context.to(device()))
        loss = F.cross_entropy(logits.float(), next_bytes.to(device()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if on_device:
            # These operations are queued on the device, so the host does not wait.
            taken = 1 - scaler.found_inf(optimizer)
            num_taken += taken
            update_average(average, model, (1 - DECAY) * taken)
        elif scaler.step_was_taken(optimizer):
            num_taken += 1
            update_average(average, model, 1 - DECAY)
        lr.copy_(compute_lr(num_taken))
        losses.append(loss.detach())
    counts = scaler.step_counts(optimizer)
    loss_values = [loss.item() for loss in losses]
    return Result(loss_values, lr.item(), counts.taken, counts.skipped, average)


def main() -> None:
    for on_device in (False, True):
        result = train(on_device)
        place = "device" if on_device else "host"
        print(
            f"on the {place}: {result.taken} steps taken, {result.skipped} skipped, "
            f"rate {result.rate:.4f}, loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}"
        )


if __name__ == "__main__":
    main()
