"""What the host can read at once, and how it reads the rest without stopping the device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HostCopy", "is_captured", "is_host", "moved"]


def is_host(device: torch.device) -> bool:
    """Return whether reading a tensor on ``device`` costs no wait."""
    return device.type == "cpu"


def is_captured() -> bool:
    """Return whether a CUDA graph is being captured, of which the host reads nothing."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``tensor`` on ``device`` without waiting for what the host does not read.

    A copy to the host is waited for: the kernels there would read it before it has arrived.
    """
    return tensor.to(device=device, dtype=dtype, non_blocking=not is_host(device))


class HostCopy:
    """A device tensor on its way to the host; whoever reads it waits for this copy alone.

    Args:
        source: What is copied, of any shape.
    """

    def __init__(self, source: Tensor) -> None:
        on_device = source.device.type != "cpu"
        self._host = torch.empty(
            source.shape, dtype=source.dtype, device="cpu", pin_memory=on_device
        )
        self._host.copy_(source, non_blocking=True)
        self._event = torch.Event(source.device) if on_device else None
        if self._event is not None:
            # Of the source's device, which need not be the current one.
            self._event.record(torch.accelerator.current_stream(source.device))

    def arrived(self) -> bool:
        """Return whether `values` would not wait."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def values(self) -> list[float]:
        """Return the values, waiting for the copy if it is not known to have arrived."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        values: list[float] = self._host.tolist()
        return values
