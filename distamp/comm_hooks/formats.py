"""The wire formats, and their arithmetic in torch's ops: the reference of the kernels.

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
operation by itself, so that kernels can do the same to the bit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BLOCK",
    "WIRE_FORMATS",
    "Feedback",
    "Places",
    "WireFormat",
    "decode",
    "encode",
    "sum_encode",
    "sum_rows",
    "wire_format",
]

BLOCK = 256
FP32_MAX = torch.finfo(torch.float32).max
EXPONENT = 0x7F800000
LEAST_UNIT = 1 << 23
# Elements worked on at a time on a host: they fit a cache, and calls do not show.
PIECE = 1 << 19


@dataclass(frozen=True)
class WireFormat:
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
    def needs_error_feedback(self) -> bool:
        """Whether its error is too large to be dropped at every step."""
        return self.payload is torch.int8

    @property
    def block_bytes(self) -> int:
        """Bytes of 256 elements."""
        return BLOCK * self.payload.itemsize + (2 if self.top else 0)

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


WIRE_FORMATS: Mapping[str, WireFormat] = MappingProxyType(
    {
        "fp16": WireFormat("fp16", torch.float16, 1 << 15, FP32_MAX * (1 - 2.0**-11)),
        "bf16": WireFormat("bf16", torch.bfloat16),
        "int8": WireFormat("int8", torch.int8, 127, FP32_MAX * (1 - 1 / 127)),
    }
)
_GONE = {
    "int16": "use 'fp16', which takes the same bytes",
    "fp8_e4m3": "use 'int8', which takes the same bytes with less error",
    "fp16_plain": "use 'fp16', or torch's own fp16_compress_hook",
}


def wire_format(name: str) -> WireFormat:
    """Return the format of that name.

    Raises:
        ValueError: There is none; the message names the choices.
    """
    if name in _GONE:
        raise ValueError(f"the wire format {name!r} is gone: {_GONE[name]}")
    if name not in WIRE_FORMATS:
        raise ValueError(f"unknown wire format {name!r}: choose one of {', '.join(WIRE_FORMATS)}")
    return WIRE_FORMATS[name]


class Places:
    """Where the elements of rows lie in a flat tensor; the rest of each row is zeros.

    Args:
        rows: How many rows.
        numel: Elements of a row, whole blocks.
        runs: (first element in the rows, first element in the tensor, length) of what is contiguous
            in both, ascending; each begins with a block.
    """

    def __init__(self, rows: int, numel: int, runs: Sequence[tuple[int, int, int]]) -> None:
        self.rows, self.numel = rows, numel
        self.runs = [run for run in runs if run[2]]
        self._begins = [run[0] for run in self.runs]
        self._tables: dict[torch.device, Tensor] = {}

    def inside(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield what of the rows' elements ``first`` to ``stop`` there is, as in ``runs``."""
        for begin, flat, length in self.runs[max(0, bisect_right(self._begins, first) - 1) :]:
            if begin >= stop:
                return
            skipped = max(0, first - begin)
            taken = min(begin + length, stop) - begin - skipped
            if taken > 0:
                yield begin + skipped, flat + skipped, taken

    def table(self, device: torch.device) -> Tensor:
        """Return, of every block, its first element in the tensor times 512 plus its length."""
        if device not in self._tables:
            table = torch.zeros(self.rows * self.numel // BLOCK, dtype=torch.int64, device="cpu")
            for begin, flat, length in self.runs:
                blocks = -(-length // BLOCK)
                firsts = torch.arange(blocks, dtype=torch.int64, device="cpu") * BLOCK
                lengths = (length - firsts).clamp_(max=BLOCK)
                table[begin // BLOCK : begin // BLOCK + blocks] = (flat + firsts) * 512 + lengths
            self._tables[device] = table.to(device)
        return self._tables[device]


class Feedback(NamedTuple):
    """What rounding took from the same elements before, and is to take now.

    Args:
        residual: fp32, an element for each of the rows; in unscaled units; written in place.
        scale: fp32 (2,): the loss scale that the values were multiplied by, and its reciprocal.
    """

    residual: Tensor
    scale: Tensor


def encode(
    wire: WireFormat,
    values: Tensor,
    others: Tensor,
    places: Places,
    out: Tensor,
    inverse: float,
    feedback: Feedback | None = None,
) -> None:
    """Write rows of the sum of ``values`` and ``others``, each times ``inverse``.

    Args:
        wire: The format.
        values: 1-D, of any floating dtype.
        others: (some, elements of ``values``): more of them, of the same dtype.
        places: Where the rows lie in these.
        out: uint8 (rows, bytes of a row).
        inverse: The inverse of the divisor.
        feedback: Of a format that needs it.
    """
    views = wire.views(out, places.numel)
    for piece, first, stop, total, spare in _pieces(places.rows, places.numel, values.device):
        if sum(length for *_, length in places.inside(first, stop)) < stop - first:
            total.zero_()
        for begin, flat, length in places.inside(first, stop):
            part = total[begin - first : begin - first + length]
            part.copy_(values[flat : flat + length]).mul_(inverse)
            for other in others:
                beside = spare[:length].copy_(other[flat : flat + length])
                part.add_(beside.mul_(inverse))
        _write(wire, total, spare, views, piece, _at(feedback, first, stop))


def sum_encode(
    wire: WireFormat, given: Tensor, numel: int, out: Tensor, feedback: Feedback | None = None
) -> None:
    """Write the row of the sum of given rows, added up in their order; arguments as of `encode`."""
    views = wire.views(out, numel)
    for piece, first, stop, total, spare in _pieces(1, numel, given.device):
        _sum(wire, given, numel, piece, total, spare)
        _write(wire, total, spare, views, piece, _at(feedback, first, stop))


def sum_rows(wire: WireFormat, given: Tensor, places: Places, out: Tensor) -> None:
    """Write the sum of given rows, added up in their order, to where ``places`` has one row."""
    for piece, first, stop, total, spare in _pieces(1, places.numel, given.device):
        _sum(wire, given, places.numel, piece, total, spare)
        _put(places, first, stop, total, out)


def decode(wire: WireFormat, given: Tensor, places: Places, out: Tensor) -> None:
    """Write what rows say to where they lie in ``out``."""
    views = wire.views(given, places.numel)
    for piece, first, stop, total, _ in _pieces(places.rows, places.numel, given.device):
        _read(wire, views, piece, total)
        _put(places, first, stop, total, out)


_Piece = tuple[slice, slice]


def _pieces(
    rows: int, numel: int, device: torch.device
) -> Iterator[tuple[_Piece, int, int, Tensor, Tensor]]:
    """Yield pieces: rows and blocks of each, first element, end, and memory for it, twice.

    On a device there is one.
    """
    if not rows * numel:
        return
    most = PIECE if device.type == "cpu" else rows * numel
    wide, tall = min(most, numel), max(1, most // numel)
    memory = torch.empty(2, min(rows, tall) * wide, dtype=torch.float32, device=device)
    for row in range(0, rows, tall):
        end = min(row + tall, rows)
        for start in range(0, numel, wide):
            stop = min(start + wide, numel)
            piece = slice(row, end), slice(start // BLOCK, stop // BLOCK)
            first, total = row * numel + start, (end - row) * (stop - start)
            yield piece, first, first + total, memory[0, :total], memory[1, :total]


def _at(feedback: Feedback | None, first: int, stop: int) -> Feedback | None:
    return feedback and Feedback(feedback.residual[first:stop], feedback.scale)


def _put(places: Places, first: int, stop: int, values: Tensor, out: Tensor) -> None:
    for begin, flat, length in places.inside(first, stop):
        out[flat : flat + length].copy_(values[begin - first : begin - first + length])


def _write(
    wire: WireFormat,
    total: Tensor,
    spare: Tensor,
    views: tuple[Tensor, Tensor],
    piece: _Piece,
    feedback: Feedback | None,
) -> None:
    """Write values, which are overwritten, and what rounding took from them."""
    if feedback is not None:
        scale, inverse_scale = feedback.scale.unbind()
        total.add_(torch.mul(feedback.residual, scale, out=spare))
    blocks, target = total.view(-1, BLOCK), views[1][piece]
    if not wire.top:
        target.copy_(blocks.view_as(target))
        return
    amax = torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_())
    # On a host a look at the units spares passes; a device is not waited for.
    plain = total.device.type == "cpu" and bool((amax <= wire.limit).all())
    unit = _units(wire, blocks, amax, plain=plain).unsqueeze(-1)
    scaled = torch.mul(blocks, unit.reciprocal(), out=spare.view(-1, BLOCK))
    if wire.payload is torch.int8:
        scaled.round_()
        if not plain:
            scaled.clamp_(-wire.top, wire.top).nan_to_num_(0.0)
    elif not plain:
        top = unit.reciprocal() * wire.limit
        scaled = torch.where(blocks.isfinite(), scaled.clamp(-top, top), blocks)
    views[0][piece].copy_(unit.view_as(views[0][piece]))
    target.copy_(scaled.view_as(target))
    if feedback is not None:
        left = total.sub_(scaled.mul_(unit).view(-1)).mul_(inverse_scale)
        # A block that is not finite leaves nothing for later exchanges.
        feedback.residual.copy_(left if plain else left.nan_to_num_(0.0, 0.0, 0.0))


def _units(wire: WireFormat, blocks: Tensor, amax: Tensor, *, plain: bool) -> Tensor:
    """Return units, fp32 but exact in bfloat16; of int8 NaN where a block is not finite."""
    if wire.payload is torch.int8:
        # Upwards to a bfloat16, so that no payload is above top.
        bits = (amax.clamp(max=wire.limit) * (1 / wire.top)).view(torch.int32)
        unit = ((bits + 0xFFFF) & -0x10000).clamp(min=LEAST_UNIT).view(torch.float32)
        return unit if plain else torch.where(amax <= FP32_MAX, unit, math.nan)
    if not plain:
        amax = torch.where(blocks.isfinite(), blocks, 0.0).abs().amax(-1).clamp(max=wire.limit)
    # The power of two by which amax lies in [top / 2, top).
    bits = (amax.view(torch.int32) & EXPONENT) - (14 << 23)
    return bits.clamp(min=LEAST_UNIT).view(torch.float32)


def _read(wire: WireFormat, views: tuple[Tensor, Tensor], piece: _Piece, out: Tensor) -> None:
    payload = views[1][piece]
    out.view_as(payload).copy_(payload)
    if wire.top:
        out.view_as(payload).mul_(views[0][piece].to(torch.float32).unsqueeze(-1))


def _sum(
    wire: WireFormat, given: Tensor, numel: int, piece: _Piece, out: Tensor, spare: Tensor
) -> None:
    views = wire.views(given, numel)
    _read(wire, views, (slice(0, 1), piece[1]), out)
    for row in range(1, len(given)):
        _read(wire, views, (slice(row, row + 1), piece[1]), spare)
        out.add_(spare)
