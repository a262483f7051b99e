"""The arithmetic of the wire formats in torch's own ops, on whole rows: the reference for kernels.

On a host, work goes through the cache a piece at a time, and looks at values where that saves a
pass. Elsewhere nothing is looked at, so that no device is waited for, and the number of ops does
not depend on how many rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distamp.comm_hooks.blocks import (
    EXPONENT_BIAS,
    exponent_of,
    on_host,
    read_blocks,
    read_lanes,
    read_payload,
    scaled_to,
    unit_of,
    write_any_blocks,
    write_blocks,
)
from distamp.comm_hooks.error_feedback import Feedback, compensate, new_residual
from distamp.comm_hooks.rows import BLOCK, Rows, Splits

if TYPE_CHECKING:
    from distamp.comm_hooks.wire import WireFormat

__all__ = [
    "NAME",
    "decode_rows",
    "encode_rows",
    "sum_encode_rows",
    "sum_rows",
    "summary",
]

# Elements worked on at a time on a host, so that every pass but the first finds them in the cache,
# and so many that the dozen small ops on their units do not show.
PIECE = 1 << 19
NAME = "torch ops"


# -- rows -------------------------------------------------------------------------------------


def encode_rows(
    wire: WireFormat,
    values: Tensor,
    out: Tensor,
    rows: Rows,
    *,
    divisor: float = 1.0,
    head: Tensor | None = None,
    feedback: Feedback | None = None,
) -> Tensor | None:
    """Write the wires of rows of ``values / divisor``.

    Args:
        wire: The format.
        values: 1-D, contiguous, floating.
        out: uint8 (rows, at least the bytes of a wire), of any stride between rows.
        rows: Where they lie in ``values``.
        divisor: Divides in fp32, before the cast.
        head: int64 (2,); gets 1 if anything is inf or NaN, and the largest exponent, where these
            are more than what it has.
        feedback: Adds what rounding took before.

    Returns:
        What rounding took now, fp32, if ``feedback`` is given; else None.
    """
    given, at = values, rows
    if feedback is not None:
        given = compensate(
            values[rows.start : rows.start + rows.total], feedback.residual, feedback.scale
        )
        at = Rows(0, rows.stride, rows.length, rows.count, rows.total, rows.extra, rows.splits)
    if wire.block > 1:
        _encode_blocks(wire, given, out, at, rows.start - at.start, divisor)
    else:
        _encode_plain(wire, given, out, at, divisor)
    if head is not None:
        torch.maximum(head, summary(wire, out, rows), out=head)
    if feedback is None:
        return None
    arrived = torch.empty_like(given)
    _decode(wire, out, arrived, at, rows.start - at.start)
    return new_residual(given, arrived.mul_(divisor), feedback.scale)


def decode_rows(wire: WireFormat, wires: Tensor, values: Tensor, rows: Rows) -> None:
    """Write what wires say to rows of ``values``, 1-D, contiguous, floating.

    Args:
        wire: The format.
        wires: uint8 (rows, at least the bytes of a wire).
        values: Where to write.
        rows: Where the rows lie in ``values``.
    """
    _decode(wire, wires, values, rows, 0)


def sum_rows(wire: WireFormat, wires: Tensor, total: Tensor, rows: Rows) -> None:
    """Write the fp32 sum of several wires of the same row to ``total``, 1-D floating.

    On a host in the order of the wires; elsewhere in whichever order ``torch.sum`` has.

    Args:
        wire: The format.
        wires: uint8 (ranks, at least the bytes of a wire).
        total: ``rows.total`` elements.
        rows: The one row that all of them are wires of; it begins at 0.
    """
    if not on_host(total):
        count = len(wires)
        each = torch.empty(count, rows.total, dtype=torch.float32, device=total.device)
        _read_whole(wire, wires, each, rows)
        _read_splits_of_all(wire, wires, each, rows)
        total.copy_(each.sum(0))
        return
    step = PIECE
    memory = torch.empty(min(step, rows.total), dtype=torch.float32, device=total.device)
    for first in range(0, rows.total, step):
        last = min(first + step, rows.total)
        part = total[first:last]
        summed = part
        if total.dtype is not torch.float32:
            summed = torch.empty(last - first, dtype=torch.float32, device=total.device)
        _sum_whole(wire, wires, summed, rows, first, memory[: last - first])
        if summed is not part:
            part.copy_(summed)
    if rows.splits is not None and wire.block > 1:
        count = len(rows.splits.row)
        summed = torch.zeros(count, BLOCK, dtype=torch.float32, device=total.device)
        for number in range(len(wires)):
            one = _split_values(wire, wires[number : number + 1], rows, rows.splits)
            summed = one if number == 0 else summed.add_(one)
        _put_splits(total, summed, rows.splits, 0)


def sum_encode_rows(
    wire: WireFormat,
    wires: Tensor,
    out: Tensor,
    rows: Rows,
    *,
    head: Tensor | None = None,
    feedback: Feedback | None = None,
) -> Tensor | None:
    """Write the wire of the sum of several wires of the same row; as `sum_rows`, `encode_rows`.

    Args:
        wire: The format.
        wires: uint8 (ranks, at least the bytes of a wire).
        out: uint8 (1, at least the bytes of a wire).
        rows: The one row that all of them are wires of; it begins at 0.
        head: As for `encode_rows`.
        feedback: As for `encode_rows`.
    """
    total = torch.empty(rows.total, dtype=torch.float32, device=wires.device)
    sum_rows(wire, wires, total, rows)
    return encode_rows(wire, total, out, rows, head=head, feedback=feedback)


def summary(wire: WireFormat, wires: Tensor, rows: Rows) -> Tensor:
    """Return whether wires hold inf or NaN, and their largest exponent, as int64 (2,).

    The exponent is floor(log2) of the largest finite magnitude: of headers alone, where there are.
    """
    if rows.length == 0:
        return torch.tensor([0, -EXPONENT_BIAS], device="cpu").to(wires.device)
    if wire.block > 1:
        headers = _headers(wire, wires, rows)
        largest = wire.top if wire.is_integer else wire.top / 2
        highest = headers.abs().amax().to(torch.float32) * largest
        return torch.stack([headers.signbit().any().to(torch.int64), exponent_of(highest)])
    # As integers, which are compared several times as fast, magnitudes have the same order.
    least_inf = torch.tensor(math.inf, dtype=wire.payload, device="cpu").view(torch.int16).item()
    worst = highest = torch.zeros((), dtype=torch.int16, device=wires.device)
    for row, count, numel in rows.whole():
        for (some,) in _cut(_payload(wire, wires, rows)[row : row + count, :numel]):
            bits = some.view(torch.int16) & 0x7FFF
            most = bits.amax()
            if not on_host(wires) or most >= least_inf:
                worst = torch.maximum(worst, most)
                most = torch.where(bits >= least_inf, 0, bits).amax()
            highest = torch.maximum(highest, most)
    nonfinite = (worst >= least_inf).to(torch.int64)
    return torch.stack([nonfinite, exponent_of(highest.view(wire.payload).to(torch.float32))])


def _headers(wire: WireFormat, wires: Tensor, rows: Rows) -> Tensor:
    """Headers of rows as bfloat16, (rows, headers); a view."""
    count = wire.headers(rows.length, rows.extra)
    return wires[:, : count * wire.header_bytes].view(torch.bfloat16)


def _payload(wire: WireFormat, wires: Tensor, rows: Rows) -> Tensor:
    """Elements of rows as they are on the wire, (rows, elements); a view."""
    start = wire.payload_start(rows.length, rows.extra)
    return wires[:, start : start + rows.length * wire.payload.itemsize].view(wire.payload)


# -- writing ----------------------------------------------------------------------------------


def _encode_plain(
    wire: WireFormat, values: Tensor, out: Tensor, rows: Rows, divisor: float
) -> None:
    payload = _payload(wire, out, rows)
    if rows.total < rows.count * rows.length:
        out.zero_()
    for row, count, numel in rows.whole():
        given = _rows_of(values, rows, row, count, numel)
        target = payload[row : row + count, :numel]
        if divisor == 1:
            target.copy_(given)
        elif wire.payload is torch.float16:
            # torch's fp16_compress_hook to the bit: it casts, then divides in fp16.
            target.copy_(given).div_(divisor)
        else:
            for some, place in _cut(given, target):
                place.copy_(some.to(torch.float32) * (1 / divisor))


def _rows_of(values: Tensor, rows: Rows, row: int, count: int, numel: int) -> Tensor:
    """Rows of a flat tensor, (rows, elements); a view."""
    start = values.storage_offset() + rows.start + row * rows.stride
    return values.as_strided((count, numel), (max(rows.stride, 1), 1), start)


def _cut(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut matrices of equal shape, and whatever lies behind it, alike into what fits the cache."""
    count, numel = matrices[0].shape[:2]
    each = matrices[0].shape[2:].numel()
    if not on_host(matrices[0]) or count * numel * each <= PIECE:
        yield matrices
    elif numel * each >= PIECE:
        step = PIECE // each
        for row in range(count):
            for at in range(0, numel, step):
                yield tuple(matrix[row : row + 1, at : at + step] for matrix in matrices)
    else:
        step = max(1, PIECE // (numel * each))
        for row in range(0, count, step):
            yield tuple(matrix[row : row + step] for matrix in matrices)


def _encode_blocks(
    wire: WireFormat, values: Tensor, out: Tensor, rows: Rows, shift: int, divisor: float
) -> None:
    """Write whole blocks, then those of what is split; ``shift`` is of the splits' positions."""
    headers, payload = _headers(wire, out, rows), _payload(wire, out, rows)
    out[:, : wire.payload_start(rows.length, rows.extra)].zero_()
    write = write_blocks if on_host(values) else write_any_blocks
    for row, count, numel in rows.whole():
        whole = numel // BLOCK
        if not whole:
            continue
        given = _rows_of(values, rows, row, count, whole * BLOCK).unflatten(1, (whole, BLOCK))
        target = payload[row : row + count, : whole * BLOCK].unflatten(1, (whole, BLOCK))
        # The last dimension goes along as it is.
        for some, place, header in _cut(given, target, headers[row : row + count, :whole]):
            write(wire, some, 1 / divisor, header, place)
    if rows.splits is not None:
        _encode_splits(wire, values, headers, payload, rows.splits, shift, 1 / divisor)


def _encode_splits(
    wire: WireFormat,
    values: Tensor,
    headers: Tensor,
    payload: Tensor,
    splits: Splits,
    shift: int,
    inverse: float,
) -> None:
    lanes, blocks = _lanes(splits), len(splits.header)
    given = values[splits.position.unsqueeze(1) - shift + lanes].to(torch.float32)
    of = splits.first.unsqueeze(1) + splits.local.gather(1, lanes)
    divided = given * inverse if inverse != 1 else given
    bad = ~torch.isfinite(divided)
    magnitude = torch.where(bad, 0.0, divided.abs())
    amax = magnitude.new_zeros(blocks).scatter_reduce_(0, of.view(-1), magnitude.view(-1), "amax")
    worst = amax.new_zeros(blocks).scatter_reduce_(0, of.view(-1), bad.float().view(-1), "amax")
    unit = unit_of(wire, amax.clamp(max=wire.limit), inverse)
    marked = torch.where(worst > 0, -unit, unit).to(torch.bfloat16)
    headers[splits.header_row, splits.header] = marked
    reciprocal = unit.reciprocal()[of]
    scaled = scaled_to(wire, given, divided, bad, reciprocal, inverse).to(wire.payload)
    _bits(payload)[splits.row.unsqueeze(1), splits.column.unsqueeze(1) + lanes] = _bits(scaled)


def _lanes(splits: Splits) -> Tensor:
    """Which of its 256 elements each lane reads: the last one again where there are fewer."""
    every = torch.arange(BLOCK, device=splits.row.device)
    return torch.minimum(every.unsqueeze(0), splits.length.unsqueeze(1) - 1)


def _bits(payload: Tensor) -> Tensor:
    """One-byte floats as integers, for indexing."""
    return payload.view(torch.int8) if payload.dtype.itemsize == 1 else payload


# -- reading ----------------------------------------------------------------------------------


def _decode(wire: WireFormat, wires: Tensor, values: Tensor, rows: Rows, shift: int) -> None:
    headers = _headers(wire, wires, rows) if wire.block > 1 else None
    payload = _payload(wire, wires, rows)
    for row, count, numel in rows.whole():
        if headers is None:
            target = _rows_of(values, rows, row, count, numel)
            target.copy_(payload[row : row + count, :numel])
            continue
        whole = numel // BLOCK
        if not whole:
            continue
        target = _rows_of(values, rows, row, count, whole * BLOCK).unflatten(1, (whole, BLOCK))
        given = payload[row : row + count, : whole * BLOCK].unflatten(1, (whole, BLOCK))
        for place, some, header in _cut(target, given, headers[row : row + count, :whole]):
            if place.dtype is torch.float32:
                read_blocks(wire, header, some, place)
            else:
                place.copy_(
                    read_blocks(wire, header, some, torch.empty_like(some, dtype=torch.float32))
                )
    if rows.splits is not None and headers is not None:
        read = _split_values(wire, wires, rows, rows.splits)
        _put_splits(values, read, rows.splits, shift)


def _split_values(wire: WireFormat, wires: Tensor, rows: Rows, splits: Splits) -> Tensor:
    """Return what is split, decoded: fp32 (splits, 256), the last element again where it ends.

    Args:
        wire: The format.
        wires: uint8 (rows, bytes).
        rows: Where they lie.
        splits: Those of the rows.
    """
    headers, payload = _headers(wire, wires, rows), _bits(_payload(wire, wires, rows))
    lanes = _lanes(splits)
    unit = headers[splits.header_row, splits.header].to(torch.float32)
    of = splits.first.unsqueeze(1) + splits.local.gather(1, lanes)
    given = payload[splits.row.unsqueeze(1), splits.column.unsqueeze(1) + lanes]
    return read_lanes(wire, unit[of], given.view(wire.payload))


def _put_splits(values: Tensor, read: Tensor, splits: Splits, shift: int) -> None:
    values[splits.position.unsqueeze(1) - shift + _lanes(splits)] = read.to(values.dtype)


# -- sums -------------------------------------------------------------------------------------


def _sum_whole(
    wire: WireFormat, wires: Tensor, total: Tensor, rows: Rows, first: int, memory: Tensor
) -> None:
    """Write the sum of whole blocks from element ``first`` on to ``total``, fp32, on a host."""
    payload = _payload(wire, wires, rows)[:, first : first + total.numel()]
    if wire.block == 1:
        total.copy_(payload[0])
        for each in payload[1:]:
            total.add_(each)
        return
    whole = total.numel() // BLOCK
    if not whole:
        return
    headers = _headers(wire, wires, rows)[:, first // BLOCK : first // BLOCK + whole]
    blocks = payload[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))
    target = total[: whole * BLOCK].view(whole, BLOCK)
    scratch = memory[: whole * BLOCK].view(whole, BLOCK)
    read_blocks(wire, headers[0], blocks[0], target)
    for header, block in zip(headers[1:], blocks[1:], strict=True):
        unit = header.to(torch.float32)
        if bool((unit < 0).any()):
            target.add_(read_blocks(wire, header, block, scratch))
        else:
            # Products are exact, so that this is the same sum with a pass less.
            read_payload(wire, block, scratch)
            target.addcmul_(scratch, unit.unsqueeze(1))


def _read_whole(wire: WireFormat, wires: Tensor, out: Tensor, rows: Rows) -> None:
    """Read whole blocks of wires of the same row, (wires, elements), at once."""
    payload = _payload(wire, wires, rows)[:, : rows.total]
    if wire.block == 1:
        out.copy_(payload)
        return
    whole = rows.total // BLOCK
    if whole:
        blocks = payload[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))
        target = out[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))
        read_blocks(wire, _headers(wire, wires, rows)[:, :whole], blocks, target)


def _read_splits_of_all(wire: WireFormat, wires: Tensor, out: Tensor, rows: Rows) -> None:
    """Read what is split in wires of the same row, (wires, elements), at once."""
    splits = rows.splits
    if splits is None or wire.block == 1:
        return
    headers, payload = _headers(wire, wires, rows), _bits(_payload(wire, wires, rows))
    lanes = _lanes(splits)
    of = splits.first.unsqueeze(1) + splits.local.gather(1, lanes)
    unit = headers[:, splits.header].to(torch.float32)[:, of]
    columns = splits.column.unsqueeze(1) + lanes
    out[:, columns] = read_lanes(wire, unit, payload[:, columns].view(wire.payload))
