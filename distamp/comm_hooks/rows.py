"""Where the rows of a message, and the blocks in them, lie in a flat tensor; integers alone.

A block is at most 256 elements that share a header. Blocks begin at multiples of 256 from the start
of a row, and at every boundary between two parameters: a block never holds parts of two, so a small
parameter is not rounded to a unit that its neighbours need. Where a boundary lies within 256
elements, these are *split*, and the headers of their further blocks follow those of the others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["BLOCK", "Rows", "Splits", "one_row"]

BLOCK = 256


@dataclass(frozen=True, eq=False)
class Splits:
    """The 256 elements here and there that are split into several blocks, or end early.

    Args:
        row: int64 (splits,), the row that each lies in.
        column: int64 (splits,), its first element in the row; a multiple of 256.
        position: int64 (splits,), the same in the flat tensor.
        length: int64 (splits,), how many of its 256 elements there are.
        local: uint8 (splits, 256), which of its blocks each element is in.
        first: int64 (splits,), the number of its first block, counted over all splits.
        parts: int64 (splits,), how many blocks it is.
        header_row: int64 (blocks,), the row of each block's header.
        header: int64 (blocks,), the place of each block's header in that row.
        table: int32 (rows * blocks a row,): which split it is, -1 for whole blocks.
    """

    row: Tensor
    column: Tensor
    position: Tensor
    length: Tensor
    local: Tensor
    first: Tensor
    parts: Tensor
    header_row: Tensor
    header: Tensor
    table: Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of equal length in a flat tensor; the last of them may be shorter, or empty.

    Args:
        start: The first element of the first row.
        stride: From one row's first element to the next one's.
        length: Elements of a row.
        count: How many rows.
        total: Elements of all rows together.
        extra: Headers of a row beyond one for each 256 elements.
        splits: Where there are any.
    """

    start: int
    stride: int
    length: int
    count: int
    total: int
    extra: int = 0
    splits: Splits | None = field(default=None, repr=False)

    @property
    def blocks(self) -> int:
        """Headers of a row without the extra ones."""
        return -(-self.length // BLOCK)

    def in_row(self, row: int) -> int:
        """Return how many elements a row has."""
        return min(max(self.total - row * self.length, 0), self.length)

    def whole(self) -> list[tuple[int, int, int]]:
        """Return (first row, rows, elements) of the rows that are full, then of one that is not."""
        full = min(self.total // self.length, self.count) if self.length else 0
        rest = self.total - full * self.length
        found = [(0, full, self.length)] if full else []
        return [*found, (full, 1, rest)] if rest else found

    def split_at(
        self, boundaries: Sequence[int], device: torch.device, extra: int | None = None
    ) -> Rows:
        """Return these rows with blocks that begin at ``boundaries``.

        Args:
            boundaries: Where parameters begin in the flat tensor, ascending.
            device: Where the tensor lies.
            extra: How many extra headers a row has; None for as many as are needed.
        """
        found = [_cuts(self, row, boundaries) for row in range(self.count)]
        needed = max((sum(len(cuts) for _, cuts, _ in row) for row in found), default=0)
        extra = needed if extra is None else extra
        splits = _splits(self, found, device) if any(found) else None
        return Rows(self.start, self.stride, self.length, self.count, self.total, extra, splits)


def one_row(length: int, device: torch.device, boundaries: Sequence[int] = ()) -> Rows:
    """Return a flat tensor as one row."""
    return Rows(0, length, length, 1, length).split_at(boundaries, device)


# Of one row: (first element of 256, boundaries within them, how many of them there are).
_Cuts = list[tuple[int, list[int], int]]


def _cuts(rows: Rows, row: int, boundaries: Sequence[int]) -> _Cuts:
    """Find the 256 elements of a row that are more than one block, or less."""
    base, length = rows.start + row * rows.stride, rows.in_row(row)
    inside: dict[int, list[int]] = {}
    for place in boundaries[
        bisect_right(boundaries, base) : bisect_left(boundaries, base + length)
    ]:
        offset = place - base
        cuts = inside.setdefault(offset - offset % BLOCK, [])
        if offset % BLOCK and offset % BLOCK not in cuts[-1:]:
            cuts.append(offset % BLOCK)
    if length % BLOCK:
        inside.setdefault(length - length % BLOCK, [])
    ordered = sorted(inside.items())
    kept = ((at, cuts, min(BLOCK, length - at)) for at, cuts in ordered)
    return [each for each in kept if each[1] or each[2] < BLOCK]


def _splits(rows: Rows, found: list[_Cuts], device: torch.device) -> Splits:
    numbers: list[list[int]] = [[] for _ in range(8)]
    row, column, position, lengths, first, parts, header_row, header = numbers
    local = bytearray()
    table = torch.full((rows.count * rows.blocks,), -1, dtype=torch.int32, device="cpu")
    for number, cuts_of_row in enumerate(found):
        extra = rows.blocks
        for at, cuts, length in cuts_of_row:
            table[number * rows.blocks + at // BLOCK] = len(row)
            row.append(number)
            column.append(at)
            position.append(rows.start + number * rows.stride + at)
            lengths.append(length)
            first.append(len(header))
            parts.append(len(cuts) + 1)
            header += [at // BLOCK, *range(extra, extra + len(cuts))]
            header_row += [number] * (len(cuts) + 1)
            extra += len(cuts)
            edges = [0, *cuts, BLOCK]
            for block, (begin, end) in enumerate(pairwise(edges)):
                local += bytes([block]) * (end - begin)
    made = (torch.tensor(each, dtype=torch.int64, device="cpu") for each in numbers)
    a, b, c, d, e, f, g, h = (each.to(device) for each in made)
    which = torch.frombuffer(local, dtype=torch.uint8).view(-1, BLOCK).to(device)
    return Splits(a, b, c, d, which, e, f, g, h, table.to(device))
