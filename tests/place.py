"""What this process computes on: the CPU, or its rank's own simulated device."""

import torch

__all__ = ["device_type", "here"]


def device_type() -> str:
    """``"sim"`` in a process that has the simulated accelerator, else ``"cpu"``."""
    return "sim" if hasattr(torch, "sim") else "cpu"


def here() -> torch.device:
    """This rank's device."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device("sim", torch.accelerator.current_device_index())
