"""Typical training with `initialize`: the same loop at every level of precision.

    python examples/one_call_training.py [--opt-level O2]

The level is one word: O0 is fp32, O1 casts op by op, O2 has an fp16 model with fp32 masters, O3 is
fp16 throughout, bf16 casts op by op and needs no loss scale.
"""

from __future__ import annotations

import argparse

import torch
from next_byte import NextByte, batches, device
from torch.nn import functional as F  # noqa: N812

from distamp import initialize

STEPS = 30


def train(opt_level: str) -> list[float]:
    """Train at a level; return the losses."""
    torch.manual_seed(0)
    model = NextByte().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    amp = initialize(model, optimizer, opt_level)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.3)
    losses = []
    for context, following in batches(STEPS):
        amp.zero_grad()
        with amp.autocast():
            logits = amp.model(context.to(device()))
        loss = F.cross_entropy(logits.float(), following.to(device()))
        amp.backward(loss)
        if amp.step():  # a skipped step is none
            schedule.step()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", nargs="+", default=["O0", "O1", "O2", "O3", "bf16"])
    for level in parser.parse_args(arguments).opt_level:
        losses = train(level)
        print(f"{level}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {STEPS} steps")


if __name__ == "__main__":
    main()
