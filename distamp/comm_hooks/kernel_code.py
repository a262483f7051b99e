"""Triton kernels of the wire formats: what one program does with some blocks of 256 elements.

What is split goes the same way as whole blocks, in one turn for each of the blocks that 256
elements are split into. Rows may lie beyond 2^31 elements. `kernels` launches them.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode_kernel", "element_at", "encode_kernel", "sum_encode_kernel", "sum_kernel"]

# KIND says what payloads are: integers, fp16, fp8_e4m3, and plain bf16 and fp16.


# -- numbers ----------------------------------------------------------------------------------


@triton.jit
def element_at(start, row, stride, column):
    """Return where an element lies in a flat tensor, which may have more than 2^31."""
    return start + row.to(tl.int64) * stride + column


@triton.jit
def _bits(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _floats(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _nonfinite(values):
    return (_bits(values) & 0x7F800000) == 0x7F800000


@triton.jit
def _rounded(values):
    """Round to even; magnitudes are below 2^22."""
    shift = tl.where(values < 0, -12582912.0, 12582912.0)
    return (values + shift) - shift


@triton.jit
def _to_bf16(values):
    """Return bfloat16 as int16; nearest, ties to even."""
    bits = _bits(values)
    up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(nan, 0x7FC0, up).to(tl.int16)


@triton.jit
def _from_bf16(bits):
    return _floats(bits.to(tl.int32) << 16)


@triton.jit
def _to_fp8(values, bad):
    """Return float8_e4m3fn as int8, and as fp32; magnitudes are up to 256."""
    magnitude = tl.abs(values)
    exponent = tl.maximum((_bits(magnitude) >> 23) - 127, -6)
    eighths = _rounded(magnitude * _floats((127 + 3 - exponent) << 23)).to(tl.int32)
    code = tl.where(bad, 0x7F, (exponent + 7) * 8 + eighths - 8)
    code = code | tl.where(_bits(values) < 0, 0x80, 0)
    return code.to(tl.int8)


@triton.jit
def _from_fp8(code):
    code = code.to(tl.int32) & 0xFF
    field = (code >> 3) & 15
    eighths = tl.where(field > 0, 8 + (code & 7), code & 7)
    values = eighths.to(tl.float32) * _floats((tl.maximum(field, 1) - 10 + 127) << 23)
    values = tl.where((code & 0x7F) == 0x7F, float("nan"), values)
    return tl.where(code >= 0x80, -values, values)


@triton.jit
def _unit(amax, lowest, KIND: tl.constexpr, TOP: tl.constexpr, SHIFT: tl.constexpr):
    """Return units of blocks as fp32, exact in bfloat16; as ``blocks.unit_of``."""
    if KIND == 0:
        bits = _bits(amax * (1.0 / TOP))
        bits = (bits + 0xFFFF) & -65536
    else:
        bits = (_bits(amax) & 0x7F800000) - SHIFT
    return _floats(tl.maximum(bits, lowest))


@triton.jit
def _payload_values(payload, KIND: tl.constexpr):
    """Return payloads as they are, in fp32."""
    if KIND == 2:
        return _from_fp8(payload)
    if KIND == 3:
        return _from_bf16(payload)
    return payload.to(tl.float32)


# -- where things are -------------------------------------------------------------------------


@triton.jit
def _place(blocks, length, total, BLOCKS_: tl.constexpr):
    """Return of this program's blocks: number, row, first column, and elements in each."""
    number = tl.program_id(0).to(tl.int64) * BLOCKS_ + tl.arange(0, BLOCKS_)
    row = number // blocks
    column = (number % blocks) * 256
    in_row = tl.minimum(tl.maximum(total - row * length, 0), length)
    elements = tl.minimum(tl.maximum(in_row - column, 0), 256)
    return number, row, column, elements


@triton.jit
def _split(number, count, table, local, first, parts, SPLIT: tl.constexpr, BLOCKS_: tl.constexpr):
    """Return of each block: which split it is or -1, its first block there, how many it has."""
    if SPLIT:
        which = tl.load(table + number, mask=number < count, other=-1)
        base = tl.load(first + which, mask=which >= 0, other=0)
        turns = tl.load(parts + which, mask=which >= 0, other=1).to(tl.int32)
        lanes = tl.arange(0, 256)[None, :]
        at = which[:, None].to(tl.int64) * 256 + lanes
        of = tl.load(local + at, mask=(which >= 0)[:, None], other=0).to(tl.int32)
    else:
        which = tl.full([BLOCKS_], -1, tl.int32)
        base = tl.zeros([BLOCKS_], tl.int64)
        turns = tl.full([BLOCKS_], 1, tl.int32)
        of = tl.zeros([BLOCKS_, 256], tl.int32)
    return which, base, turns, of


@triton.jit
def _header_at(which, base, turn, number, blocks, header, SPLIT: tl.constexpr):
    """Return where the header of each block's ``turn``-th part lies in its row."""
    at = number % blocks
    if SPLIT:
        given = tl.load(header + base + turn, mask=which >= 0, other=0)
        at = tl.where(which >= 0, given, at)
    return at


# -- reading ----------------------------------------------------------------------------------


@triton.jit
def _decoded(
    payload, payload_stride, headers, header_stride, row, column, elements, number, blocks,
    which, base, turns, of, header, KIND: tl.constexpr, TOP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Return the values of this program's blocks, fp32."""
    lanes = tl.arange(0, 256)[None, :]
    there = lanes < elements[:, None]
    at = (row.to(tl.int64) * payload_stride + column)[:, None] + lanes
    given = tl.load(payload + at, mask=there, other=0)
    values = _payload_values(given, KIND)
    if KIND < 3:
        unit = tl.zeros_like(values)
        for turn in range(tl.max(turns, 0)):
            place = _header_at(which, base, turn, number, blocks, header, SPLIT)
            mask = (turn < turns) & (elements > 0)
            bits = tl.load(headers + row.to(tl.int64) * header_stride + place, mask=mask, other=0)
            unit = tl.where(of == turn, _from_bf16(bits)[:, None], unit)
        values = values * tl.abs(unit)
        if KIND == 0:
            marked = (unit < 0) & (given.to(tl.int32) == -TOP - 1)
            values = tl.where(marked, float("nan"), values)
    return values


@triton.jit
def decode_kernel(
    payload, payload_stride, headers, header_stride, values, start, stride, length, total, blocks,
    count, table, local, first, parts, header,
    KIND: tl.constexpr, TOP: tl.constexpr, SPLIT: tl.constexpr, BLOCKS_: tl.constexpr,
):  # fmt: skip
    """Write what wires say to rows of a flat tensor; as `reference.decode_rows`."""
    number, row, column, elements = _place(blocks, length, total, BLOCKS_)
    elements = tl.where(number < count, elements, 0)
    which, base, turns, of = _split(number, count, table, local, first, parts, SPLIT, BLOCKS_)
    read = _decoded(
        payload, payload_stride, headers, header_stride, row, column, elements, number, blocks,
        which, base, turns, of, header, KIND, TOP, SPLIT,
    )  # fmt: skip
    lanes = tl.arange(0, 256)[None, :]
    at = element_at(start, row, stride, column)[:, None] + lanes
    tl.store(values + at, read.to(values.dtype.element_ty), mask=lanes < elements[:, None])


@triton.jit
def _summed(
    payload, payload_stride, headers, header_stride, wires, row, column, elements, number, blocks,
    which, base, turns, of, header, KIND: tl.constexpr, TOP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Return the sum of the same blocks of all wires, in their order."""
    total = _decoded(
        payload, payload_stride, headers, header_stride, row, column, elements, number, blocks,
        which, base, turns, of, header, KIND, TOP, SPLIT,
    )  # fmt: skip
    for wire in range(1, wires):
        total += _decoded(
            payload, payload_stride, headers, header_stride, row + wire, column, elements, number,
            blocks, which, base, turns, of, header, KIND, TOP, SPLIT,
        )  # fmt: skip
    return total


@triton.jit
def sum_kernel(
    payload, payload_stride, headers, header_stride, wires, out, length, total, blocks,
    count, table, local, first, parts, header,
    KIND: tl.constexpr, TOP: tl.constexpr, SPLIT: tl.constexpr, BLOCKS_: tl.constexpr,
):  # fmt: skip
    """Write the sum of several wires of one row; as `reference.sum_rows`."""
    number, row, column, elements = _place(blocks, length, total, BLOCKS_)
    elements = tl.where(number < count, elements, 0)
    row = tl.zeros_like(row)
    which, base, turns, of = _split(number, count, table, local, first, parts, SPLIT, BLOCKS_)
    summed = _summed(
        payload, payload_stride, headers, header_stride, wires, row, column, elements, number,
        blocks, which, base, turns, of, header, KIND, TOP, SPLIT,
    )  # fmt: skip
    lanes = tl.arange(0, 256)[None, :]
    at = column[:, None] + lanes
    tl.store(out + at, summed.to(out.dtype.element_ty), mask=lanes < elements[:, None])


# -- writing ----------------------------------------------------------------------------------


@triton.jit
def _write_units(
    divided, there, bad, headers, header_stride, row, elements, number, count, blocks, lowest,
    which, base, turns, of, header,
    KIND: tl.constexpr, TOP: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Write headers; return each element's unit and its reciprocal, the largest unit, and inf."""
    magnitude = tl.where(bad | ~there, 0.0, tl.abs(divided))
    unit = tl.full(magnitude.shape, 1.0, tl.float32)
    reciprocal = tl.full(magnitude.shape, 1.0, tl.float32)
    highest, worst = 0.0, 0
    for turn in range(tl.max(turns, 0)):
        inside = of == turn
        amax = tl.minimum(tl.max(tl.where(inside, magnitude, 0.0), 1), LIMIT)
        spoilt = tl.max(tl.where(inside & bad, 1, 0), 1)
        units = _unit(amax, lowest, KIND, TOP, SHIFT)
        written = (turn < turns) & (number < count)
        used = written & (elements > 0)
        place = _header_at(which, base, turn, number, blocks, header, SPLIT)
        bits = (_bits(units) >> 16) | tl.where(spoilt > 0, 0x8000, 0)
        bits = tl.where(used, bits, 0).to(tl.int16)
        tl.store(headers + row.to(tl.int64) * header_stride + place, bits, mask=written)
        highest = tl.maximum(highest, tl.max(tl.where(used, units, 0.0), 0))
        worst = tl.maximum(worst, tl.max(tl.where(used, spoilt, 0), 0))
        inverted = tl.div_rn(tl.zeros_like(units) + 1.0, units)
        unit = tl.where(inside, units[:, None], unit)
        reciprocal = tl.where(inside, inverted[:, None], reciprocal)
    return unit, reciprocal, highest, worst


@triton.jit
def _write_blocks(
    payload, values, divided, bad, there, unit, reciprocal, inverse,
    KIND: tl.constexpr, TOP: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Write payloads in multiples of units; return what they read back as."""
    top = reciprocal * LIMIT
    scaled = tl.minimum(tl.maximum(values * (reciprocal * inverse), -top), top)
    if KIND == 0:
        whole = tl.where(bad, -TOP - 1.0, _rounded(tl.where(bad, 0.0, scaled)))
        tl.store(payload, whole.to(payload.dtype.element_ty), mask=there)
        back = tl.where(bad, float("nan"), whole)
    elif KIND == 1:
        half = tl.where(bad, divided, scaled).to(tl.float16)
        tl.store(payload, half, mask=there)
        back = half.to(tl.float32)
    else:
        code = _to_fp8(tl.where(bad, 0.0, scaled), bad)
        tl.store(payload, code, mask=there)
        back = _from_fp8(code)
    return back * unit


@triton.jit
def _write_plain(payload, values, divided, divisor, there, KIND: tl.constexpr):
    """Write payloads without units; return what they read back as."""
    if KIND == 3:
        short = _to_bf16(divided)
        back = _from_bf16(short)
    else:
        half = values.to(tl.float16).to(tl.float32)
        short = tl.div_rn(half, divisor + tl.zeros_like(values)).to(tl.float16)
        back = short.to(tl.float32)
    tl.store(payload, short, mask=there)
    return back


@triton.jit
def _encode(
    values, residual, left, scale, inverse, divisor, lowest, head,
    payload, payload_stride, headers, header_stride, row, column, elements, number, count, blocks,
    which, base, turns, of, header, position,
    KIND: tl.constexpr, TOP: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr,
    LARGEST: tl.constexpr, SPLIT: tl.constexpr, BEFORE: tl.constexpr, FED_BACK: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """Write this program's blocks of ``values``, fp32, and what rounding takes from them."""
    lanes = tl.arange(0, 256)[None, :]
    there = lanes < elements[:, None]
    if BEFORE:
        kept = tl.load(residual + position, mask=there, other=0.0)
        values = values + kept * tl.load(scale)
    divided = values * inverse
    at = payload + (row.to(tl.int64) * payload_stride + column)[:, None] + lanes
    if KIND < 3:
        bad = _nonfinite(divided) & there
        unit, reciprocal, highest, worst = _write_units(
            divided, there, bad, headers, header_stride, row, elements, number, count, blocks,
            lowest, which, base, turns, of, header, KIND, TOP, SHIFT, LIMIT, SPLIT,
        )  # fmt: skip
        back = _write_blocks(
            at, values, divided, bad, there, unit, reciprocal, inverse, KIND, TOP, LIMIT
        )
        exponent = (_bits(highest * LARGEST) >> 23) - 127
    else:
        back = _write_plain(at, values, divided, divisor, there, KIND)
        bad = _nonfinite(back) & there
        worst = tl.max(tl.max(tl.where(bad, 1, 0), 1), 0)
        highest = tl.max(tl.max(tl.where(bad | ~there, 0.0, tl.abs(back)), 1), 0)
        exponent = (_bits(highest) >> 23) - 127
    if HEAD:
        tl.atomic_max(head, worst.to(tl.int64))
        tl.atomic_max(head + 1, exponent.to(tl.int64))
    if FED_BACK:
        missing = tl.div_rn(values - back * divisor, tl.load(scale) + tl.zeros_like(values))
        missing = tl.where(_nonfinite(missing), 0.0, missing)
        tl.store(left + position, missing, mask=there)


@triton.jit
def encode_kernel(
    given, start, stride, length, total, blocks, count,
    residual, left, scale, inverse, divisor, lowest, head,
    payload, payload_stride, headers, header_stride, table, local, first, parts, header,
    KIND: tl.constexpr, TOP: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr,
    LARGEST: tl.constexpr, SPLIT: tl.constexpr, BEFORE: tl.constexpr, FED_BACK: tl.constexpr,
    HEAD: tl.constexpr, BLOCKS_: tl.constexpr,
):  # fmt: skip
    """Write the wires of rows of a flat tensor; as `reference.encode_rows`."""
    number, row, column, elements = _place(blocks, length, total, BLOCKS_)
    elements = tl.where(number < count, elements, 0)
    which, base, turns, of = _split(number, count, table, local, first, parts, SPLIT, BLOCKS_)
    lanes = tl.arange(0, 256)[None, :]
    position = element_at(0, row, stride, column)[:, None] + lanes
    values = tl.load(given + start + position, mask=lanes < elements[:, None], other=0.0)
    _encode(
        values.to(tl.float32), residual, left, scale, inverse, divisor, lowest, head,
        payload, payload_stride, headers, header_stride, row, column, elements, number, count,
        blocks, which, base, turns, of, header, position,
        KIND, TOP, SHIFT, LIMIT, LARGEST, SPLIT, BEFORE, FED_BACK, HEAD,
    )  # fmt: skip


@triton.jit
def sum_encode_kernel(
    given, given_stride, given_headers, given_header_stride, wires, length, total, blocks, count,
    residual, left, scale, lowest, head,
    payload, payload_stride, headers, header_stride, table, local, first, parts, header,
    KIND: tl.constexpr, TOP: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr,
    LARGEST: tl.constexpr, SPLIT: tl.constexpr, BEFORE: tl.constexpr, FED_BACK: tl.constexpr,
    HEAD: tl.constexpr, BLOCKS_: tl.constexpr,
):  # fmt: skip
    """Write the wire of the sum of several wires of one row, in one pass."""
    number, row, column, elements = _place(blocks, length, total, BLOCKS_)
    elements = tl.where(number < count, elements, 0)
    row = tl.zeros_like(row)
    which, base, turns, of = _split(number, count, table, local, first, parts, SPLIT, BLOCKS_)
    values = _summed(
        given, given_stride, given_headers, given_header_stride, wires, row, column, elements,
        number, blocks, which, base, turns, of, header, KIND, TOP, SPLIT,
    )  # fmt: skip
    position = column[:, None] + tl.arange(0, 256)[None, :]
    _encode(
        values, residual, left, scale, 1.0, 1.0, lowest, head,
        payload, payload_stride, headers, header_stride, row, column, elements, number, count,
        blocks, which, base, turns, of, header, position,
        KIND, TOP, SHIFT, LIMIT, LARGEST, SPLIT, BEFORE, FED_BACK, HEAD,
    )  # fmt: skip
