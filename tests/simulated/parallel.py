"""DataParallel's primitives, which torch has for CUDA alone: scatter, gather, broadcast."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["supply"]


def supply(kind: str) -> None:
    """Add the functions that `torch.nn.parallel.comm` calls to ``torch._C``, for a device type."""

    def device_of(place: Any) -> torch.device:
        if isinstance(place, int):
            return torch.device(kind, place)
        return torch.device(place)

    def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device == device:
            return tensor
        return tensor.contiguous().to(device, non_blocking=True)

    def scatter(
        tensor: Tensor, devices: Sequence[Any], sizes: Any, dim: int, streams: Any
    ) -> list[Tensor]:
        count = len(devices)
        chunks = tensor.chunk(count, dim) if sizes is None else tensor.split(sizes, dim)
        copies = []
        for number, (chunk, place) in enumerate(zip(chunks, devices, strict=True)):
            stream = streams[number] if streams else None
            with stream or contextlib.nullcontext():
                copies.append(copy_to(chunk, device_of(place)))
        return copies

    def gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
        device = device_of("cpu" if destination == -1 else destination or 0)
        is_async = device.type != "cpu"
        copies = [tensor.to(device, non_blocking=is_async) for tensor in tensors]
        return torch.cat(copies, dim)

    def broadcast_coalesced(
        tensors: Sequence[Tensor], devices: Sequence[Any], _: int
    ) -> list[list[Tensor]]:
        copies_by_device = []
        for place in devices:
            device = device_of(place)
            copies_by_device.append([copy_to(tensor, device) for tensor in tensors])
        return copies_by_device

    def broadcast(tensor: Tensor, devices: Sequence[Any]) -> list[Tensor]:
        return [copies[0] for copies in broadcast_coalesced([tensor], devices, 0)]

    for function in (scatter, gather, broadcast_coalesced, broadcast):
        setattr(torch._C, f"_{function.__name__}", function)
