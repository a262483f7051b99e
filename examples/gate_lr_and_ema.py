"""A learning-rate schedule and an average of the weights that stand still on skipped steps.

    python examples/gate_lr_and_ema.py

A loss scale of 2**24 is too large on purpose: the first steps overflow and are skipped. A schedule
that advanced all the same would warm up on steps that were never taken.

``step_was_taken()`` is a bool. It costs nothing where the answer is known already: on CPU, and with
any optimizer that is not fused. With a fused optimizer on a GPU it would wait for the device, so
there the schedule reads ``found_inf()``, a tensor that never leaves the device.
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
    """What a run ended with."""

    losses: list[float]
    rate: float
    taken: int
    skipped: int
    average: nn.Module


def rate_after(taken: Tensor) -> Tensor:
    """Return the learning rate after so many steps that were taken."""
    return RATE * ((taken + 1) / WARMUP).clamp(max=1.0)


@torch.no_grad()
def move(average: nn.Module, model: nn.Module, weight: float | Tensor) -> None:
    """Move an average towards a model; by a weight of 0, nothing changes."""
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(parameter, weight)


def train(on_device: bool) -> Result:
    """Train; gate on the host by ``step_was_taken()``, or on the device by ``found_inf()``."""
    torch.manual_seed(0)
    model = NextByte().to(device())
    average = copy.deepcopy(model)
    taken = torch.zeros((), device=device())
    rate = rate_after(taken)  # a tensor, which a fused optimizer reads on the device
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    scaler = DistGradScaler(device(), init_scale=2.0**24)
    losses = []
    for batch in batches(STEPS):
        context, following = (part.to(device()) for part in batch)
        optimizer.zero_grad()
        with autocast(device(), dtype=torch.float16):
            logits = model(context)
        loss = F.cross_entropy(logits.float(), following)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if on_device:  # nothing here waits for it
            was_taken = 1 - scaler.found_inf(optimizer)
            taken += was_taken
            move(average, model, (1 - DECAY) * was_taken)
        elif scaler.step_was_taken(optimizer):
            taken += 1
            move(average, model, 1 - DECAY)
        rate.copy_(rate_after(taken))
        losses.append(loss.detach())
    counts = scaler.step_counts(optimizer)
    return Result([x.item() for x in losses], rate.item(), counts.taken, counts.skipped, average)


def main() -> None:
    for on_device in (False, True):
        result = train(on_device)
        print(
            f"on the {'device' if on_device else 'host'}: {result.taken} steps taken, "
            f"{result.skipped} skipped, rate {result.rate:.4f}, "
            f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}"
        )


if __name__ == "__main__":
    main()
