"""Checksums of the bits of tensors, in which every single flipped bit shows.

The bits are read as int64 words. Rows of 64 words are added up, each sum is multiplied by an odd
number that belongs to its place, and the products are added up modulo 2^64. Words behind the last
row of a tensor count as rows of their own. A single flip changes a row by a power of two, which no
odd number makes 0. The result does not depend on the order of additions. Opposite changes in one
row of 64 words are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["as_words", "checksum", "mixed"]

_ROW = 64
#: Tensors below this number of bytes are joined before they are read.
_SMALL_BYTES = 1 << 17
#: Small tensors are joined to buffers of about this many bytes.
_JOINED_BYTES = 1 << 20
#: The weight of a place is an even number times the place, plus an odd number.
_PLACE_STEP = 0x1E3779B97F4A7C16
_PLACE_OFFSET = 0x3F58476D1CE4E5B9
_MIX = 0x2545F4914F6CDD1D


def as_words(tensor: Tensor) -> Tensor:
    """Return the bits of a dense tensor as int64 of one dimension, with zeros at the end."""
    return torch.cat(_split_words(tensor))


def _split_words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the whole words of a dense tensor, without a copy if possible, and its last word.

    The last word has zeros at the end. It is empty if the bits fill whole words.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    as_bytes = flat.view(torch.uint8)
    if as_bytes.storage_offset() % 8:
        as_bytes = as_bytes.clone()
    size = as_bytes.numel() // 8 * 8
    last_bytes = as_bytes[size:]
    if last_bytes.numel():
        zeros = last_bytes.new_zeros(8 - last_bytes.numel())
        last_bytes = torch.cat((last_bytes, zeros))
    whole_words = as_bytes[:size].view(torch.int64)
    return whole_words, last_bytes.view(torch.int64)


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return one checksum of tensors of one device as 0-d int64 there.

    Small tensors of a dtype are joined, because a kernel for each takes longer than its elements.

    Call it under no_grad.

    Args:
        tensors: At least one dense tensor.
    """
    sums: list[Tensor] = []
    for tensor in _join_small(tensors):
        words, last_word = _split_words(tensor)
        in_rows = words.numel() // _ROW * _ROW
        rows = words[:in_rows].view(-1, _ROW)
        sums.append(rows.sum(dim=1))
        sums.append(words[in_rows:])
        sums.append(last_word)
    all_sums = torch.cat(sums)
    num_places = all_sums.numel()
    places = torch.arange(num_places, dtype=torch.int64, device=all_sums.device)
    # An even multiple of the place plus an odd number is odd.
    weights = places.mul_(_PLACE_STEP).add_(_PLACE_OFFSET)
    return all_sums.mul_(weights).sum()


def _join_small(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield large tensors, and small tensors of a dtype joined to buffers that fit in a cache."""
    small: dict[torch.dtype, list[Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.nbytes >= _SMALL_BYTES:
            yield tensor
            continue
        dtype = tensor.dtype
        small.setdefault(dtype, []).append(tensor.flatten())
        sizes[dtype] = sizes.get(dtype, 0) + tensor.nbytes
        if sizes[dtype] >= _JOINED_BYTES:
            yield torch.cat(small.pop(dtype))
            sizes[dtype] = 0
    for same_dtype in small.values():
        yield torch.cat(same_dtype)


def mixed(total: Tensor, modulus: int) -> Tensor:
    """Return a checksum with its high bits mixed into the low ones, at least 0, below ``modulus``.

    Args:
        total: 0-d int64.
        modulus: At most 2^31.
    """
    total = (total ^ (total >> 32)) * _MIX
    return ((total >> 29) & 0x7FFFFFFF).remainder(modulus)
