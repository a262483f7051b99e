"""Formats of gradients in messages, with their arithmetic in torch's operations for every device.

A format encodes blocks of 256 fp32 elements. `fp16` and `int8` send a scale for each block, as a
bfloat16, and the elements as multiples of the scale. `bf16` sends elements alone.

======  ==============  =====================================================
name    scale           inf and NaN
======  ==============  =====================================================
fp16    power of two    arrive unchanged, and the block's scale ignores them
bf16    none            arrive unchanged
int8    amax / 127      the whole block arrives as NaN
======  ==============  =====================================================

A scale is at least 2^-126, the smallest normal fp32, and `fp16` and `int8` decode no finite element
as inf. Every operation rounds once, in fp32, so that all devices compute the same bits.

To add a format, write a subclass of `CommFormat` and add an instance to ``_FORMATS``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BLOCK_NUMEL",
    "COMM_FORMATS",
    "CastFormat",
    "CommFormat",
    "Fp16Blocks",
    "Int8Blocks",
    "check_format",
    "comm_format",
    "uncompressed",
]

BLOCK_NUMEL = 256
FP32_MAX = torch.finfo(torch.float32).max
EXPONENT_MASK = 0x7F800000
# The bits of 2^-126 in fp32.
MIN_SCALE_BITS = 1 << 23
SCALE_BYTES = torch.bfloat16.itemsize
# A message aligns its elements to so many bytes.
ALIGNMENT = 16


class CommFormat(ABC):
    """A format of gradients in messages.

    Attributes:
        name: The name that `register_comm_hook` takes.
        payload: dtype of an element in a message.
        has_scales: Whether a message has a scale for each block.
        needs_error_feedback: Whether the rounding error is too large to be dropped at every step.
    """

    name: str
    payload: torch.dtype
    has_scales: bool = False
    needs_error_feedback: bool = False

    @abstractmethod
    def encode(self, blocks: Tensor, out: Tensor) -> None:
        """Encode blocks, which this does not change.

        Args:
            blocks: fp32 (n, 256).
            out: uint8, of `row_bytes` for n blocks.
        """

    @abstractmethod
    def decode(self, data: Tensor, out: Tensor, accumulate: bool = False) -> None:
        """Decode blocks.

        Args:
            data: uint8 that `encode` has written.
            out: fp32 (n, 256).
            accumulate: Whether the blocks are added to ``out``. If not, they replace it.
        """

    @property
    def is_compressed(self) -> bool:
        """True for a format of `COMM_FORMATS`; False for the format of uncompressed gradients."""
        return self.name in COMM_FORMATS

    @property
    def block_bytes(self) -> int:
        """Bytes of 256 elements."""
        scale_bytes = SCALE_BYTES if self.has_scales else 0
        return BLOCK_NUMEL * self.payload.itemsize + scale_bytes

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether gradients of a dtype take fewer bytes in this format."""
        return self.block_bytes < BLOCK_NUMEL * dtype.to_real().itemsize

    def row_bytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` elements, a multiple of 256, that are encoded together."""
        scale_bytes = 0
        if self.has_scales:
            # Elements begin at a multiple of the alignment.
            num_scales = numel // BLOCK_NUMEL
            scale_bytes = -(-num_scales * SCALE_BYTES // ALIGNMENT) * ALIGNMENT
        return scale_bytes + numel * self.payload.itemsize

    def split(self, data: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Return views of the scales and the elements of encoded blocks.

        Args:
            data: uint8, of `row_bytes`.
            num_blocks: The number of blocks.

        Returns:
            bfloat16 (n,), or (0,) if the format has no scales, and the payload's dtype (n, 256).
        """
        payload_nbytes = num_blocks * BLOCK_NUMEL * self.payload.itemsize
        scales = data[: num_blocks * SCALE_BYTES if self.has_scales else 0]
        payload = data[len(data) - payload_nbytes :]
        return scales.view(torch.bfloat16), payload.view(self.payload).view(-1, BLOCK_NUMEL)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class CastFormat(CommFormat):
    """Elements in another dtype, without scales."""

    def __init__(self, name: str, payload: torch.dtype) -> None:
        self.name = name
        self.payload = payload

    def encode(self, blocks: Tensor, out: Tensor) -> None:  # noqa: D102
        _, payload = self.split(out, len(blocks))
        payload.copy_(blocks)

    def decode(self, data: Tensor, out: Tensor, accumulate: bool = False) -> None:  # noqa: D102
        _, payload = self.split(data, len(out))
        if accumulate:
            out.add_(payload.to(torch.float32))
        else:
            out.copy_(payload)


class ScaledFormat(CommFormat):
    """Elements as multiples of the scale of their block."""

    has_scales = True

    def decode(self, data: Tensor, out: Tensor, accumulate: bool = False) -> None:
        scales, payload = self.split(data, len(out))
        elements = payload.to(torch.float32) if accumulate else out.copy_(payload)
        elements.mul_(scales.to(torch.float32).unsqueeze(1))
        if accumulate:
            out.add_(elements)


class Fp16Blocks(ScaledFormat):
    """fp16 with an exponent for each block."""

    name = "fp16"
    payload = torch.float16
    # The magnitude of a larger element would be decoded as inf.
    clip_max = FP32_MAX * (1 - 2.0**-11)

    def encode(self, blocks: Tensor, out: Tensor) -> None:  # noqa: D102
        scales, payload = self.split(out, len(blocks))
        finite, amax, nonfinite = clip_to_finite(blocks, self.clip_max)
        # The power of two by which amax becomes a number in [2^14, 2^15).
        exponent = (amax.view(torch.int32) & EXPONENT_MASK) - (14 << 23)
        scale = exponent.clamp(min=MIN_SCALE_BITS).view(torch.float32)
        multiples = finite * scale.reciprocal().unsqueeze(1)
        if nonfinite is not None:
            multiples = torch.where(nonfinite, blocks, multiples)
        scales.copy_(scale)
        payload.copy_(multiples)


class Int8Blocks(ScaledFormat):
    """int8 with a scale for each block."""

    name = "int8"
    payload = torch.int8
    needs_error_feedback = True
    # The magnitude of a larger element would be decoded as inf.
    clip_max = FP32_MAX * (1 - 1 / 127)

    def encode(self, blocks: Tensor, out: Tensor) -> None:  # noqa: D102
        scales, payload = self.split(out, len(blocks))
        finite, amax, nonfinite = clip_to_finite(blocks, self.clip_max)
        # The scale is rounded upwards to a bfloat16, so that no multiple exceeds 127.
        bits = (amax * (1 / 127)).view(torch.int32) + 0xFFFF & -0x10000
        scale = bits.clamp(min=MIN_SCALE_BITS).view(torch.float32)
        multiples = (finite * scale.reciprocal().unsqueeze(1)).round_()
        if nonfinite is not None:
            spoilt = nonfinite.any(1)
            scale = torch.where(spoilt, math.nan, scale)
            multiples.masked_fill_(spoilt.unsqueeze(1), 0.0)
        scales.copy_(scale)
        payload.copy_(multiples)


class ClippedBlocks(NamedTuple):
    """Blocks without inf and NaN.

    Attributes:
        finite: fp32 (n, 256), with zeros in the place of inf and NaN.
        amax: fp32 (n,), the largest magnitude of each block.
        nonfinite: bool (n, 256), where the blocks have inf or NaN, or None if they have none.
    """

    finite: Tensor
    amax: Tensor
    nonfinite: Tensor | None


def clip_to_finite(blocks: Tensor, clip_max: float) -> ClippedBlocks:
    """Replace inf and NaN in blocks by zeros, and clip finite elements to ``clip_max``."""
    amax = torch.maximum(blocks.amax(1), blocks.amin(1).neg_())
    # Reading the result from a GPU would synchronise with it, so there the mask is always made.
    if blocks.device.type == "cpu" and bool((amax <= clip_max).all()):
        return ClippedBlocks(blocks, amax, None)
    nonfinite = ~blocks.isfinite()
    finite = torch.where(nonfinite, 0.0, blocks).clamp_(-clip_max, clip_max)
    return ClippedBlocks(finite, finite.abs().amax(1), nonfinite)


_FORMATS: dict[str, CommFormat] = {
    "fp16": Fp16Blocks(),
    "bf16": CastFormat("bf16", torch.bfloat16),
    "int8": Int8Blocks(),
}
COMM_FORMATS: Mapping[str, CommFormat] = MappingProxyType(_FORMATS)


def uncompressed(dtype: torch.dtype) -> CommFormat:
    """Return the format of gradients that are sent in their own dtype."""
    return CastFormat("fp32" if dtype is torch.float32 else str(dtype)[6:], dtype)


def comm_format(name: str) -> CommFormat:
    """Return the format of a name.

    Raises:
        ValueError: There is none. The message lists the formats.
    """
    if name not in COMM_FORMATS:
        raise ValueError(
            f"There is no communication format {name!r}. Choose one of {', '.join(COMM_FORMATS)}."
        )
    return COMM_FORMATS[name]


def check_format(format: str | CommFormat) -> CommFormat:
    """Return a format that hooks can encode, or the format of uncompressed gradients.

    Raises:
        ValueError: The format is not in the table.
    """
    if not isinstance(format, CommFormat):
        return comm_format(format)
    if format in (*COMM_FORMATS.values(), uncompressed(format.payload)):
        return format
    raise ValueError(
        f"{format!r} is not one of COMM_FORMATS, and hooks send no format from outside of the "
        f"library. Pass the name of a format: {', '.join(COMM_FORMATS)}."
    )
