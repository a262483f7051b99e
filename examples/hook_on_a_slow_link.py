"""Send gradients in half the bytes: a communication hook, joined with the scaler.

    torchrun --nproc-per-node 2 examples/hook_on_a_slow_link.py [fp16]

Trains the same model twice, with gradients as they are and through a hook, and prints both losses
and what the hook sent.
"""

import sys

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
    scaler = DistGradScaler("cpu", init_scale=2.0**10)
    hook = comm_hooks.register_comm_hook(model, wire) if wire else None
    if hook is not None:
        scaler.attach_comm_hook(hook)  # tells it the scale, and of skipped steps
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 64, generator=generator)
        with autocast("cpu", torch.float16):
            loss = (model(x).float() - x.flip(1)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses[0], losses[-1], str(hook.stats()) if hook else "as they are"


def main() -> None:
    dist.init_process_group()
    for wire in (None, sys.argv[1] if len(sys.argv) > 1 else "fp16"):
        first, last, sent = train(wire)
        if dist.get_rank() == 0:
            print(f"gradients in {wire or 'fp32'}: loss {first:.4f} -> {last:.4f}, {sent}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
