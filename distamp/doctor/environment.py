"""Versions, devices, backends and settings, as text. Nothing is run on a device."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["backends", "device_type", "devices", "settings", "versions"]

# What distamp works with where it is installed; none is imported to find out.
_OPTIONAL = (
    "triton",
    "fairscale",
    "lightning",
    "pytorch-lightning",
    "accelerate",
    "transformers",
    "trl",
    "rich",
    "matplotlib",
)
# Settings of libraries that change what ranks do; addresses and numbers of ranks are left out.
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "OMP_", "MKL_", "KMP_", "PYTORCH_")
_LEFT_OUT = ("CUDA_VISIBLE_DEVICES", "TORCH_HOME", "TORCH_FR_DUMP_TEMP_FILE")


def versions() -> dict[str, str]:
    """Return name and version of everything that takes part, and of optional packages."""
    import distamp

    found = {
        "distamp": distamp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cuda": str(torch.version.cuda or getattr(torch.version, "hip", None) or "none"),
        "nccl": _nccl(),
    }
    for name in _OPTIONAL:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _nccl() -> str:
    if not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def device_type() -> str:
    """Return the type of this machine's accelerator, or ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def devices() -> list[str]:
    """Return a line for each device: its name, memory and what it can compute in."""
    lines = [f"cpu: {_processor()}, {_cores()} cores for this process"]
    if device_type() == "cuda":
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            lines.append(
                f"cuda:{index}: {about.name}, {about.total_memory / 2**30:.0f} GiB, compute "
                f"capability {about.major}.{about.minor}"
            )
    elif device_type() != "cpu":
        lines.append(f"{device_type()}: {torch.accelerator.device_count()} devices")
    return lines


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def backends() -> dict[str, bool]:
    """Return which process groups this torch can make here."""
    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    nccl = dist.is_nccl_available() and torch.cuda.is_available()
    return {"gloo": dist.is_gloo_available(), "nccl": nccl}


def settings() -> dict[str, str]:
    """Return what was set, in torch and in the environment, that changes what a rank computes."""
    found = {
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "threads": str(torch.get_num_threads()),
    }
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES) and name not in _LEFT_OUT:
            found[name] = value
    return found
