"""DataParallel: several devices of one process that compute in one autocast region.

    python examples/data_parallel.py [DEVICE ...]

The threads of torch's `parallel_apply` receive only the flag that autocast is on, so the replicas
of a bfloat16 region compute in float16. `distamp.DataParallel` passes on the whole region, with its
dtype.
"""

import sys

import torch
from next_byte import NextByte, batches
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from distamp import DataParallel, DistGradScaler, autocast


def train(devices: list[str], dtype: torch.dtype, steps: int = 30) -> tuple[list[float], set[str]]:
    """Return the losses, and the dtypes of the replicas' outputs."""
    torch.manual_seed(0)
    model = NextByte().to(devices[0])
    dtypes: set[str] = set()

    def add_dtype(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        dtypes.add(str(output.dtype))

    model.output.register_forward_hook(add_dtype)
    replicated = DataParallel(model, devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    device_type = torch.device(devices[0]).type
    needs_scale = dtype is torch.float16
    scaler = DistGradScaler(device_type, init_scale=2.0**14, enabled=needs_scale)
    losses = []
    for context, next_bytes in batches(steps):
        optimizer.zero_grad()
        with autocast(device_type, dtype=dtype):
            logits = replicated(context.to(devices[0]))
        loss = F.cross_entropy(logits.float(), next_bytes.to(devices[0]))
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, dtypes


def main() -> None:
    devices = sys.argv[1:]
    if not devices:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if not devices:
        sys.exit("error: this example needs a device other than the CPU")
    for dtype in (torch.bfloat16, torch.float16):
        losses, dtypes = train(devices, dtype)
        names = ", ".join(dtypes)
        print(f"{names} on {len(devices)}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
