"""How gradients that are exchanged together are cut: into pieces, and each piece into rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from distamp.comm_hooks.rows import BLOCK, Rows
from distamp.comm_hooks.wire import WireFormat

__all__ = ["Layout", "Piece", "Route", "plan"]

# Elements of one piece: long enough that the turns of a collective do not show, which wait for each
# other, short enough that several are on the way in a bucket of 25 MB.
PIECE = 1 << 22
# What a rank sends to another of one piece, at least: with many ranks, pieces grow.
ROW = 1 << 15
# A shard is cut into at least so many pieces, whose buffers are then small beside it.
SHARD_PIECES, SHARD_PIECE = 16, 1 << 16
# Up to here a second wait costs more than sending the whole wire to everybody.
DIRECT_BYTES = 1 << 15


class Route(Enum):
    """Which way the elements of a piece go.

    WHOLE: everybody sends everybody the whole wire, and adds up by itself.
    OWNERS: each rank gets its part from all, adds up, and sends everybody the mean.
    SHARDS: each rank gets its part from all, adds up, and keeps it.
    """

    WHOLE = "whole"
    OWNERS = "owners"
    SHARDS = "shards"


class Piece(NamedTuple):
    """What goes through an exchange as one.

    Args:
        rows: A row for each rank: what it owns; or, where wires go whole, the one row.
        mine: This rank's row, as a tensor of its own.
        start: Its first element; of an output that holds this rank's part alone, where `SHARDS`.
        numel: Its elements; of that output.
        wire_bytes: Bytes of the wire of a row.
    """

    rows: Rows
    mine: Rows
    start: int
    numel: int
    wire_bytes: int

    def owned_by(self, rank: int) -> slice:
        """Return where the elements of a rank's row lie in the flat tensor."""
        first = self.rows.start + rank * self.rows.stride
        return slice(first, first + self.rows.in_row(rank))


@dataclass(frozen=True, eq=False)
class Layout:
    """How a flat tensor is exchanged; the same on all ranks but for what is this rank's own.

    Args:
        name: What is exchanged, for messages.
        route: The way.
        numel: Elements of the tensor.
        code: A number that ranks have in common where all of this is the same.
        facts: What ranks compare once: numbers that say what is exchanged.
        pieces: In order.
    """

    name: str
    route: Route
    numel: int
    code: int
    facts: tuple[int, ...]
    pieces: tuple[Piece, ...]


def plan(
    wire: WireFormat,
    numel: int,
    size: int,
    rank: int,
    device: torch.device,
    boundaries: Sequence[int] = (),
    *,
    shards: bool = False,
) -> tuple[Route, tuple[Piece, ...]]:
    """Cut a flat tensor.

    Args:
        wire: The format on the way.
        numel: Elements; of ``shards`` a multiple of the number of ranks.
        size: How many ranks.
        rank: This one.
        device: Where the tensor lies.
        boundaries: Where parameters begin in it, ascending.
        shards: Whether each rank keeps its part alone.
    """
    boundaries = boundaries if wire.block > 1 else ()
    if shards:
        return Route.SHARDS, tuple(_shards(wire, numel, size, rank, device, boundaries))
    whole = size == 2 or wire.nbytes(numel) * size <= DIRECT_BYTES
    parts = 1 if whole else size
    unit = BLOCK * size
    # Of equal length: a short one has as many turns as a long one.
    count = max(1, -(-numel // max(PIECE, ROW * size)))
    length = max(1, -(-numel // (count * unit))) * unit
    pieces = []
    for start in range(0, numel, length):
        count = min(length, numel - start)
        part = -(-count // parts // BLOCK) * BLOCK if parts > 1 else count
        rows = Rows(start, part, part, parts, count).split_at(boundaries, device)
        mine = 0 if whole else rank
        pieces.append(_piece(wire, rows, mine, boundaries, device, start, count))
    return (Route.WHOLE if whole else Route.OWNERS), tuple(pieces)


def _shards(
    wire: WireFormat,
    numel: int,
    size: int,
    rank: int,
    device: torch.device,
    boundaries: Sequence[int],
) -> list[Piece]:
    """Cut every rank's part alike: a piece has some columns of each."""
    part = numel // size
    most = max(SHARD_PIECE, min(max(PIECE, ROW * size), numel // SHARD_PIECES))
    columns = max(1, most // (BLOCK * size)) * BLOCK
    pieces = []
    for start in range(0, part, columns):
        count = min(columns, part - start)
        rows = Rows(start, part, count, size, count * size).split_at(boundaries, device)
        pieces.append(_piece(wire, rows, rank, boundaries, device, start, count))
    return pieces


def _piece(
    wire: WireFormat,
    rows: Rows,
    mine: int,
    boundaries: Sequence[int],
    device: torch.device,
    start: int,
    numel: int,
) -> Piece:
    first = rows.start + mine * rows.stride
    count = rows.in_row(mine)
    own = [each - first for each in boundaries if first < each < first + count]
    alone = Rows(0, rows.length, rows.length, 1, count).split_at(own, device, rows.extra)
    return Piece(rows, alone, start, numel, wire.nbytes(rows.length, rows.extra))
