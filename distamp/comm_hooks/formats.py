"""The wire formats, and their arithmetic in torch's ops, which run on every device.

A row of a message has whole blocks of 256 elements. `fp16` and `int8` send first the unit of every
block, as a bfloat16, then the elements in multiples of their block's unit; `bf16` sends elements
alone.

======  ==============  =====================================================
name    unit            inf and NaN
======  ==============  =====================================================
fp16    power of two    as they are; the block's others as if these were 0
bf16    none            as they are
int8    amax / 127      the whole block is NaN
======  ==============  =====================================================

Units are at least 2^-126, the smallest normal fp32, and no finite value is read back as inf by fp16
and int8. Elements are multiplied by the inverse of the divisor, added up and rounded in fp32, each
operation by itself, so that all devices come to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BLOCK",
    "COMM_FORMATS",
    "CommFormat",
    "Feedback",
    "Places",
    "Source",
    "as_it_is",
    "checked_format",
    "comm_format",
    "decode",
    "encode",
    "sum_encode",
    "sum_rows",
]

BLOCK = 256
FP32_MAX = torch.finfo(torch.float32).max
EXPONENT = 0x7F800000
LEAST_UNIT = 1 << 23
# Elements worked on at a time on a host: they fit a cache, and calls do not show.
PIECE = 1 << 19


@dataclass(frozen=True)
class CommFormat:
    """How gradients travel.

    Args:
        name: What `register` calls it.
        payload: dtype of an element on the wire.
        top: The largest payload of a format with units; 0 for a format without.
        limit: Finite magnitudes above are sent as this, lest they are read back as inf.
    """

    name: str
    payload: torch.dtype
    top: int = 0
    limit: float = FP32_MAX

    @property
    def encodes(self) -> bool:
        """Whether it is one of `COMM_FORMATS`; others stand for gradients as they are."""
        return self.name in COMM_FORMATS

    @property
    def needs_error_feedback(self) -> bool:
        """Whether its error is too large to be dropped at every step."""
        return self.payload is torch.int8

    @property
    def block_bytes(self) -> int:
        """Bytes of 256 elements."""
        return BLOCK * self.payload.itemsize + (2 if self.top else 0)

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether gradients of that dtype are fewer bytes on the wire."""
        return self.block_bytes < BLOCK * dtype.to_real().itemsize

    def payload_start(self, numel: int) -> int:
        """Return the byte at which the elements of a row begin; a multiple of 16."""
        return -(-numel // BLOCK * 2 // 16) * 16 if self.top else 0

    def row_bytes(self, numel: int) -> int:
        """Return the bytes of a row of ``numel`` elements, which are whole blocks."""
        return self.payload_start(numel) + numel * self.payload.itemsize

    def views(self, rows: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return units, bfloat16 (rows, blocks), and payloads (rows, blocks, 256), of uint8 rows.

        Of a format without units the first is empty.
        """
        start, blocks = self.payload_start(numel), numel // BLOCK
        units = rows[:, : 2 * blocks if self.top else 0].view(torch.bfloat16)
        payload = rows[:, start : start + numel * self.payload.itemsize].view(self.payload)
        return units, payload.unflatten(1, (blocks, BLOCK))


COMM_FORMATS: Mapping[str, CommFormat] = MappingProxyType(
    {
        "fp16": CommFormat("fp16", torch.float16, 1 << 15, FP32_MAX * (1 - 2.0**-11)),
        "bf16": CommFormat("bf16", torch.bfloat16),
        "int8": CommFormat("int8", torch.int8, 127, FP32_MAX * (1 - 1 / 127)),
    }
)


def as_it_is(dtype: torch.dtype) -> CommFormat:
    """Return what stands for gradients that are sent in their own dtype."""
    return CommFormat("fp32" if dtype is torch.float32 else str(dtype)[6:], dtype)


def comm_format(name: str) -> CommFormat:
    """Return the format of that name.

    Raises:
        ValueError: There is none; the message names the choices.
    """
    if name not in COMM_FORMATS:
        raise ValueError(
            f"There is no communication format {name!r}. Choose one of {', '.join(COMM_FORMATS)}."
        )
    return COMM_FORMATS[name]


def checked_format(wire: str | CommFormat) -> CommFormat:
    """Return a format that this library can encode, or one that stands for uncompressed gradients.

    Raises:
        ValueError: There is no arithmetic for the format.
    """
    if not isinstance(wire, CommFormat):
        return comm_format(wire)
    if wire in (*COMM_FORMATS.values(), as_it_is(wire.payload)):
        return wire
    raise ValueError(
        f"{wire} is not one of COMM_FORMATS, and the library has no arithmetic to encode it. Give "
        f"the name of a format: {', '.join(COMM_FORMATS)}"
    )


class Places:
    """Where encoded elements lie in a flat tensor: the same pattern once for each offset.

    Args:
        numel: Encoded elements of one pattern, whole blocks. What no run has are zeros.
        runs: (first element of the pattern, first in the tensor, length) of what is contiguous in
            both; each begins with a block.
        offsets: Where in the tensor each pattern begins.
    """

    def __init__(
        self, numel: int, runs: Sequence[tuple[int, int, int]], offsets: Sequence[int] = (0,)
    ) -> None:
        self._pattern, self.runs, self.offsets = numel, runs, offsets
        self.numel = numel * len(offsets)

    def inside(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield what of the encoded elements ``first`` to ``stop`` there is, as in ``runs``."""
        for index in range(first // self._pattern, -(-stop // self._pattern)):
            before = index * self._pattern
            for begin, flat, length in self.runs:
                start, end = max(first - before, begin), min(stop - before, begin + length)
                if start < end:
                    at = self.offsets[index] + flat + start - begin
                    yield before + start, at, end - start


class Source(NamedTuple):
    """What the ranks of this host give: the sum of all, each times the inverse of the divisor.

    Args:
        values: 1-D, of any floating dtype.
        others: (some, elements of ``values``): more of them, of the same dtype.
        places: Where the rows, one after another, lie in these.
        own: The row that this rank adds up. It is sent to nobody, so it is added as it is.
        inverse: The inverse of the divisor.
    """

    values: Tensor
    others: Tensor
    places: Places
    own: int
    inverse: float


class Feedback(NamedTuple):
    """The rounding error of an earlier exchange of the same elements, which this one replaces.

    Args:
        residual: fp32, an element for each of the rows; in unscaled units; written in place. The
            residual of a block of zeros waits: nobody would read what is sent of a parameter that
            was not used.
        written: bool, an element for each block; set to True where its residual is written.
        scale: fp32 (2,): the loss scale that the values were multiplied by, and its reciprocal.
    """

    residual: Tensor
    written: Tensor
    scale: Tensor

    def part(self, start: int, length: int) -> Feedback:
        """Return the feedback of some of the elements, which are whole blocks."""
        stop = start + length
        written = self.written[start // BLOCK : stop // BLOCK]
        return Feedback(self.residual[start:stop], written, self.scale)


def encode(wire: CommFormat, source: Source, out: Tensor, feedback: Feedback | None = None) -> None:
    """Write all rows of a source but its own.

    Args:
        wire: The format.
        source: What is written.
        out: uint8 (rows, bytes of a row).
        feedback: Of a format that needs it.
    """
    numel = source.places.numel // len(out)
    for row in range(len(out)):
        for start, stop, total, spare in _pieces(numel, out.device) if row != source.own else ():
            first = row * numel + start
            _load(source, first, total, spare)
            fed = feedback and feedback.part(first, stop - start)
            _write(wire, total, spare, _piece(wire, out[row], numel, start, stop), fed)


def sum_encode(
    wire: CommFormat,
    source: Source,
    given: Tensor,
    out: Tensor,
    feedback: Feedback | None = None,
) -> None:
    """Write the sum of a source's own row and of what the others sent of it.

    Args:
        wire: The format.
        source: This rank's part.
        given: uint8 (rows, bytes of a row), of which the source's own is not read.
        out: uint8 (1, bytes of a row).
        feedback: Of a format that needs it.
    """
    numel = source.places.numel // len(given)
    for start, stop, total, spare in _pieces(numel, out.device):
        _sum(wire, source, given, start, total, spare)
        fed = feedback and feedback.part(start, stop - start)
        _write(wire, total, spare, _piece(wire, out, numel, start, stop), fed)


def sum_rows(wire: CommFormat, source: Source, given: Tensor, out: Tensor) -> None:
    """Write the same sum as it is; rows are patterns, and lie in ``out``, 1-D, at no offset."""
    numel, offset = source.places.numel // len(given), source.places.offsets[source.own]
    row = source.own * numel
    for start, stop, total, spare in _pieces(numel, out.device):
        _sum(wire, source, given, start, total, spare)
        for begin, flat, length in source.places.inside(row + start, row + stop):
            out[flat - offset :][:length].copy_(total[begin - row - start :][:length])


def decode(wire: CommFormat, given: Tensor, places: Places, out: Tensor) -> None:
    """Write what rows, uint8 (rows, bytes of a row), say to where they lie in ``out``."""
    numel = places.numel // len(given)
    for row in range(len(given)):
        for start, stop, total, _ in _pieces(numel, out.device):
            _read(wire, _piece(wire, given[row], numel, start, stop), total)
            first = row * numel + start
            for begin, flat, length in places.inside(first, first + stop - start):
                out[flat : flat + length].copy_(total[begin - first :][:length])


def _pieces(numel: int, device: torch.device) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield pieces of a row: first element, end, and memory for its elements, twice.

    On a device there is one.
    """
    size = min(PIECE, numel) if device.type == "cpu" else numel
    memory = torch.empty(2, size, dtype=torch.float32, device=device)
    for start in range(0, numel, max(1, size)):
        stop = min(start + size, numel)
        yield start, stop, memory[0, : stop - start], memory[1, : stop - start]


def _piece(
    wire: CommFormat, row: Tensor, numel: int, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Return units (blocks) and payloads (blocks, 256) of a piece of a row."""
    units, payload = wire.views(row.view(1, -1), numel)
    return units[0, start // BLOCK : stop // BLOCK], payload[0, start // BLOCK : stop // BLOCK]


def _load(source: Source, first: int, total: Tensor, spare: Tensor) -> None:
    """Read elements of the rows, from ``first`` on."""
    runs = [*source.places.inside(first, first + total.numel())]
    if sum(length for _, _, length in runs) < total.numel():
        total.zero_()
    for begin, flat, length in runs:
        part = total[begin - first :][:length]
        part.copy_(source.values[flat : flat + length]).mul_(source.inverse)
        for other in source.others:
            beside = spare[:length].copy_(other[flat : flat + length])
            part.add_(beside.mul_(source.inverse))


def _sum(
    wire: CommFormat, source: Source, given: Tensor, start: int, total: Tensor, spare: Tensor
) -> None:
    """Add what others sent of a piece of the own row to it, the next rank's first."""
    rows, own = len(given), source.own
    numel = source.places.numel // rows
    _load(source, own * numel + start, total, spare)
    for turn in range(1, rows):
        row = given[(own + turn) % rows]
        _read(wire, _piece(wire, row, numel, start, start + total.numel()), spare)
        total.add_(spare)


def _read(wire: CommFormat, piece: tuple[Tensor, Tensor], out: Tensor) -> None:
    units, payload = piece
    out.view_as(payload).copy_(payload)
    if wire.top:
        out.view_as(payload).mul_(units.to(torch.float32).unsqueeze(1))


def _write(
    wire: CommFormat,
    total: Tensor,
    spare: Tensor,
    piece: tuple[Tensor, Tensor],
    feedback: Feedback | None,
) -> None:
    """Write values, which are overwritten, and what rounding took from them."""
    units, payload = piece
    blocks, idle = total.view(-1, BLOCK), None
    if feedback is not None:
        # On a host a look at each block's first element spares passes, too.
        if total.device.type != "cpu" or not bool(blocks[:, 0].all()):
            idle = ~blocks.any(1, keepdim=True)
        back = torch.mul(feedback.residual, feedback.scale[0], out=spare).view(-1, BLOCK)
        blocks.add_(back if idle is None else back.masked_fill_(idle, 0.0))
    if not wire.top:
        payload.copy_(blocks)
        return
    amax = torch.maximum(blocks.amax(1), blocks.amin(1).neg_())
    finite, bad = blocks, None
    # On a host a look at the blocks spares passes; a device is not waited for.
    if total.device.type != "cpu" or not bool((amax <= wire.limit).all()):
        bad = ~blocks.isfinite()
        finite = torch.where(bad, 0.0, blocks).clamp_(-wire.limit, wire.limit)
        amax = finite.abs().amax(1)
    unit = _units(wire, amax).unsqueeze(1)
    scaled = torch.mul(finite, unit.reciprocal(), out=spare.view(-1, BLOCK))
    if wire.payload is torch.int8:
        scaled.round_()
        if bad is not None:
            spoilt = bad.any(1, keepdim=True)
            unit = torch.where(spoilt, math.nan, unit)
            scaled.masked_fill_(spoilt, 0.0)
    elif bad is not None:
        scaled = torch.where(bad, blocks, scaled)
    units.copy_(unit.squeeze(1))
    payload.copy_(scaled)
    if feedback is not None:
        left = blocks.sub_(scaled.mul_(unit)).mul_(feedback.scale[1])
        if bad is not None:
            # A block that is not finite leaves nothing for later exchanges.
            left.nan_to_num_(0.0, 0.0, 0.0)
        kept = feedback.residual.view(-1, BLOCK)
        if idle is None:
            kept.copy_(left)
            feedback.written.fill_(True)
        else:
            kept.copy_(torch.where(idle, kept, left))
            feedback.written.logical_or_(idle.squeeze(1).logical_not_())


def _units(wire: CommFormat, amax: Tensor) -> Tensor:
    """Return units, fp32 but exact in bfloat16."""
    if wire.payload is torch.int8:
        # Upwards to a bfloat16, so that no payload is above top.
        bits = (amax * (1 / wire.top)).view(torch.int32) + 0xFFFF & -0x10000
    else:
        # The power of two by which amax lies in [top / 2, top).
        bits = (amax.view(torch.int32) & EXPONENT) - (14 << 23)
    return bits.clamp(min=LEAST_UNIT).view(torch.float32)
