"""The wire: how gradients are written as bytes and read back. Pure functions of tensors.

A wire is a 1-D uint8 tensor. The block formats write ``block`` elements at a time: two bytes of
header, the block's unit as a bfloat16 (its sign bit says that an element of the block is inf or
NaN), then the payload in multiples of that unit. Blocks stand alone, so a wire may be cut at any
whole block, and bytes of zero read as zeros.

======== ===== ======================== ==================================================
name     bytes header                   inf, NaN
======== ===== ======================== ==================================================
fp16_plain   2 none                     as torch casts them; magnitudes beyond 65504 too
bf16         2 none                     kept
fp16         2 a power of two           kept, each in its place
int16        2 amax / 32767             NaN, each in its place
int8         1 amax / 127               NaN, each in its place
fp8_e4m3     1 a power of two           NaN, each in its place
======== ===== ======================== ==================================================

The other elements of a block that holds inf or NaN are written as if those were zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

__all__ = ["WIRE_FORMATS", "WireFormat", "wire_format"]

BLOCK = 256
HEADER_BYTES = 2
# Elements worked on at a time on a CPU, so that every pass after the first finds them in the cache.
PIECE = 1 << 17
FP32_MAX = torch.finfo(torch.float32).max
EXPONENT_BITS = 23
EXPONENT_BIAS = 127


@dataclass(frozen=True)
class WireFormat:
    """How gradients travel: the bytes of one format, written and read.

    Args:
        name: What ``wire_format`` and ``register`` call it.
        payload: dtype of an element on the wire.
        block: Elements that share a header; 1 where there is none.
        needs_error_feedback: Whether its error is too large to be dropped at every step.
    """

    name: str
    payload: torch.dtype
    block: int = 1
    needs_error_feedback: bool = False

    def nbytes(self, numel: int) -> int:
        """Return the length of the wire of ``numel`` elements: whole blocks, headers included."""
        return -(-numel // self.block) * self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, header included: a wire may be cut at multiples of this."""
        return self.block * self.payload.itemsize + (HEADER_BYTES if self.block > 1 else 0)

    def part_numel(self, numel: int, parts: int) -> int:
        """Return the elements of each of ``parts`` equal parts, in whole blocks, that hold numel.

        The last parts may reach beyond ``numel``, or lie beyond it.
        """
        blocks = -(-numel // self.block)
        return -(-blocks // parts) * self.block

    def encode(
        self, values: torch.Tensor, out: torch.Tensor | None = None, *, divisor: float = 1.0
    ) -> torch.Tensor:
        """Return the wire of ``values / divisor``, the division made in fp32 before the cast.

        Args:
            values: 1-D, contiguous, of any floating dtype; float64 passes through fp32.
            out: uint8 tensor of exactly ``nbytes(values.numel())`` bytes to write to.
            divisor: A positive number, such as the world size.

        Returns:
            ``out``, or a new tensor.

        Raises:
            ValueError: a tensor of another shape or dtype than described.
        """
        _check_values(values)
        if not (0 < divisor < math.inf):
            raise ValueError(f"divisor is {divisor}: it must be a positive finite number")
        if out is None:
            out = torch.empty(self.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
        self._check_wire(out, values.numel())
        self._encode(values, out, divisor)
        return out

    def decode(
        self, wire: torch.Tensor, numel: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the ``numel`` values of a wire in fp32, or in the dtype of ``out``.

        Args:
            wire: What ``encode`` returned.
            numel: How many values it holds.
            out: 1-D contiguous floating tensor of ``numel`` elements to write to.

        Returns:
            ``out``, or a new tensor.
        """
        if out is None:
            out = torch.empty(numel, dtype=torch.float32, device=wire.device)
        self._check_read(wire, numel, out)
        self._decode(wire, out)
        return out

    def add_decoded(self, wire: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add the ``out.numel()`` values of a wire to ``out``, in fp32.

        Args:
            wire: What ``encode`` returned.
            out: 1-D contiguous fp32 tensor.

        Returns:
            ``out``.
        """
        self._check_read(wire, out.numel(), out)
        if out.dtype != torch.float32:
            raise ValueError(f"the sum is {out.dtype}: it must be torch.float32")
        self._add_decoded(wire, out)
        return out

    def has_nonfinite(self, wire: torch.Tensor) -> torch.Tensor:
        """Return whether an element is inf or NaN, 0-d bool; reads the headers where there are."""
        raise NotImplementedError

    def largest_exponent(self, wire: torch.Tensor) -> torch.Tensor:
        """Return floor(log2) of the largest finite magnitude, 0-d int32; -126 or less for zeros.

        The integer formats keep the unit alone, which makes it one too many at times.
        """
        raise NotImplementedError

    def _encode(self, values: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
        raise NotImplementedError

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError

    def _add_decoded(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError

    def _check_wire(self, wire: torch.Tensor, numel: int) -> None:
        if wire.dtype != torch.uint8 or wire.shape != (self.nbytes(numel),):
            raise ValueError(
                f"a {self.name} wire of {numel} elements is a uint8 tensor of shape "
                f"({self.nbytes(numel)},), not {wire.dtype} of shape {tuple(wire.shape)}"
            )

    def _check_read(self, wire: torch.Tensor, numel: int, out: torch.Tensor) -> None:
        self._check_wire(wire, numel)
        _check_values(out)
        if out.numel() != numel:
            raise ValueError(f"out holds {out.numel()} elements, the wire {numel}")


def _check_values(values: torch.Tensor) -> None:
    if values.dim() != 1 or not values.is_floating_point() or not values.is_contiguous():
        raise ValueError(
            f"values are {values.dtype} of shape {tuple(values.shape)}: they must be a contiguous "
            "1-D floating tensor, such as a bucket's buffer or tensor.view(-1)"
        )


@dataclass(frozen=True)
class _Plain(WireFormat):
    """One cast per element, no header."""

    def has_nonfinite(self, wire: torch.Tensor) -> torch.Tensor:
        values = wire.view(self.payload)
        if values.numel() == 0:
            return torch.zeros((), dtype=torch.bool, device=wire.device)
        # NaN wins both reductions.
        return ~torch.isfinite(torch.amax(values)) | ~torch.isfinite(torch.amin(values))

    def largest_exponent(self, wire: torch.Tensor) -> torch.Tensor:
        values = wire.view(self.payload).float().abs()
        largest = torch.where(values.isfinite(), values, 0).amax()
        return _exponent_field(largest) - EXPONENT_BIAS

    def _encode(self, values: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
        payload = out.view(self.payload)
        if divisor == 1:
            payload.copy_(values)
        elif self.payload == torch.float16:
            # torch's fp16_compress_hook to the bit: it casts, then divides in fp16.
            payload.copy_(values).div_(divisor)
        else:
            for start, piece in _pieces(values):
                payload[start : start + piece.numel()] = piece.float() / divisor

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(wire.view(self.payload))

    def _add_decoded(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        out.add_(wire.view(self.payload))


@dataclass(frozen=True)
class _Blocks(WireFormat):
    """A unit for each block, and payloads in multiples of it.

    Args:
        top: The largest payload magnitude: a power of two for the floating payloads, whose units
            are powers of two; for integers the largest integer.
    """

    block: int = BLOCK
    top: int = 0

    def has_nonfinite(self, wire: torch.Tensor) -> torch.Tensor:
        header, _ = self._parts(wire)
        return (header < 0).any()

    def largest_exponent(self, wire: torch.Tensor) -> torch.Tensor:
        header, _ = self._parts(wire)
        unit = (header & 0x7FFF).amax().to(torch.int32) << 16
        largest = self.top if self._is_integer else self.top / 2
        return _exponent_field(unit.view(torch.float32) * largest) - EXPONENT_BIAS

    @property
    def _is_integer(self) -> bool:
        return not self.payload.is_floating_point

    def _parts(self, wire: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Headers as int16 (blocks,) and payload (blocks, block), both views of the wire."""
        rows = wire.view(-1, self.block_bytes)
        header = rows[:, :HEADER_BYTES].view(torch.int16).squeeze(1)
        return header, rows[:, HEADER_BYTES:].view(self.payload)

    def _encode(self, values: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
        header, payload = self._parts(out)
        for start, rows in _row_pieces(values, self.block):
            end = start + rows.shape[0]
            self._encode_rows(rows, divisor, header[start:end], payload[start:end])

    def _encode_rows(
        self, rows: torch.Tensor, divisor: float, header: torch.Tensor, payload: torch.Tensor
    ) -> None:
        """Encode fp32 rows, one block each."""
        inverse = 1.0 / divisor
        amax = torch.maximum(torch.amax(rows, 1), torch.amin(rows, 1).neg_())
        if inverse != 1:
            amax.mul_(inverse)
        # A host may look; a device must not be waited for, so it takes the road for all values.
        ordinary = rows.device.type == "cpu" and bool(amax.amax() < self._limit)
        bad = None
        if not ordinary:
            rows = rows * inverse
            inverse = 1.0
            bad = ~torch.isfinite(rows)
            magnitude = torch.where(bad, 0.0, rows.abs()).clamp_(max=self._limit)
            amax = magnitude.amax(1)
            rows = torch.where(bad, rows, torch.copysign(magnitude, rows))
        unit, multiplier = self._units(amax, inverse)
        head = unit.view(torch.int32) >> 16
        if bad is not None:
            head |= bad.any(1).to(torch.int32) << 15  # int16's sign; the copy keeps the low bits
        header.copy_(head)
        scaled = rows * multiplier.unsqueeze(1)
        if self._is_integer:
            if bad is not None:
                scaled = torch.where(bad, -self.top - 1.0, scaled)
            scaled.round_()
        elif bad is not None and self.payload == torch.float8_e4m3fn:
            scaled = torch.where(bad, math.nan, scaled)  # the cast would make inf its largest value
        payload.copy_(scaled)

    def _units(self, amax: torch.Tensor, inverse: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Each block's unit, exact in bfloat16, and what to multiply its elements by.

        Neither is ever subnormal nor infinite, whatever the block holds.
        """
        lowest = EXPONENT_BIAS - 126 + max(0, math.ceil(math.log2(inverse)))
        if self._is_integer:
            bits = amax.mul(1.0 / self.top).view(torch.int32)
            bits = (bits + 0xFFFF) & -0x10000  # upwards, so that no payload is above top
            unit = bits.clamp_(min=lowest << EXPONENT_BITS).view(torch.float32)
            return unit, inverse / unit
        # amax in [top / 2, top) units.
        shift = self.top.bit_length() - 2
        exponent = (_exponent_field(amax) - shift).clamp_(min=lowest)
        unit = (exponent << EXPONENT_BITS).view(torch.float32)
        inverted = (2 * EXPONENT_BIAS - exponent) << EXPONENT_BITS
        return unit, inverted.view(torch.float32).mul_(inverse)

    @property
    def _limit(self) -> float:
        """Magnitudes from here on are written as this one, lest they read back as inf."""
        step = 1 / self.top if self._is_integer else torch.finfo(self.payload).eps / 2
        return FP32_MAX * (1 - step)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        header, payload = self._parts(wire)
        numel = out.numel()
        step = PIECE // self.block if wire.device.type == "cpu" else max(1, header.numel())
        for start in range(0, header.numel(), step):
            rows = self._rows(header[start : start + step], payload[start : start + step])
            first = start * self.block
            last = min(first + rows.numel(), numel)
            out[first:last] = rows.view(-1)[: last - first]

    def _rows(self, header: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        """Decoded blocks, fp32."""
        unit = ((header.to(torch.int32) & 0x7FFF) << 16).view(torch.float32)
        rows = payload.to(torch.float32).mul_(unit.unsqueeze(1))
        if self._is_integer and (rows.device.type != "cpu" or bool((header < 0).any())):
            flagged = (header < 0).unsqueeze(1) & (payload == -self.top - 1)
            rows.masked_fill_(flagged, math.nan)
        return rows

    def _add_decoded(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        header, payload = self._parts(wire)
        numel = out.numel()
        step = PIECE // self.block if wire.device.type == "cpu" else max(1, header.numel())
        for start in range(0, header.numel(), step):
            rows = self._rows(header[start : start + step], payload[start : start + step])
            first = start * self.block
            last = min(first + rows.numel(), numel)
            out[first:last] += rows.view(-1)[: last - first]


def _exponent_field(values: torch.Tensor) -> torch.Tensor:
    """The biased exponents of non-negative fp32 values."""
    return values.view(torch.int32) >> EXPONENT_BITS


def _pieces(values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    step = PIECE if values.device.type == "cpu" else max(1, values.numel())
    for start in range(0, values.numel(), step):
        yield start, values[start : start + step]


def _row_pieces(values: torch.Tensor, block: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first block, fp32 blocks as rows); the last block filled up with zeros."""
    whole = values.numel() // block * block
    for start, piece in _pieces(values[:whole]):
        yield start // block, piece.to(torch.float32).view(-1, block)
    if whole < values.numel():
        tail = values.new_zeros(block, dtype=torch.float32)
        tail[: values.numel() - whole] = values[whole:]
        yield whole // block, tail.view(1, block)


WIRE_FORMATS: Mapping[str, WireFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            _Plain("fp16_plain", torch.float16),
            _Plain("bf16", torch.bfloat16),
            _Blocks("fp16", torch.float16, top=1 << 15),
            _Blocks("int16", torch.int16, top=(1 << 15) - 1),
            _Blocks("int8", torch.int8, top=(1 << 7) - 1, needs_error_feedback=True),
            _Blocks("fp8_e4m3", torch.float8_e4m3fn, top=1 << 8, needs_error_feedback=True),
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
