"""Which device type a scaler is for, and whether this machine has it."""

from __future__ import annotations

import torch

__all__ = ["resolve_device_type"]


def resolve_device_type(device: str | torch.device | None) -> tuple[str, bool]:
    """Return the device type and whether this machine has it."""
    is_there = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if is_there else None
    if device is None:
        return (accelerator.type if accelerator is not None else "cpu"), True
    if isinstance(device, (bool, int, float)):
        raise TypeError(
            f"device must be a device type such as 'cuda' or 'cpu', not {device!r}; "
            f"a loss scale is given by keyword: init_scale={device!r}"
        )
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a str or None, not {type(device).__name__}")
    try:
        device_type = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is no device torch knows: {error}") from None
    there = device_type == "cpu" or (accelerator is not None and accelerator.type == device_type)
    return device_type, there
