"""DataParallel's primitives, which torch has for CUDA alone: scatter, gather, broadcast."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["supply"]


def supply(kind: str) -> None:
    """Give ``torch._C`` what `torch.nn.parallel.comm` calls, for devices of this type."""

    def named(devices: Sequence[Any]) -> list[torch.device]:
        return [torch.device(kind, d) if isinstance(d, int) else torch.device(d) for d in devices]

    def scatter(
        tensor: Tensor, devices: Sequence[Any], sizes: Any, dim: int, streams: Any
    ) -> list[Tensor]:
        targets = named(devices)
        chunks = tensor.chunk(len(targets), dim) if sizes is None else tensor.split(sizes, dim)
        parts = []
        for number, (chunk, device) in enumerate(zip(chunks, targets, strict=True)):
            stream = streams[number] if streams else None
            with stream or contextlib.nullcontext():
                same = chunk.device == device
                parts.append(chunk if same else chunk.contiguous().to(device, non_blocking=True))
        return parts

    def gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
        device = torch.device("cpu") if destination == -1 else named([destination or 0])[0]
        return torch.cat([t.to(device, non_blocking=device.type != "cpu") for t in tensors], dim)

    def broadcast_coalesced(
        tensors: Sequence[Tensor], devices: Sequence[Any], _: int
    ) -> list[list[Tensor]]:
        return [
            [t if t.device == device else t.to(device, non_blocking=True) for t in tensors]
            for device in named(devices)
        ]

    def broadcast(tensor: Tensor, devices: Sequence[Any]) -> list[Tensor]:
        return [copies[0] for copies in broadcast_coalesced([tensor], devices, 0)]

    for function in (scatter, gather, broadcast_coalesced, broadcast):
        setattr(torch._C, f"_{function.__name__}", function)
