"""Arithmetic of blocks of 256 elements in torch's own ops: units, payloads, and back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from distamp.comm_hooks.wire import WireFormat

__all__ = [
    "EXPONENT_BIAS",
    "EXPONENT_BITS",
    "FP32_MAX",
    "exponent_of",
    "least_unit",
    "on_host",
    "read_blocks",
    "read_lanes",
    "read_payload",
    "scaled_to",
    "unit_of",
    "write_any_blocks",
    "write_blocks",
]

EXPONENT_BITS = 23
EXPONENT_BIAS = 127
EXPONENT_MASK = 0xFF << EXPONENT_BITS
BFLOAT16_MASK = -1 << 16
FP32_MAX = torch.finfo(torch.float32).max


def on_host(values: Tensor) -> bool:
    """Return whether looking at a value costs nothing."""
    return values.device.type == "cpu"


def least_unit(divisor: float) -> int:
    """Return the exponent field of the least unit: ``1 / (divisor * unit)`` must be finite."""
    return 1 + max(0, math.ceil(math.log2(1 / divisor)))


def exponent_of(magnitude: Tensor) -> Tensor:
    """Return floor(log2) of non-negative normal fp32 values, int64."""
    return ((magnitude.view(torch.int32) >> EXPONENT_BITS) - EXPONENT_BIAS).to(torch.int64)


def write_blocks(
    wire: WireFormat, blocks: Tensor, inverse: float, header: Tensor, payload: Tensor
) -> None:
    """Write ``blocks * inverse``, (rows, blocks, 256), that all fit the cache."""
    amax = torch.maximum(torch.amax(blocks, -1), torch.amin(blocks, -1).neg_()).to(torch.float32)
    if inverse != 1:
        amax = amax.mul_(inverse)
    if not bool(amax.amax() <= wire.limit):
        write_any_blocks(wire, blocks, inverse, header, payload)
        return
    unit = unit_of(wire, amax, inverse)
    header.copy_(unit)
    factor = unit.reciprocal_().mul_(inverse).unsqueeze(-1)
    scaled = blocks * factor if blocks.dtype is torch.float32 else blocks.float().mul_(factor)
    payload.copy_(scaled.round_() if wire.is_integer else scaled)


def write_any_blocks(
    wire: WireFormat, blocks: Tensor, inverse: float, header: Tensor, payload: Tensor
) -> None:
    """Do as `write_blocks` for what may hold inf, NaN or values that would round to inf."""
    blocks = blocks.to(torch.float32)
    divided = blocks * inverse if inverse != 1 else blocks
    bad = ~torch.isfinite(divided)
    magnitude = torch.where(bad, 0.0, divided.abs())
    unit = unit_of(wire, magnitude.amax(-1).clamp(max=wire.limit), inverse)
    header.copy_(torch.where(bad.any(-1), -unit, unit))
    reciprocal = unit.reciprocal().unsqueeze(-1)
    payload.copy_(scaled_to(wire, blocks, divided, bad, reciprocal, inverse))


def scaled_to(
    wire: WireFormat,
    values: Tensor,
    divided: Tensor,
    bad: Tensor,
    reciprocal: Tensor,
    inverse: float,
) -> Tensor:
    """Return payloads in fp32 of values whose units have these reciprocals."""
    top = reciprocal * wire.limit
    scaled = (values * (reciprocal * inverse)).clamp(-top, top)
    if wire.is_integer:
        return torch.where(bad, -wire.top - 1.0, scaled.round())
    # Of one byte there is no inf: it would be 448.
    return torch.where(bad, divided if wire.payload is torch.float16 else math.nan, scaled)


def unit_of(wire: WireFormat, amax: Tensor, inverse: float) -> Tensor:
    """Return each block's unit, exact in bfloat16; overwrites ``amax``, and clamps to it.

    Neither it nor ``inverse / unit`` is ever subnormal or inf, whatever the block holds.
    """
    lowest = least_unit(1 / inverse) << EXPONENT_BITS
    if wire.is_integer:
        bits = amax.mul_(1 / wire.top).view(torch.int32)
        # Upwards, so that no payload is above top.
        bits = bits.add_(~BFLOAT16_MASK).bitwise_and_(BFLOAT16_MASK)
    else:
        # The power of two by which amax lies in [top / 2, top).
        shift = wire.top.bit_length() - 2
        bits = amax.view(torch.int32).bitwise_and_(EXPONENT_MASK).sub_(shift << EXPONENT_BITS)
    return bits.clamp_(min=lowest).view(torch.float32)


def read_blocks(wire: WireFormat, header: Tensor, payload: Tensor, out: Tensor) -> Tensor:
    """Write decoded blocks, (..., 256), to ``out``, fp32, and return it."""
    unit = header.to(torch.float32)
    read_payload(wire, payload, out)
    out.mul_(unit.abs().unsqueeze(-1))
    if wire.is_integer and (not on_host(out) or bool((unit < 0).any())):
        out.masked_fill_((unit < 0).unsqueeze(-1) & (payload == -wire.top - 1), math.nan)
    return out


def read_lanes(wire: WireFormat, unit: Tensor, payload: Tensor) -> Tensor:
    """Return decoded elements whose units are given one by one, fp32."""
    out = torch.empty_like(unit)
    read_payload(wire, payload, out)
    out.mul_(unit.abs())
    if wire.is_integer:
        out.masked_fill_((unit < 0) & (payload == -wire.top - 1), math.nan)
    return out


def read_payload(wire: WireFormat, payload: Tensor, out: Tensor) -> None:
    """Write payloads to ``out``, fp32, as they are."""
    if wire.payload is torch.float8_e4m3fn and on_host(out):
        _read_float8(payload, out)
    else:
        out.copy_(payload)


def _read_float8(payload: Tensor, out: Tensor) -> None:
    """Write float8_e4m3fn to fp32; torch's own cast takes ten times as long on a CPU.

    Shifted by its missing mantissa bits it is a half, less 2^8 for the exponents' biases, except
    for its NaN, which is 480 then.
    """
    bits = payload.view(torch.int8).to(torch.int16)
    bits = bits.bitwise_left_shift_(7).bitwise_and_(-0x4080)
    out.copy_(bits.view(torch.float16)).mul_(256.0)
    if max(out.amax(), -out.amin()) > 448:
        out.masked_fill_(out.abs() > 448, math.nan)
