"""Average a flat tensor over ranks through a wire: send in parts, sum in fp32, gather.

Each rank owns one part of every piece of a bucket. All ranks send it their wires of that part, it
adds them up in fp32 and sends the wire of the mean to everybody: the bytes of a ring all-reduce,
but each gradient is rounded twice however many ranks there are, never in a sum. Every rank reads
the same bytes, its own too, so the result is the same to the bit on all of them.

Two ranks, and buckets too small to be worth a second wait, send the whole wire to each other and
add up by themselves; then each gradient is rounded once.

Pieces follow each other: while one is on the way, the next is encoded, and while the last one of a
bucket is, the first of the next bucket. All ranks go through the same steps in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from distamp.comm_hooks.channel import Channel, row_bytes, words_differ
from distamp.comm_hooks.order import Staged, through
from distamp.comm_hooks.stats import Account
from distamp.comm_hooks.wire import WireFormat

__all__ = ["Exchange", "Feedback", "Outcome"]

# Elements of one piece: long enough that the turns of a collective do not show, which wait for each
# other, short enough that several are on the way in a bucket of 25 MB.
PIECE = 1 << 21
# Of one piece something is sent, of the one before gathered, and of the one before that read.
SLOTS = 3
# Up to here a second wait costs more than sending the whole wire to everybody.
DIRECT_BYTES = 1 << 15
# Of a gathered row: whether it holds inf or NaN, its largest exponent, two lockstep words.
HEADER_WORDS = 4
HEADER_BYTES = 8 * HEADER_WORDS
# Means from here on may have been summed up to inf by ranks that held only finite values.
_NEAR_OVERFLOW = 126


class Outcome(NamedTuple):
    """What all ranks know after an exchange, without having asked.

    Args:
        nonfinite: 0-d bool, whether a mean is inf or NaN.
        largest_exponent: 0-d int64, floor(log2) of the largest mean; of block formats alone.
        apart: 0-d bool, whether ranks sent different lockstep words.
    """

    nonfinite: Tensor
    largest_exponent: Tensor
    apart: Tensor


class Feedback(Protocol):
    """Carries what rounding took from one exchange into the next."""

    def compensated(self, stage: str, start: int, values: Tensor) -> Tensor:
        """Return ``values`` and what is owed to them as a new fp32 tensor."""

    def keep(self, stage: str, start: int, owed: Tensor, arrived: Tensor) -> None:
        """Remember what of ``owed``, the values at ``start``, has not arrived."""


class _Piece(NamedTuple):
    """A part of the bucket that goes through the exchange as one.

    Args:
        start: Its first element in the bucket.
        numel: Its elements.
        part: The elements that each rank owns of it; the last ranks may own fewer, or none.
        slot: Which of the buffers it uses.
    """

    start: int
    numel: int
    part: int
    slot: int

    def owned_by(self, rank: int) -> slice:
        """Return where the elements that ``rank`` owns lie in the bucket."""
        first = min(rank * self.part, self.numel)
        last = min(first + self.part, self.numel)
        return slice(self.start + first, self.start + last)


class Exchange:
    """Averages flat tensors of one dtype and device over the ranks of a channel.

    Args:
        wire: The format on the way.
        channel: The ranks.
        account: Where bytes and waiting are counted.
    """

    def __init__(self, wire: WireFormat, channel: Channel, account: Account) -> None:
        self.wire = wire
        self.channel = channel
        self._account = account
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._next_slot = 0

    def average_(self, values: Tensor, words: Tensor, feedback: Feedback | None = None) -> Outcome:
        """Replace ``values`` by their mean over all ranks.

        Args:
            values: 1-D, contiguous, floating; of the same length on all ranks.
            words: int64 of shape (2,), to be the same on all ranks that take part; a first word
                of 0 says nothing.
            feedback: What earlier exchanges of the same values owe.
        """
        return through(self.averaging(values, words, feedback))

    def averaging(
        self, values: Tensor, words: Tensor, feedback: Feedback | None = None
    ) -> Staged[Outcome]:
        """Do as `average_`, in stages: between them the first piece of another may be sent."""
        size = self.channel.size
        direct = self._direct(values.numel())
        run = _Run(self, values, words, feedback, direct)
        steps: Sequence[Callable[[_Piece], None]] = (
            (run.send_whole, run.add_up) if direct else (run.scatter, run.reduce, run.read)
        )
        # Those of the bucket before may still be on their way.
        pieces = self._pieces(values.numel(), self._next_slot)
        self._next_slot = (self._next_slot + len(pieces)) % SLOTS
        turns = len(pieces) + len(steps) - 1
        for turn in range(turns):
            if turn == turns - 1:
                yield
            for late, step in enumerate(steps):
                if 0 <= turn - late < len(pieces):
                    step(pieces[turn - late])
            if turn == 0:
                yield
        self._account.exchanges += 1
        self._account.sent[self.wire.name] += run.sent
        whole = values.numel() * values.element_size()
        self._account.uncompressed += 2 * (size - 1) * whole // size
        return run.outcome()

    def segments(self, numel: int) -> list[tuple[str, int, int]]:
        """Return what a `Feedback` of a bucket is asked for: stage, first element, length."""
        pieces = self._pieces(numel)
        found = [("mine", piece.start, piece.numel) for piece in pieces]
        if not self._direct(numel):
            owned = [piece.owned_by(self.channel.rank) for piece in pieces]
            found += [("owned", where.start, where.stop - where.start) for where in owned]
        return found

    def _direct(self, numel: int) -> bool:
        """Whether a bucket goes to all ranks at once."""
        size = self.channel.size
        return size == 2 or self.wire.nbytes(numel) * size <= DIRECT_BYTES

    def _pieces(self, numel: int, slot: int = 0) -> list[_Piece]:
        """Cut a bucket into pieces of whole blocks for every rank."""
        size = 1 if self._direct(numel) else self.channel.size
        length = _piece_numel(self.wire, self.channel.size)
        pieces: list[_Piece] = []
        for start in range(0, numel, length):
            count = min(length, numel - start)
            part = self.wire.part_numel(count, size)
            pieces.append(_Piece(start, count, part, (slot + len(pieces)) % SLOTS))
        return pieces

    def buffer(self, name: str, slot: int, nbytes: int) -> Tensor:
        """Return ``nbytes`` of memory that is used again for the next piece of this slot."""
        held = self._buffers.get((name, slot))
        if held is None or held.numel() < nbytes:
            held = torch.empty(nbytes, dtype=torch.uint8, device=self.channel.device)
            self._buffers[name, slot] = held
        return held[:nbytes]

    def wait(self, work: Any) -> None:
        """Wait for a collective: the host on the host, the stream on a device."""
        start = time.perf_counter()
        work.wait()
        if self.channel.on_host:
            self._account.waiting += time.perf_counter() - start


class _Run:
    """One bucket on its way through an `Exchange`."""

    def __init__(
        self,
        exchange: Exchange,
        values: Tensor,
        words: Tensor,
        feedback: Feedback | None,
        direct: bool,
    ) -> None:
        self.exchange = exchange
        self.wire, self.channel = exchange.wire, exchange.channel
        self.values, self.words, self.feedback, self.direct = values, words, feedback, direct
        self.works: dict[tuple[str, int], Any] = {}
        self.headers: list[Tensor] = []
        self.late: list[Tensor] = []
        self.sent = 0

    # -- by way of owners ------------------------------------------------------------------------

    def scatter(self, piece: _Piece) -> None:
        """Send every rank what it owns of this piece."""
        size = self.channel.size
        nbytes = self.wire.nbytes(piece.part) * size
        sent = self.exchange.buffer("sent", piece.slot, nbytes)
        received = self.exchange.buffer("received", piece.slot, nbytes)
        values = self.values[piece.start : piece.start + piece.numel]
        used = self.wire.nbytes(piece.numel)
        self._encode("mine", piece.start, values, sent[:used], size)
        sent[used:].zero_()
        self.works["scatter", piece.slot] = self.channel.all_to_all(received, sent)
        self.sent += nbytes * (size - 1) // size

    def reduce(self, piece: _Piece) -> None:
        """Add up what this rank owns, and send the mean to everybody."""
        self._finish("scatter", piece)
        size, nbytes = self.channel.size, self.wire.nbytes(piece.part)
        received = self.exchange.buffer("received", piece.slot, nbytes * size).view(size, nbytes)
        row = self._row(piece, nbytes)
        wire = row[HEADER_BYTES : HEADER_BYTES + nbytes]
        if self.feedback is None:
            self.wire.sum_encoded(received, piece.part, wire)
        else:
            total = self.exchange.buffer("total", 0, 4 * piece.part).view(torch.float32)
            self._add(received, total)
            mine = piece.owned_by(self.channel.rank)
            self._encode("owned", mine.start, total, wire, 1.0)
        self._send_row(piece, row, wire)

    def read(self, piece: _Piece) -> None:
        """Read the means of all owners."""
        for rank, row in enumerate(self._rows(piece, self.wire.nbytes(piece.part))):
            where = piece.owned_by(rank)
            numel = where.stop - where.start
            if numel:
                wire = row[HEADER_BYTES : HEADER_BYTES + self.wire.nbytes(numel)]
                self.wire.decode(wire, numel, self.values[where])

    # -- directly --------------------------------------------------------------------------------

    def send_whole(self, piece: _Piece) -> None:
        """Send everybody this rank's own wire."""
        nbytes = self.wire.nbytes(piece.numel)
        row = self._row(piece, nbytes)
        wire = row[HEADER_BYTES : HEADER_BYTES + nbytes]
        values = self.values[piece.start : piece.start + piece.numel]
        self._encode("mine", piece.start, values, wire, self.channel.size)
        self._send_row(piece, row, wire)

    def add_up(self, piece: _Piece) -> None:
        """Add up the wires of all ranks, in their order, so that all ranks get the same."""
        nbytes = self.wire.nbytes(piece.numel)
        values = self.values[piece.start : piece.start + piece.numel]
        total = values
        if values.dtype is not torch.float32:
            total = self.exchange.buffer("total", 0, 4 * piece.numel).view(torch.float32)
        self._add(self._rows(piece, nbytes)[:, HEADER_BYTES : HEADER_BYTES + nbytes], total)
        # Wires of finite values may add up to inf, which no header knows of.
        near = self.headers[-1][:, 1].amax() >= _NEAR_OVERFLOW
        if not self.channel.on_host or near:
            self.late.append(_any_nonfinite(total))
        if total is not values:
            values.copy_(total)

    # -- both ------------------------------------------------------------------------------------

    def _encode(self, stage: str, start: int, values: Tensor, out: Tensor, divisor: float) -> None:
        if self.feedback is None:
            self.wire.encode(values, out, divisor=divisor)
            return
        owed = self.feedback.compensated(stage, start, values)
        self.wire.encode(owed, out, divisor=divisor)
        arrived = self.wire.decode(out, owed.numel()).mul_(divisor)
        self.feedback.keep(stage, start, owed, arrived)

    def _add(self, wires: Tensor, total: Tensor) -> None:
        """Write the fp32 sum of several wires, in the order of ranks, to ``total``."""
        self.wire.decode(wires[0], total.numel(), total)
        for wire in wires[1:]:
            self.wire.add_decoded(wire, total)

    def _row(self, piece: _Piece, nbytes: int) -> Tensor:
        return self.exchange.buffer("row", piece.slot, row_bytes(HEADER_BYTES, nbytes))

    def _send_row(self, piece: _Piece, row: Tensor, wire: Tensor) -> None:
        header = row[:HEADER_BYTES].view(torch.int64)
        header[0] = self.wire.has_nonfinite(wire)
        # Formats without blocks have no exponents; in a sum of them anything may happen.
        header[1] = self.wire.largest_exponent(wire) if self.wire.block > 1 else _NEAR_OVERFLOW
        header[2:] = self.words
        size = self.channel.size
        gathered = self.exchange.buffer("gathered", piece.slot, row.numel() * size)
        self.works["gather", piece.slot] = self.channel.gather(gathered, row)
        self.sent += row.numel() * (size - 1)

    def _rows(self, piece: _Piece, nbytes: int) -> Tensor:
        """Wait for the rows of all ranks, and note their headers."""
        self._finish("gather", piece)
        size, length = self.channel.size, row_bytes(HEADER_BYTES, nbytes)
        rows = self.exchange.buffer("gathered", piece.slot, length * size).view(size, length)
        self.headers.append(rows[:, :HEADER_BYTES].view(torch.int64).clone())
        return rows

    def _finish(self, what: str, piece: _Piece) -> None:
        self.exchange.wait(self.works.pop((what, piece.slot)))

    def outcome(self) -> Outcome:
        """Return what the headers of all pieces say."""
        headers = torch.stack(self.headers)
        nonfinite = headers[..., 0].any()
        for late in self.late:
            nonfinite = nonfinite | late
        return Outcome(nonfinite, headers[..., 1].amax(), words_differ(headers[0, :, 2:]))


def _piece_numel(wire: WireFormat, size: int) -> int:
    """Return the elements of a piece: whole blocks for every rank."""
    unit = wire.block * size
    return max(1, PIECE // unit) * unit


def _any_nonfinite(values: Tensor) -> Tensor:
    # A norm runs at memory speed. Squares may overflow where the values do not.
    found: Tensor = ~torch.linalg.vector_norm(values).isfinite()
    if values.device.type == "cpu" and not found:
        return found
    return ~values.isfinite().all()
