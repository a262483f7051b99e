"""Chunks of tensors that fit in a cache, so that several ops read and write memory only once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from distamp import device_utils

__all__ = ["iter_chunks"]

# The number of elements that several ops work on while a cache holds them. On an accelerator, where
# a chunk is one launch for many tensors, the limit only bounds the memory for a second copy.
_CPU_NUMEL = 2**17
_ACCELERATOR_NUMEL = 2**25


def iter_chunks(rows: Iterable[tuple[Tensor, ...]]) -> Iterator[list[list[Tensor]]]:
    """Yield chunks of rows as columns: small rows together, and a large row in pieces.

    A chunk is on one device. Only contiguous tensors on the CPU are cut into pieces. The generator
    drops a row with its chunk, so an iterable that creates rows can free their tensors.

    Args:
        rows: Tuples of tensors; the tensors of a row have the same size and device.

    Yields:
        A list of tensors for each column of the rows.
    """
    chunk: list[tuple[Tensor, ...]] = []
    chunk_numel = 0
    chunk_device: torch.device | None = None
    for row in rows:
        tensor = row[0]
        device, numel = tensor.device, tensor.numel()
        is_cpu = device_utils.is_cpu(device)
        max_numel = _CPU_NUMEL if is_cpu else _ACCELERATOR_NUMEL
        if chunk and (device != chunk_device or chunk_numel + numel > max_numel):
            yield _columns(chunk)
            chunk, chunk_numel = [], 0
        if is_cpu and numel > max_numel and _are_contiguous(row):
            yield from _iter_pieces(row, max_numel)
        else:
            chunk.append(row)
            chunk_device = device
            chunk_numel += numel
        # The variables would hold the row's tensors while the next row is created.
        del row, tensor
    if chunk:
        yield _columns(chunk)


def _iter_pieces(row: tuple[Tensor, ...], max_numel: int) -> Iterator[list[list[Tensor]]]:
    columns = [tensor.view(-1).split(max_numel) for tensor in row]
    for pieces in zip(*columns, strict=True):
        yield [[piece] for piece in pieces]


def _are_contiguous(row: tuple[Tensor, ...]) -> bool:
    return all(tensor.is_contiguous() for tensor in row)


def _columns(rows: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    return [list(column) for column in zip(*rows, strict=True)]
