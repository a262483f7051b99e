"""Send gradients in half the bytes, with a communication hook that is attached to the scaler.

    torchrun --nproc-per-node 2 examples/hook_on_a_slow_link.py [fp16]

The example trains the same model twice, without and with a hook, and prints the losses of both runs
and the bytes that the hook sent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, autocast, comm_hooks


def train(comm_format: str | None, steps: int = 60) -> tuple[float, float, str]:
    """Return the first loss, the last loss, and the counts of the hook."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = DistGradScaler("cpu", init_scale=2.0**10)
    hook = None
    if comm_format is not None:
        hook = comm_hooks.register_comm_hook(model, comm_format)
        # The hook needs the loss scale, and the steps that were skipped.
        scaler.attach_comm_hook(hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 64, generator=generator)
        with autocast("cpu", torch.float16):
            outputs = model(x)
        loss = (outputs.float() - x.flip(1)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    sent = "uncompressed" if hook is None else str(hook.stats())
    return losses[0], losses[-1], sent


def main() -> None:
    dist.init_process_group()
    comm_format = sys.argv[1] if len(sys.argv) > 1 else "fp16"
    for name in (None, comm_format):
        first, last, sent = train(name)
        if dist.get_rank() == 0:
            print(f"gradients in {name or 'fp32'}: loss {first:.4f} -> {last:.4f}, {sent}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
