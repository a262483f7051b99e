"""Block formats: a unit for each block of elements, and payloads in multiples of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from distamp.comm_hooks.wire_base import (
    EXPONENT_BITS,
    PIECE,
    WireFormat,
    exponent_field,
    on_host,
)

__all__ = ["BlockFormat"]

BLOCK = 256
EXPONENT_BIAS = 127
FP32_MAX = torch.finfo(torch.float32).max
EXPONENT_MASK = 0xFF << EXPONENT_BITS
BFLOAT16_MASK = -1 << 16


@dataclass(frozen=True)
class BlockFormat(WireFormat):
    """Two bytes of header, the block's unit as a bfloat16, then the payload in those units.

    The sign of the unit says that an element of the block is inf or NaN.

    Args:
        top: For floating payloads, whose units are powers of two, a power of two that every
            payload is below; for integers the largest payload. One less than ``-top`` is NaN.
    """

    block: int = BLOCK
    header_bytes: int = 2
    top: int = 0

    def has_nonfinite(self, wire: torch.Tensor, *, terms: int = 1) -> torch.Tensor:
        """Return whether an element is inf or NaN, 0-d bool; reads the headers alone.

        ``terms`` is as for every format, but by powers of two: up to twice too careful.
        """
        header, _ = self._parts(wire)
        found = header.signbit()
        if terms > 1:
            found = found | (header > FP32_MAX / (terms * self.top))
        return found.any()

    def largest_exponent(self, wire: torch.Tensor) -> torch.Tensor:
        """Return floor(log2) of the largest finite magnitude, 0-d int32; reads headers alone."""
        header, _ = self._parts(wire)
        if header.numel() == 0:
            return torch.full((), -EXPONENT_BIAS, dtype=torch.int32, device=wire.device)
        largest = self.top if self._is_integer else self.top / 2
        unit = header.abs().amax().to(torch.float32)
        return exponent_field(unit.mul_(largest)) - EXPONENT_BIAS

    @property
    def _is_integer(self) -> bool:
        return not self.payload.is_floating_point

    @property
    def _limit(self) -> float:
        """Finite magnitudes above this are written as this, lest they read back as inf."""
        step = 1 / self.top if self._is_integer else torch.finfo(self.payload).eps / 2
        return FP32_MAX * (1 - step)

    def _parts(self, wire: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Headers as bfloat16 (blocks,) and payload (blocks, block), both views of the wire."""
        blocks = wire.view(-1, self.block_bytes)
        header = blocks[:, : self.header_bytes].view(torch.bfloat16).squeeze(1)
        return header, blocks[:, self.header_bytes :].view(self.payload)

    # -- writing ------------------------------------------------------------------------------

    def _encode(self, values: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
        header, payload = self._parts(out)
        whole = values.numel() // self.block
        rows = values[: whole * self.block].view(-1, self.block)
        # No value is looked at on a device, which need not be waited for, nor while compiling.
        write = self._write_rows if on_host(values) else self._write_any_rows
        if whole:
            write(rows, 1 / divisor, header[:whole], payload[:whole])
        if whole * self.block < values.numel():
            tail = values.new_zeros((1, self.block))
            tail[0, : values.numel() - whole * self.block] = values[whole * self.block :]
            write(tail, 1 / divisor, header[whole:], payload[whole:])

    def _write_rows(
        self, rows: torch.Tensor, inverse: float, header: torch.Tensor, payload: torch.Tensor
    ) -> None:
        """Write ``rows * inverse``, a block each, going through the cache piece by piece."""
        amax = self._amax(rows, inverse)
        ordinary = bool(amax.amax() <= self._limit)
        step = PIECE // self.block
        if not ordinary:
            parts = (rows.split(step), header.split(step), payload.split(step))
            for row, head, load in zip(*parts, strict=True):
                self._write_any_rows(row, inverse, head, load)
            return
        unit = self._unit(amax, inverse)
        header.copy_(unit)
        multiplier = unit.reciprocal_().mul_(inverse).unsqueeze(1)
        memory = torch.empty((min(step, len(rows)), self.block))
        parts = (rows.split(step), multiplier.split(step), payload.split(step))
        for row, factor, load in zip(*parts, strict=True):
            scaled = memory[: len(row)]
            if row.dtype == torch.float32:
                torch.mul(row, factor, out=scaled)
            else:
                scaled.copy_(row).mul_(factor)
            load.copy_(scaled.round_() if self._is_integer else scaled)

    def _amax(self, rows: torch.Tensor, inverse: float) -> torch.Tensor:
        """The largest magnitude of each row times ``inverse``, fp32; inf or NaN if it holds one."""
        highest, lowest = [], []
        for row in rows.split(PIECE // self.block):
            highest.append(torch.amax(row, 1))
            lowest.append(torch.amin(row, 1))
        amax = torch.maximum(torch.cat(highest), torch.cat(lowest).neg_()).to(torch.float32)
        return amax.mul_(inverse) if inverse != 1 else amax

    def _write_any_rows(
        self, rows: torch.Tensor, inverse: float, header: torch.Tensor, payload: torch.Tensor
    ) -> None:
        """The same for rows that may hold inf, NaN or finite values that round to inf."""
        rows = rows.to(torch.float32)
        if inverse != 1:
            rows = rows * inverse  # overflows where fp32 would
        bad = ~torch.isfinite(rows)
        magnitude = torch.where(bad, 0.0, rows.abs()).clamp(max=self._limit)
        unit = self._unit(magnitude.amax(1), 1.0)
        header.copy_(torch.where(bad.any(1), -unit, unit))
        scaled = torch.copysign(magnitude, rows) * unit.reciprocal().unsqueeze(1)
        if self._is_integer:
            scaled = torch.where(bad, -self.top - 1.0, scaled.round())
        elif self.payload == torch.float16:
            scaled = torch.where(bad, rows, scaled)
        else:
            scaled = torch.where(bad, math.nan, scaled)  # there is no inf: it would be 448
        payload.copy_(scaled)

    def _unit(self, amax: torch.Tensor, inverse: float) -> torch.Tensor:
        """Each block's unit, exact in bfloat16; overwrites ``amax``.

        Neither it nor ``inverse / unit`` is ever subnormal or inf, whatever the block holds.
        """
        lowest = (1 + max(0, math.ceil(math.log2(inverse)))) << EXPONENT_BITS
        if self._is_integer:
            bits = amax.mul_(1 / self.top).view(torch.int32)
            # Upwards, so that no payload is above top.
            bits = bits.add_(~BFLOAT16_MASK).bitwise_and_(BFLOAT16_MASK)
        else:
            # The power of two by which amax lies in [top / 2, top).
            shift = self.top.bit_length() - 2
            bits = amax.view(torch.int32).bitwise_and_(EXPONENT_MASK).sub_(shift << EXPONENT_BITS)
        return bits.clamp_(min=lowest).view(torch.float32)

    # -- reading ------------------------------------------------------------------------------

    def _decode(self, wire: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        header, payload = self._parts(wire)
        unit = header.to(torch.float32)
        whole = out.numel() // self.block
        rows = out[: whole * self.block].view(-1, self.block)
        step = PIECE // self.block if on_host(out) else max(whole, 1)
        direct = out.dtype == torch.float32 and not add
        memory = None if direct else torch.empty((min(step, whole), self.block), device=out.device)
        parts = (unit[:whole].split(step), payload[:whole].split(step), rows.split(step))
        # An empty tensor splits into one empty part.
        for units, load, target in zip(*parts, strict=True) if whole else ():
            if memory is None:
                self._read_rows(units, load, target)
            elif add:
                self._add_rows(units, load, target, memory[: len(target)])
            else:
                target.copy_(self._read_rows(units, load, memory[: len(target)]))
        if whole * self.block < out.numel():
            row = torch.empty((1, self.block), device=out.device)
            self._read_rows(unit[whole:], payload[whole:], row)
            tail = out[whole * self.block :]
            if add:
                tail.add_(row[0, : tail.numel()])
            else:
                tail.copy_(row[0, : tail.numel()])

    def _read_rows(
        self, unit: torch.Tensor, payload: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Write the decoded blocks to ``rows``, fp32, and return it."""
        self._read_payload(payload, rows)
        rows.mul_(unit.abs().unsqueeze(1))
        if self._is_integer and (not on_host(rows) or bool((unit < 0).any())):
            marked = (unit < 0).unsqueeze(1) & (payload == -self.top - 1)
            rows.masked_fill_(marked, math.nan)
        return rows

    def _add_rows(
        self,
        unit: torch.Tensor,
        payload: torch.Tensor,
        total: torch.Tensor,
        memory: torch.Tensor,
    ) -> None:
        """Add the decoded blocks to ``total``, by way of ``memory``, both fp32."""
        if on_host(total) and not bool((unit < 0).any()):
            # Products are exact, so that this is the same sum with a pass less.
            self._read_payload(payload, memory)
            total.addcmul_(memory, unit.unsqueeze(1))
        else:
            total.add_(self._read_rows(unit, payload, memory))

    def _read_payload(self, payload: torch.Tensor, rows: torch.Tensor) -> None:
        if self.payload == torch.float8_e4m3fn and on_host(rows):
            _read_float8(payload, rows)
        else:
            rows.copy_(payload)


def _read_float8(payload: torch.Tensor, rows: torch.Tensor) -> None:
    """Write float8_e4m3fn to fp32 rows; torch's own cast takes ten times as long on a CPU.

    Shifted by its missing mantissa bits it is a half, less 2^8 for the exponents' biases, except
    for its NaN, which is 480 then.
    """
    bits = payload.view(torch.int8).to(torch.int16)
    bits = bits.bitwise_left_shift_(7).bitwise_and_(-0x4080)
    rows.copy_(bits.view(torch.float16)).mul_(256.0)
    if max(rows.amax(), -rows.amin()) > 448:
        rows.masked_fill_(rows.abs() > 448, math.nan)
