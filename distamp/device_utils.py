"""Reads of device tensors by the host, and copies that do not wait for a device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["AsyncHostCopy", "is_capturing", "is_cpu", "to_device"]


def is_cpu(device: torch.device) -> bool:
    """Return whether the host can read a tensor on ``device`` without a wait."""
    return device.type == "cpu"


def is_capturing() -> bool:
    """Return whether the current stream captures a CUDA graph; the host reads no value then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``tensor`` on ``device``, without a wait for the device where that is safe.

    A copy to the host waits, because kernels on the host would read it before it has arrived.
    """
    return tensor.to(device=device, dtype=dtype, non_blocking=not is_cpu(device))


class AsyncHostCopy:
    """Copy of a device tensor to the host, for which a reader waits, and for nothing else.

    Args:
        source: The tensor to copy, of any shape.
    """

    def __init__(self, source: Tensor) -> None:
        on_device = source.device.type != "cpu"
        self._values = torch.empty(
            source.shape, dtype=source.dtype, device="cpu", pin_memory=on_device
        )
        self._values.copy_(source, non_blocking=True)
        self._event = torch.Event(source.device) if on_device else None
        if self._event is not None:
            # The source's device need not be the current device.
            self._event.record(torch.accelerator.current_stream(source.device))

    def is_ready(self) -> bool:
        """Return whether `tolist` would not wait."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def tolist(self) -> list[float]:
        """Return the values, after a wait for the copy if it is not known to have arrived."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        values: list[float] = self._values.tolist()
        return values
