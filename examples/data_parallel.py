"""DataParallel: several devices of one process, and a region that all of them compute in.

    python examples/data_parallel.py [DEVICE ...]

torch's own `parallel_apply` tells its threads only whether autocast is on, so a bfloat16 region
gives float16 replicas. `distamp.DataParallel` gives them the caller's region, dtype and all.
"""

import sys

import torch
from next_byte import NextByte, batches
from torch.nn import functional as F  # noqa: N812

from distamp import DataParallel, DistGradScaler, autocast


def train(devices: list[str], dtype: torch.dtype, steps: int = 30) -> tuple[list[float], set[str]]:
    """Return the losses, and the dtypes that the replicas computed in."""
    torch.manual_seed(0)
    model = NextByte().to(devices[0])
    seen: set[str] = set()
    model.output.register_forward_hook(lambda _, __, output: seen.add(str(output.dtype)))
    replicated = DataParallel(model, devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kind = torch.device(devices[0]).type
    scaler = DistGradScaler(kind, init_scale=2.0**14, enabled=dtype is torch.float16)
    losses = []
    for context, following in batches(steps):
        optimizer.zero_grad()
        with autocast(kind, dtype=dtype):
            logits = replicated(context.to(devices[0]))
        loss = F.cross_entropy(logits.float(), following.to(devices[0]))
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, seen


def main() -> None:
    found = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    devices = sys.argv[1:] or found
    if not devices:
        sys.exit("it needs a device that is not the CPU")
    for dtype in (torch.bfloat16, torch.float16):
        losses, seen = train(devices, dtype)
        print(f"{', '.join(seen)} on {len(devices)}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
