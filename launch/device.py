"""Which device a rank computes on, and whether that device can do what is asked."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from distamp import autocast
from launch.config import Config
from launch.errors import UsageError
from launch.ranks import Ranks

__all__ = ["check_backend", "check_precision", "pick_device", "slowdown"]


def pick_device(name: str, ranks: Ranks) -> torch.device:
    """Return this rank's device: the accelerator of its local rank, or the CPU.

    Raises:
        UsageError: If the device is not there.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        name = accelerator.type if accelerator is not None else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: not a device; try cpu or cuda") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or device.type != accelerator.type:
        have = "cpu" if accelerator is None else f"cpu or {accelerator.type}"
        raise UsageError(f"--device {name}: not on this machine, which has {have}")
    count = torch.accelerator.device_count()
    index = ranks.local_rank if device.index is None else device.index
    if index >= count:
        raise UsageError(
            f"--device {name}: local rank {ranks.local_rank} needs device {index} of {count};"
            f" start at most {count} processes here, or use --device cpu"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def check_backend(backend: str | None) -> None:
    """Refuse a backend that is not here.

    Raises:
        UsageError: For NCCL without a GPU, or without NCCL.
    """
    if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise UsageError("--backend nccl: it needs a CUDA device and a torch built with NCCL")


def check_precision(device: torch.device, config: Config) -> None:
    """Try a matrix product and its gradient, under autocast or in a cast model's own dtype.

    Raises:
        UsageError: If the device cannot do it in this precision.
    """
    level = config.level
    if level.compute is torch.float32:
        return
    why = "autocast does not know this device"
    if level.casts_model or torch.amp.is_autocast_available(device.type):
        try:
            a = torch.ones(8, 8, dtype=level.param, device=device, requires_grad=True)
            with autocast(device.type, level.compute, enabled=level.autocasts):
                product = a @ a
            product.float().sum().backward()
            if product.dtype == level.compute:
                return
            why = f"autocast computes in {product.dtype} there"
        except (RuntimeError, NotImplementedError) as error:
            why = str(error).splitlines()[0]
    raise UsageError(f"{config.level_flag}: {device.type} cannot do it ({why})")


def slowdown(device: torch.device, dtype: torch.dtype) -> float:
    """Return how many times longer a matrix product takes here in this dtype than in fp32.

    A CPU without instructions for fp16 or bf16 computes in them, but far slower than in fp32.
    """

    def seconds(dtype: torch.dtype) -> float:
        a = torch.ones(256, 256, dtype=dtype, device=device)
        times = []
        for _ in range(4):
            began = time.perf_counter()
            (a @ a)[0, 0].item()
            times.append(time.perf_counter() - began)
        return min(times)

    return seconds(dtype) / seconds(torch.float32)
