"""The wire: how gradients are written as bytes and read back. Pure functions of tensors.

A wire is a 1-D uint8 tensor. The block formats write 256 elements at a time: two bytes of header,
the block's unit as a bfloat16 (its sign says that an element of the block is inf or NaN), then the
payload in multiples of that unit. Blocks stand alone, so a wire may be cut at any whole block, and
bytes of zero read as zeros.

==========  =====  =============  ===========================================================
name        bytes  unit           inf and NaN
==========  =====  =============  ===========================================================
fp16_plain  2                     kept; so is torch's inf for magnitudes from 65520
bf16        2                     kept; so is torch's inf for the last 0.2 % of fp32's range
fp16        2      power of two   kept, each in its place
int16       2      amax / 32767   NaN, each in its place
int8        1      amax / 127     NaN, each in its place
fp8_e4m3    1      power of two   NaN, each in its place
==========  =====  =============  ===========================================================

The other elements of a block that holds inf or NaN are written as if those were zeros. No block
format makes an inf of a finite value. A unit is at least 2^-126, the smallest normal fp32: ``fp16``
keeps what lies below it, for it has subnormal payloads, the integers round it to multiples of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from distamp.comm_hooks.wire_base import WireFormat, exponent_field, pieces
from distamp.comm_hooks.wire_blocks import BlockFormat

__all__ = ["WIRE_FORMATS", "WireFormat", "wire_format"]

EXPONENT_BIAS = 127
FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class _PlainFormat(WireFormat):
    """One cast for each element and no header."""

    def has_nonfinite(self, wire: torch.Tensor, *, terms: int = 1) -> torch.Tensor:
        """Return whether an element is inf or NaN, 0-d bool; reads every element."""
        values = wire.view(self.payload)
        if values.numel() == 0:
            return torch.zeros((), dtype=torch.bool, device=wire.device)
        # NaN wins both reductions, and no comparison.
        limit = FP32_MAX / terms
        highest, lowest = torch.amax(values).float(), torch.amin(values).float()
        return ~((highest <= limit) & (lowest >= -limit))

    def largest_exponent(self, wire: torch.Tensor) -> torch.Tensor:
        """Return floor(log2) of the largest finite magnitude, 0-d int32; reads every element."""
        values = wire.view(self.payload).to(torch.float32).abs()
        if values.numel() == 0:
            return torch.full((), -EXPONENT_BIAS, dtype=torch.int32, device=wire.device)
        return exponent_field(torch.where(values.isfinite(), values, 0.0).amax()) - EXPONENT_BIAS

    def _encode(self, values: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
        payload = out.view(self.payload)
        if divisor == 1:
            payload.copy_(values)
        elif self.payload == torch.float16:
            # torch's fp16_compress_hook to the bit: it casts, then divides in fp16.
            payload.copy_(values).div_(divisor)
        else:
            for start, piece in pieces(values):
                payload[start : start + piece.numel()] = piece.to(torch.float32) * (1 / divisor)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        if add:
            out.add_(wire.view(self.payload))
        else:
            out.copy_(wire.view(self.payload))


WIRE_FORMATS: Mapping[str, WireFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            _PlainFormat("fp16_plain", torch.float16),
            _PlainFormat("bf16", torch.bfloat16),
            BlockFormat("fp16", torch.float16, top=1 << 15),
            BlockFormat("int16", torch.int16, top=(1 << 15) - 1),
            BlockFormat("int8", torch.int8, top=(1 << 7) - 1, needs_error_feedback=True),
            BlockFormat("fp8_e4m3", torch.float8_e4m3fn, top=1 << 8, needs_error_feedback=True),
        )
    }
)


def wire_format(name: str) -> WireFormat:
    """Return the format of that name.

    Raises:
        ValueError: there is none; the message names the choices.
    """
    if name not in WIRE_FORMATS:
        raise ValueError(f"unknown wire format {name!r}: choose one of {', '.join(WIRE_FORMATS)}")
    return WIRE_FORMATS[name]
