"""Device types: whether this machine has one, and autocast for one that it has not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["autocast_without_device", "is_here"]


def is_here(device_type: str) -> bool:
    """Whether this machine can compute on a device type."""
    if device_type == "cpu":
        return True
    module = getattr(torch, device_type, None)
    return module is not None and bool(module.is_available())


@contextlib.contextmanager
def autocast_without_device(
    device_type: str, dtype: torch.dtype, enabled: bool = True
) -> Iterator[None]:
    """Autocast for a device that need not be here, for which torch.autocast turns itself off."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
        if torch.autocast_decrement_nesting() == 0 or before[1] is not dtype:
            torch.clear_autocast_cache()
