"""The arithmetic of `formats` as Triton kernels: each of its functions in one launch.

Sums are added up in the same order and nothing is contracted to fused multiply-adds, so results are
those of `formats` on a host to the bit; Triton's interpreter runs them there. A program takes some
blocks of 256 elements; rows may lie beyond 2^31 elements. Imported where Triton is, which comes
with torch's builds for CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from distamp.comm_hooks.formats import BLOCK, Feedback, Places, Source, WireFormat

__all__ = [
    "constants",
    "decode",
    "decode_kernel",
    "encode",
    "encode_kernel",
    "programs",
    "sum_encode",
    "sum_encode_kernel",
    "sum_kernel",
    "sum_rows",
]

# Blocks of 256 that one program writes or reads, where there are enough programs with so many: a
# few for each multiprocessor of a large device.
BLOCKS, ENOUGH = 8, 512
# Products and sums as torch has them, each rounded by itself.
OPTIONS = {"enable_fp_fusion": False}
_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.int8: 2}

# Numbers of which kernels are not compiled again for 1 and for multiples of 16. Of strides they
# are: where these are such multiples, and runs aligned, they take four elements at a time.
COUNTS = ("more", "own", "rows", "count", "blocks", "first")
# KIND says what payloads are: 0 for fp16, 1 for bf16, 2 for int8.


# -- what one program does --------------------------------------------------------------------


@triton.jit
def _bits(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _floats(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _to_bf16(values):
    """Return bfloat16 as int16; nearest, ties to even."""
    bits = _bits(values)
    up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, up).to(tl.int16)


@triton.jit
def _from_bf16(bits):
    return _floats(bits.to(tl.int32) << 16)


@triton.jit
def _numbers(BLOCKS_: tl.constexpr):
    return tl.program_id(0).to(tl.int64) * BLOCKS_ + tl.arange(0, BLOCKS_)


@triton.jit
def _lies(table, number, inside, ALIGNED: tl.constexpr):
    """Return where the elements of blocks lie in the flat tensor, and which there are."""
    code = tl.load(table + number, mask=inside, other=0)
    first, length = code >> 9, code & 511
    if ALIGNED:
        first, length = tl.multiple_of(first, 4), tl.multiple_of(length, 4)
    lanes = tl.arange(0, 256)[None, :]
    return first[:, None] + lanes, lanes < length[:, None]


@triton.jit
def _loaded(
    values, others, more, other_stride, inverse, table, number, inside, ALIGNED: tl.constexpr
):  # fmt: skip
    """Return blocks of a source's rows."""
    at, there = _lies(table, number, inside, ALIGNED)
    x = tl.load(values + at, mask=there, other=0.0).to(tl.float32) * inverse
    for other in range(more):
        beside = at + (tl.zeros_like(at) + other) * other_stride
        x = x + tl.load(others + beside, mask=there, other=0.0).to(tl.float32) * inverse
    return x


@triton.jit
def _decoded(units, unit_stride, payload, stride, row, block, inside, KIND: tl.constexpr):
    """Return blocks of rows."""
    lanes = tl.arange(0, 256)[None, :]
    at = (row * stride + block * 256)[:, None] + lanes
    given = tl.load(payload + at, mask=inside[:, None], other=0)
    if KIND == 1:
        values = _from_bf16(given)
    else:
        bits = tl.load(units + row * unit_stride + block, mask=inside, other=0)
        values = given.to(tl.float32) * _from_bf16(bits)[:, None]
    return values


@triton.jit
def _summed(
    values, others, more, other_stride, inverse, table, own,
    units, unit_stride, payload, stride, rows, number, count,
    KIND: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return blocks of the own row and of what the others sent of it, the next rank's first."""
    inside = number < count
    mine = own * count.to(tl.int64) + number
    x = _loaded(values, others, more, other_stride, inverse, table, mine, inside, ALIGNED)
    for turn in range(1, rows):
        row = (tl.zeros_like(number) + own + turn) % rows
        x += _decoded(units, unit_stride, payload, stride, row, number, inside, KIND)
    return x


@triton.jit
def _write(
    x, residual, marks, scale, units, unit_stride, payload, stride, number, blocks, there,
    KIND: tl.constexpr, TOP: tl.constexpr, LIMIT: tl.constexpr, FED: tl.constexpr,
):  # fmt: skip
    """Write blocks of fp32, and what rounding took from them."""
    inside = there[:, None]
    lanes = tl.arange(0, 256)[None, :]
    kept = residual + number[:, None] * 256 + lanes
    if FED:
        # What a block of zeros has kept waits.
        idle = tl.max((x != 0).to(tl.int32), 1) == 0
        back = tl.load(kept, mask=inside, other=0.0)
        x = tl.where(idle[:, None], x, x + back * tl.load(scale))
    row, block = number // blocks, number % blocks
    at = payload + (row * stride + block * 256)[:, None] + lanes
    if KIND == 1:
        tl.store(at, _to_bf16(x), mask=inside)
    else:
        bad = (_bits(x) & 0x7F800000) == 0x7F800000
        finite = tl.minimum(tl.maximum(tl.where(bad, 0.0, x), -LIMIT), LIMIT)
        amax = tl.max(tl.abs(finite), 1)
        if KIND == 0:
            bits = (_bits(amax) & 0x7F800000) - (14 << 23)
        else:
            bits = (_bits(amax * (1.0 / TOP)) + 0xFFFF) & -65536
        unit = _floats(tl.maximum(bits, 1 << 23))
        inverted = tl.div_rn(tl.zeros_like(unit) + 1.0, unit)
        written = _bits(unit) >> 16
        scaled = finite * inverted[:, None]
        if KIND == 0:
            tl.store(at, tl.where(bad, x, scaled).to(tl.float16), mask=inside)
        else:
            spoilt = tl.max(bad.to(tl.int32), 1) > 0
            scaled = tl.where(spoilt[:, None], 0.0, scaled)
            # To even; magnitudes are below 2^22.
            shift = tl.where(scaled < 0, -12582912.0, 12582912.0)
            whole = (scaled + shift) - shift
            tl.store(at, whole.to(tl.int8), mask=inside)
            written = tl.where(spoilt, 0x7FC0, written)
            if FED:
                left = (x - whole * unit[:, None]) * tl.load(scale + 1)
                left = tl.where(spoilt[:, None], 0.0, left)
                tl.store(kept, tl.where(idle[:, None], back, left), mask=inside)
                fresh = tl.full(idle.shape, 1, tl.int8)
                tl.store(marks + number, fresh, mask=there & (idle == 0))
        tl.store(units + row * unit_stride + block, written.to(tl.int16), mask=there)


# -- kernels ----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=COUNTS)
def encode_kernel(
    values, others, more, other_stride, inverse, table, own, residual, marks, scale,
    units, unit_stride, payload, stride, count, blocks,
    KIND: tl.constexpr, TOP: tl.constexpr, LIMIT: tl.constexpr, FED: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCKS_: tl.constexpr,
):  # fmt: skip
    """As `formats.encode`."""
    number = _numbers(BLOCKS_)
    there = (number < count) & (number // blocks != own)
    x = _loaded(values, others, more, other_stride, inverse, table, number, there, ALIGNED)
    _write(
        x, residual, marks, scale, units, unit_stride, payload, stride, number, blocks, there,
        KIND, TOP, LIMIT, FED,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def sum_encode_kernel(
    values, others, more, other_stride, inverse, table, own,
    given_units, given_unit_stride, given, given_stride, rows, residual, marks, scale,
    units, unit_stride, payload, stride, count, blocks,
    KIND: tl.constexpr, TOP: tl.constexpr, LIMIT: tl.constexpr, FED: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCKS_: tl.constexpr,
):  # fmt: skip
    """As `formats.sum_encode`."""
    number = _numbers(BLOCKS_)
    x = _summed(
        values, others, more, other_stride, inverse, table, own,
        given_units, given_unit_stride, given, given_stride, rows, number, count, KIND, ALIGNED,
    )  # fmt: skip
    _write(
        x, residual, marks, scale, units, unit_stride, payload, stride, number, blocks,
        number < count, KIND, TOP, LIMIT, FED,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def sum_kernel(
    values, others, more, other_stride, inverse, table, own,
    given_units, given_unit_stride, given, given_stride, rows, out, first, count, blocks,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BLOCKS_: tl.constexpr,
):  # fmt: skip
    """As `formats.sum_rows`."""
    number = _numbers(BLOCKS_)
    x = _summed(
        values, others, more, other_stride, inverse, table, own,
        given_units, given_unit_stride, given, given_stride, rows, number, count, KIND, ALIGNED,
    )  # fmt: skip
    at, there = _lies(table, own * count.to(tl.int64) + number, number < count, ALIGNED)
    tl.store(out + at - first, x.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=COUNTS)
def decode_kernel(
    units, unit_stride, payload, stride, table, out, count, blocks,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BLOCKS_: tl.constexpr,
):  # fmt: skip
    """As `formats.decode`."""
    number = _numbers(BLOCKS_)
    inside = number < count
    at, there = _lies(table, number, inside, ALIGNED)
    x = _decoded(
        units, unit_stride, payload, stride, number // blocks, number % blocks, inside, KIND
    )
    tl.store(out + at, x.to(out.dtype.element_ty), mask=there)


# -- launches ----------------------------------------------------------------------------------


def encode(wire: WireFormat, source: Source, out: Tensor, feedback: Feedback | None = None) -> None:
    """Do as `formats.encode`."""
    count = source.places.numel
    # Residuals that a format does not have are not read.
    fed = _fed(feedback, out)
    arguments = (*_given(source), *fed, *_views(wire, out, count // len(out)))
    known = constants(wire, source.places, writes=True, fed=feedback is not None)
    _launch(encode_kernel, arguments, count, count // len(out), known)


def sum_encode(
    wire: WireFormat,
    source: Source,
    given: Tensor,
    out: Tensor,
    feedback: Feedback | None = None,
) -> None:
    """Do as `formats.sum_encode`."""
    numel = source.places.numel // len(given)
    read = (*_given(source), *_views(wire, given, numel), len(given))
    fed = _fed(feedback, given)
    arguments = (*read, *fed, *_views(wire, out.view(1, -1), numel))
    known = constants(wire, source.places, writes=True, fed=feedback is not None)
    _launch(sum_encode_kernel, arguments, numel, numel, known)


def sum_rows(wire: WireFormat, source: Source, given: Tensor, out: Tensor) -> None:
    """Do as `formats.sum_rows`."""
    numel = source.places.numel // len(given)
    read = (*_given(source), *_views(wire, given, numel), len(given))
    offset, known = source.places.offsets[source.own], constants(wire, source.places, writes=False)
    _launch(sum_kernel, (*read, out, offset), numel, numel, known)


def decode(wire: WireFormat, given: Tensor, places: Places, out: Tensor) -> None:
    """Do as `formats.decode`."""
    numel = places.numel // len(given)
    arguments = (*_views(wire, given, numel), places.table(out.device), out)
    known = constants(wire, places, writes=False)
    _launch(decode_kernel, arguments, places.numel, numel, known)


def constants(
    wire: WireFormat, places: Places, *, writes: bool, fed: bool = False
) -> dict[str, Any]:
    """Return what is known when a kernel is compiled."""
    known: dict[str, Any] = {"KIND": _KINDS[wire.payload], "ALIGNED": places.aligned}
    return {**known, "TOP": wire.top, "LIMIT": wire.limit, "FED": fed} if writes else known


def programs(count: int) -> tuple[int, int]:
    """Return how many programs take so many blocks, and how many blocks each of them."""
    each = BLOCKS if count >= BLOCKS * ENOUGH else 1
    return -(-count // each), each


def _launch(
    kernel: Any, arguments: tuple[Any, ...], numel: int, row: int, known: dict[str, Any]
) -> None:
    """Call a kernel for the blocks of so many elements, in rows of so many."""
    options = {} if type(kernel).__name__ == "InterpretedFunction" else OPTIONS
    many, each = programs(numel // BLOCK)
    kernel[(many,)](*arguments, numel // BLOCK, row // BLOCK, **known, BLOCKS_=each, **options)


def _fed(feedback: Feedback | None, unread: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return feedback as kernels take it."""
    if feedback is None:
        return unread, unread, unread
    return feedback.residual, feedback.written.view(torch.int8), feedback.scale


def _given(source: Source) -> tuple[Any, ...]:
    """Return a source as kernels take it."""
    values, others, places, own, inverse = source
    table = places.table(values.device)
    return values, others, len(others), others.stride(0), inverse, table, own


def _views(wire: WireFormat, rows: Tensor, numel: int) -> tuple[Any, ...]:
    """Return units and payloads of rows as kernels take them, each with its stride."""
    units, payload = wire.views(rows, numel)
    payload = payload.flatten(1)
    if wire.payload is torch.bfloat16:
        payload = payload.view(torch.int16)
    # Units that a format does not have are not read.
    units = units.view(torch.int16) if wire.top else payload
    return units, units.stride(0), payload, payload.stride(0)
