"""Checksums of the bits of tensors, in which every single flipped bit shows.

The bits are read as int64 words. Rows of 64 words are added up, each sum is multiplied by an odd
number that belongs to its place, and the products are added up modulo 2^64. A single flip changes a
row by a power of two, which no odd number makes 0. The result does not depend on the order of
additions. Opposite changes in one row of 64 words are not seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["as_words", "checksum", "mixed"]

_ROW = 64
#: Tensors below this number of bytes are joined before they are read.
_SMALL_BYTES = 1 << 15
#: The weight of a place is an even number times the place, plus an odd number.
_PLACE_STEP = 0x1E3779B97F4A7C16
_PLACE_OFFSET = 0x3F58476D1CE4E5B9
_MIX = 0x2545F4914F6CDD1D


def as_words(tensor: Tensor) -> Tensor:
    """Return the bits of a dense tensor as int64 of one dimension, with zeros at the end."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    as_bytes = flat.view(torch.uint8)
    missing = -as_bytes.numel() % 8
    is_aligned = as_bytes.storage_offset() % 8 == 0
    if missing or not is_aligned:
        padded = as_bytes.new_zeros(as_bytes.numel() + missing)
        padded[: as_bytes.numel()] = as_bytes
        as_bytes = padded
    return as_bytes.view(torch.int64)


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return one checksum of tensors of one device as 0-d int64 there.

    Small tensors of a dtype are joined, because a kernel for each takes longer than its elements.

    Args:
        tensors: At least one dense tensor.
    """
    large: list[Tensor] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= _SMALL_BYTES:
            large.append(tensor)
        else:
            small.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
    for same_dtype in small.values():
        large.append(torch.cat(same_dtype))
    sums: list[Tensor] = []
    for tensor in large:
        words = as_words(tensor)
        in_rows = words.numel() // _ROW * _ROW
        sums.append(words[:in_rows].view(-1, _ROW).sum(dim=1))
        if in_rows < words.numel():
            sums.append(words[in_rows:].sum().view(1))
    all_sums = torch.cat(sums)
    places = torch.arange(all_sums.numel(), dtype=torch.int64, device=all_sums.device)
    # An even multiple of the place plus an odd number is odd.
    weights = places.mul_(_PLACE_STEP).add_(_PLACE_OFFSET)
    return all_sums.mul_(weights).sum()


def mixed(total: Tensor, modulus: int) -> Tensor:
    """Return a checksum with its high bits mixed into the low ones, at least 0, below ``modulus``.

    Args:
        total: 0-d int64.
        modulus: At most 2^31.
    """
    total = (total ^ (total >> 32)) * _MIX
    return ((total >> 29) & 0x7FFFFFFF).remainder(modulus)
