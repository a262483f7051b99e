"""A learning-rate schedule and an average of the weights that stand still on skipped steps.

    python examples/gate_lr_and_ema.py

A loss scale of 2**24 is too large on purpose: the first steps overflow and are skipped. A schedule
that advanced all the same would warm up on steps that were never taken.

``stepped()`` is a bool. It costs nothing where the answer is known already: on CPU, and with any
optimizer that is not fused. With a fused optimizer on a GPU it would wait for the device, so there
the schedule reads ``found_inf()``, a tensor that never leaves the device: see `on_device`.
"""

from __future__ import annotations

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


def warmed_up(steps_taken: int | Tensor) -> float | Tensor:
    """Return the fraction of the full rate after so many steps."""
    fraction = (steps_taken + 1) / WARMUP
    return fraction.clamp(max=1.0) if isinstance(fraction, Tensor) else min(1.0, fraction)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    context, following = (part.to(device()) for part in batch)
    with autocast(device(), dtype=torch.float16):
        logits = model(context)
    return F.cross_entropy(logits.float(), following)


def on_host() -> Result:
    """Ask ``stepped()``, and call torch's scheduler only for steps that were taken."""
    torch.manual_seed(0)
    model = NextByte().to(device())
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmed_up)
    scaler = DistGradScaler(device(), init_scale=2.0**24, growth_factor=2.0, backoff_factor=0.5)
    losses = []
    for batch in batches(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.stepped(optimizer):
            schedule.step()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 1 - DECAY)
        losses.append(loss.detach())
    counts = scaler.step_counts(optimizer)
    rate = optimizer.param_groups[0]["lr"]
    return Result([x.item() for x in losses], rate, counts.taken, counts.skipped, average)


def on_device() -> Result:
    """Do the same with tensors alone: nothing in the loop waits for the device."""
    torch.manual_seed(0)
    model = NextByte().to(device())
    average = copy.deepcopy(model)
    taken = torch.zeros((), device=device())
    rate = torch.full((), RATE * float(warmed_up(0)), device=device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    scaler = DistGradScaler(device(), init_scale=2.0**24, growth_factor=2.0, backoff_factor=0.5)
    losses = []
    for batch in batches(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        was_taken = 1 - scaler.found_inf(optimizer)
        taken += was_taken
        rate.copy_(RATE * warmed_up(taken))
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, (1 - DECAY) * was_taken)  # a weight of 0 changes nothing
        losses.append(loss.detach())
    counts = scaler.step_counts(optimizer)
    return Result([x.item() for x in losses], rate.item(), counts.taken, counts.skipped, average)


def main() -> None:
    for run in (on_host, on_device):
        result = run()
        print(
            f"{run.__name__}: {result.taken} steps taken, {result.skipped} skipped, "
            f"rate {result.rate:.4f}, loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}"
        )


if __name__ == "__main__":
    main()
