"""The device of this process, which is the CPU or the simulated device of its rank."""

import torch

__all__ = ["device_type", "rank_device"]


def device_type() -> str:
    """Return ``"sim"`` in a process that has the simulated accelerator, else ``"cpu"``."""
    return "sim" if hasattr(torch, "sim") else "cpu"


def rank_device() -> torch.device:
    """Return the device of this rank."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device("sim", torch.accelerator.current_device_index())
