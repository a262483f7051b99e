"""Send gradients in half the bytes: a communication hook, joined with the scaler.

    torchrun --nproc-per-node 2 examples/hook_on_a_slow_link.py [--wire fp16]

Trains the same model twice, with gradients as they are and through a hook, and prints both losses
and what the hook sent. Run alone, without torchrun, it is a group of one rank.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, autocast, comm_hooks


def train(wire: str | None, steps: int = 60) -> tuple[float, float, str]:
    """Return the first loss, the last one, and what the hook sent."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = DistGradScaler("cpu")
    hook = None if wire is None else comm_hooks.register(model, wire)
    if hook is not None:
        # inf and NaN are then agreed on by the exchange itself.
        scaler.attach(hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 64, generator=generator)
        with autocast("cpu", torch.bfloat16):
            loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses[0], losses[-1], "" if hook is None else str(hook.stats())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wire", choices=list(comm_hooks.WIRE_FORMATS), default="fp16")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    try:
        for wire in (None, given.wire):
            first, last, sent = train(wire)
            if dist.get_rank() == 0:
                print(f"gradients in {wire or 'fp32'}: loss {first:.4f} -> {last:.4f}")
                if sent:
                    print(sent)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
