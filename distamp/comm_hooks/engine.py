"""One engine for all exchanges: send in parts, add up in fp32, and gather or keep the sums.

Each rank owns a part of every piece. All ranks send it their wires of that part, and it adds them
up in fp32. Shards are kept so. Of an average it sends the wire of the mean to everybody: the bytes
of a ring all-reduce, but each gradient is rounded twice however many ranks there are, never in a
sum. Every rank reads the same bytes, its own too, so the result is the same to the bit on all.

Two ranks, and tensors too small to be worth a second wait, send the whole wire to each other and
add up by themselves; then each gradient is rounded once.

Pieces follow each other: while one is on the way, the next is encoded, and while the last one of a
bucket is, the first of the next bucket. All ranks go through the same steps in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from distamp.comm_hooks.arithmetic import Arithmetic, arithmetic_for
from distamp.comm_hooks.blocks import EXPONENT_BIAS
from distamp.comm_hooks.channel import Channel
from distamp.comm_hooks.error_feedback import Feedback
from distamp.comm_hooks.headers import (
    HEADER_BYTES,
    ReduceResult,
    code_of,
    compare,
    make_headers,
    other_exchanges,
    row_bytes,
    words_differ,
)
from distamp.comm_hooks.layout import Layout, Piece, Route, plan
from distamp.comm_hooks.order import Staged, through
from distamp.comm_hooks.stats import Account
from distamp.comm_hooks.wire import AS_FP16, WIRE_FORMATS, WireFormat
from distamp.errors import LockstepError

__all__ = ["Engine", "FeedbackStore"]

# Of one piece something is sent, of the one before gathered, and of the one before that read.
SLOTS = 3
# Where sums of contributions are added up again, as .grad does over several backward passes.
LATER_TERMS = 10
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_FORMATS = (*WIRE_FORMATS, AS_FP16.name)


class FeedbackStore(Protocol):
    """Carries what rounding took from one exchange into the next."""

    def before(self, stage: str, start: int, numel: int) -> Feedback:
        """Return what rounding took from the elements of a stage before."""

    def keep(self, stage: str, start: int, residual: Tensor) -> None:
        """Remember what rounding took from the elements of a stage now."""


class Engine:
    """Averages or reduce-scatters flat tensors of one dtype and device over a channel's ranks.

    Args:
        wire: The format on the way.
        channel: The ranks.
        account: Where bytes and waiting are counted.
    """

    def __init__(self, wire: WireFormat, channel: Channel, account: Account) -> None:
        self.wire = wire
        self.channel = channel
        self.account = account
        self.arithmetic: Arithmetic
        self.arithmetic, account.arithmetic = arithmetic_for(channel.device)
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._next_slot = 0
        self._count = 0
        self._agreed: set[tuple[int, ...]] = set()

    # -- layouts ---------------------------------------------------------------------------------

    def layout(
        self,
        name: str,
        index: int,
        numel: int,
        dtype: torch.dtype,
        boundaries: Sequence[int] = (),
        *,
        shards: bool = False,
    ) -> Layout:
        """Return how a tensor is exchanged; the caller keeps it.

        Args:
            name: What it is, for messages.
            index: Its number, the same on all ranks.
            numel: Its elements.
            dtype: Its dtype.
            boundaries: Where parameters begin in it, ascending.
            shards: Whether each rank keeps its part alone.
        """
        channel = self.channel
        route, pieces = plan(
            self.wire,
            numel,
            channel.size,
            channel.rank,
            channel.device,
            boundaries,
            shards=shards,
        )
        edges = code_of(tuple(boundaries)) if self.wire.block > 1 else 0
        facts = (index, numel, _DTYPES.index(dtype), _FORMATS.index(self.wire.name), edges)
        return Layout(name, route, numel, code_of(route.value, *facts), facts, pieces)

    def agreed(self, layout: Layout) -> bool:
        """Return whether the ranks have compared a layout."""
        return layout.facts in self._agreed or self.channel.size == 1

    def facts_of_all(self, layout: Layout) -> Tensor:
        """Return what every rank is about to exchange, a row each, for `check`."""
        channel = self.channel
        row = torch.tensor(layout.facts, dtype=torch.int64, device=channel.device)
        rows = row.new_empty((channel.size, len(row)))
        channel.gather(rows.view(torch.uint8).view(-1), row.view(torch.uint8)).wait()
        return rows

    def check(self, layout: Layout, rows: Tensor) -> None:
        """Refuse, on all ranks, that they exchange different gradients; nothing of them was sent.

        Raises:
            LockstepError: they do.
        """
        compare(
            rows.tolist(),
            self.channel.ranks,
            lambda facts: _describe(layout, facts),
            "exchange different gradients",
            "Give every rank the same model, bucket_cap_mb and wire format",
        )
        self._agreed.add(layout.facts)

    # -- exchanges -------------------------------------------------------------------------------

    def exchange(
        self,
        values: Tensor,
        layout: Layout,
        words: Tensor,
        *,
        out: Tensor | None = None,
        divisor: float | None = None,
        terms: int | None = None,
        before: ReduceResult | None = None,
        feedback: FeedbackStore | None = None,
    ) -> ReduceResult:
        """Do as `staged`, at once."""
        return through(
            self.staged(
                values,
                layout,
                words,
                out=out,
                divisor=divisor,
                terms=terms,
                before=before,
                feedback=feedback,
            )
        )

    def staged(
        self,
        values: Tensor,
        layout: Layout,
        words: Tensor,
        *,
        out: Tensor | None = None,
        divisor: float | None = None,
        terms: int | None = None,
        before: ReduceResult | None = None,
        feedback: FeedbackStore | None = None,
    ) -> Staged[ReduceResult]:
        """Replace ``values`` by their mean over all ranks, or write this rank's part to ``out``.

        In stages: between them the first piece of another exchange may be sent.

        Args:
            values: 1-D, contiguous, floating; of the same length on all ranks.
            layout: That of ``values``.
            words: Of a scaler, `lockstep_words`.
            out: 1-D, contiguous, floating: where this rank's part goes, of a layout of shards.
            divisor: By which each contribution is divided in fp32 before it is rounded; None for
                the number of ranks.
            terms: How many contributions are added up, here and later: where they are so large that
                the sum may be inf, the result says so. None for the exact answer, of an average.
            before: What the exchange that ``values`` come from found.
            feedback: What rounding took from earlier exchanges of the same layout.

        Raises:
            LockstepError: a rank is in another exchange; on the host.
        """
        size = self.channel.size
        run = _Run(self, values, layout, words, out, float(divisor or size), before, feedback)
        steps = run.steps()
        pieces = layout.pieces
        # Those of the exchange before may still be on their way.
        slot, self._next_slot = self._next_slot, (self._next_slot + len(pieces)) % SLOTS
        turns = len(pieces) + len(steps) - 1 if pieces else 0
        for turn in range(turns):
            if turn == turns - 1:
                yield
            for late, step in enumerate(steps):
                at = turn - late
                if 0 <= at < len(pieces):
                    step(pieces[at], at, (slot + at) % SLOTS)
            if turn == 0:
                yield
        self.account.exchanges += 1
        self.account.sent[self.wire.name] += run.sent
        self.account.uncompressed += self._uncompressed(values, layout.route)
        return run.result(terms)

    def _uncompressed(self, values: Tensor, route: Route) -> int:
        """Bytes that torch's own collective sends for the same."""
        size = self.channel.size
        # gloo makes a reduce-scatter of an all-reduce.
        once = route is Route.SHARDS and self.channel.backend_name != "gloo"
        nbytes = values.numel() * values.element_size()
        return (1 if once else 2) * (size - 1) * nbytes // size

    def number(self) -> int:
        """Count an exchange, the same on all ranks."""
        self._count += 1
        return self._count

    def buffer(self, name: str, slot: int, nbytes: int) -> Tensor:
        """Return ``nbytes`` of memory that is used again for the next piece of this slot."""
        kept = self._buffers.get((name, slot))
        if kept is None or kept.numel() < nbytes:
            kept = torch.empty(nbytes, dtype=torch.uint8, device=self.channel.device)
            self._buffers[name, slot] = kept
        return kept[:nbytes]

    def wait(self, work: Any) -> None:
        """Wait for a collective: the host on the host, the stream on a device."""
        start = time.perf_counter()
        work.wait()
        if self.channel.on_host:
            self.account.waiting += time.perf_counter() - start


class _Run:
    """One tensor on its way through an `Engine`."""

    def __init__(
        self,
        engine: Engine,
        values: Tensor,
        layout: Layout,
        words: Tensor,
        out: Tensor | None,
        divisor: float,
        before: ReduceResult | None,
        feedback: FeedbackStore | None,
    ) -> None:
        self.engine = engine
        self.wire, self.channel = engine.wire, engine.channel
        self.arithmetic = engine.arithmetic
        self.values, self.layout, self.out = values, layout, out
        self.divisor, self.before, self.feedback = divisor, before, feedback
        self.which = (layout.code, engine.number())
        nonfinite = None if before is None else before.nonfinite
        count = len(layout.pieces)
        # A header for each piece that is sent, and one for each mean.
        self.own = make_headers(2 * count, self.which, words, nonfinite).view(2, count, -1)
        self.works: dict[tuple[str, int], Any] = {}
        self.senders: list[Tensor] = []
        self.means: list[Tensor] = []
        self.late: list[Tensor] = []
        self.sent = 0

    def steps(self) -> Sequence[Callable[[Piece, int, int], None]]:
        """Return what each piece goes through, in this order."""
        if self.layout.route is Route.WHOLE:
            return (self.send_whole, self.add_up)
        if self.layout.route is Route.OWNERS:
            return (self.scatter, self.reduce, self.read)
        return (self.scatter, self.keep)

    # -- to owners -------------------------------------------------------------------------------

    def scatter(self, piece: Piece, number: int, slot: int) -> None:
        """Send every rank its row of a piece."""
        size, nbytes = self.channel.size, row_bytes(piece.wire_bytes)
        sent = self.engine.buffer("sent", slot, nbytes * size)
        received = self.engine.buffer("received", slot, nbytes * size)
        self._encode("mine", piece, self.own[0, number], sent.view(size, nbytes))
        self.works["scatter", number] = self.channel.all_to_all(received, sent)
        self.sent += nbytes * (size - 1)

    def _received(self, piece: Piece, number: int, slot: int) -> Tensor:
        """Wait for this rank's row from all ranks, and return their wires."""
        self.engine.wait(self.works.pop(("scatter", number)))
        size, nbytes = self.channel.size, row_bytes(piece.wire_bytes)
        rows = self.engine.buffer("received", slot, nbytes * size).view(size, nbytes)
        self._note(rows, self.senders)
        return rows[:, HEADER_BYTES:]

    def keep(self, piece: Piece, number: int, slot: int) -> None:
        """Add up what this rank owns."""
        assert self.out is not None
        wires = self._received(piece, number, slot)
        part = self.out[piece.start : piece.start + piece.numel]
        self.arithmetic.sum_rows(self.wire, wires, part, piece.mine)

    def reduce(self, piece: Piece, number: int, slot: int) -> None:
        """Add up what this rank owns, and send the mean to everybody."""
        wires = self._received(piece, number, slot)
        row = self.engine.buffer("row", slot, row_bytes(piece.wire_bytes)).view(1, -1)
        head = self.own[1, number]
        start = piece.owned_by(self.channel.rank).start
        given = self._before("owned", start, piece.mine.total)
        left = self.arithmetic.sum_encode_rows(
            self.wire, wires, row[:, HEADER_BYTES:], piece.mine, head=head[:2], feedback=given
        )
        self._after("owned", start, left)
        row[0, :HEADER_BYTES].view(torch.int64).copy_(head)
        self._gather(piece, row, number, slot)

    def read(self, piece: Piece, number: int, slot: int) -> None:
        """Read the means of all owners."""
        rows = self._rows(piece, number, slot)
        self._note(rows, self.means)
        self.arithmetic.decode_rows(self.wire, rows[:, HEADER_BYTES:], self.values, piece.rows)

    # -- whole -----------------------------------------------------------------------------------

    def send_whole(self, piece: Piece, number: int, slot: int) -> None:
        """Send everybody this rank's own wire, written where it is read again."""
        row = self._gathered(piece, slot)[self.channel.rank :][:1]
        self._encode("mine", piece, self.own[0, number], row)
        self._gather(piece, row, number, slot)

    def add_up(self, piece: Piece, number: int, slot: int) -> None:
        """Add up the wires of all ranks, in their order, so that all ranks get the same."""
        rows = self._rows(piece, number, slot)
        self._note(rows, self.senders)
        part = self.values[piece.start : piece.start + piece.numel]
        self.arithmetic.sum_rows(self.wire, rows[:, HEADER_BYTES:], part, piece.mine)
        # Wires of finite values may add up to inf, which no header knows of.
        if self.channel.on_host and self.senders[-1][:, 1].amax() >= EXPONENT_BIAS - 1:
            self.late.append(~part.isfinite().all())

    # -- both ------------------------------------------------------------------------------------

    def _encode(self, stage: str, piece: Piece, head: Tensor, rows: Tensor) -> None:
        """Write the wires of a piece of this rank's own values, and their headers."""
        given = self._before(stage, piece.rows.start, piece.rows.total)
        left = self.arithmetic.encode_rows(
            self.wire,
            self.values,
            rows[:, HEADER_BYTES:],
            piece.rows,
            divisor=self.divisor,
            head=head[:2],
            feedback=given,
        )
        self._after(stage, piece.rows.start, left)
        rows[:, :HEADER_BYTES].view(torch.int64).copy_(head)

    def _before(self, stage: str, start: int, numel: int) -> Feedback | None:
        return None if self.feedback is None else self.feedback.before(stage, start, numel)

    def _after(self, stage: str, start: int, residual: Tensor | None) -> None:
        if self.feedback is not None and residual is not None:
            self.feedback.keep(stage, start, residual)

    def _gather(self, piece: Piece, row: Tensor, number: int, slot: int) -> None:
        """Send everybody a row."""
        gathered = self._gathered(piece, slot).view(-1)
        self.works["gather", number] = self.channel.gather(gathered, row.view(-1))
        self.sent += row.numel() * (self.channel.size - 1)

    def _gathered(self, piece: Piece, slot: int) -> Tensor:
        """Return where the rows of all ranks are gathered."""
        size, nbytes = self.channel.size, row_bytes(piece.wire_bytes)
        # By way of owners, what was sent of this piece is as long, and has arrived.
        return self.engine.buffer("sent", slot, nbytes * size).view(size, nbytes)

    def _rows(self, piece: Piece, number: int, slot: int) -> Tensor:
        """Wait for the rows of all ranks, and return them."""
        self.engine.wait(self.works.pop(("gather", number)))
        return self._gathered(piece, slot)

    def _note(self, rows: Tensor, found: list[Tensor]) -> None:
        """Remember headers; the host stops here where a rank is in another exchange."""
        headers = rows[:, :HEADER_BYTES].view(torch.int64).clone()
        found.append(headers)
        if self.channel.on_host and bool(other_exchanges(headers, self.which).any()):
            raise LockstepError(self._other(headers))

    def _other(self, headers: Tensor) -> str:
        others = other_exchanges(headers, self.which).tolist()
        ranks = [str(r) for r, other in zip(self.channel.ranks, others, strict=True) if other]
        return (
            f"this rank exchanges {self.layout.name}, and rank {', '.join(ranks)} something else: "
            "run the same backward passes of the same model on every rank"
        )

    def result(self, terms: int | None) -> ReduceResult:
        """Return what the headers of all pieces say."""
        device = self.channel.device
        if not self.senders:
            nothing = torch.zeros((), dtype=torch.bool, device=device)
            none = torch.full((), -EXPONENT_BIAS, dtype=torch.int64, device=device)
            return ReduceResult(nothing, none, nothing, nothing)
        headers = torch.stack([*self.senders, *self.means])
        nonfinite = (headers[..., 0] != 0).any()
        largest = headers[len(self.senders) if self.means else 0 :, :, 1].amax()
        if terms is not None or (self.layout.route is Route.WHOLE and not self.channel.on_host):
            # A power of two, so up to twice too careful.
            spare = LATER_TERMS if terms is not None else 0
            spare += ((terms or self.channel.size) - 1).bit_length()
            senders = headers[: len(self.senders), :, 1]
            nonfinite = nonfinite | (senders.amax() >= EXPONENT_BIAS - spare)
        for late in self.late:
            nonfinite = nonfinite | late
        mismatched = words_differ(headers[0, :, 4:])
        if self.before is not None:
            mismatched = mismatched | self.before.mismatched
        if self.channel.on_host:
            in_step = torch.zeros((), dtype=torch.bool, device=device)
            return ReduceResult(nonfinite, largest, mismatched, in_step)
        # Nothing of this is to be used: the step is skipped, and the next call says why.
        out_of_step = other_exchanges(headers, self.which).any()
        nonfinite = nonfinite | mismatched | out_of_step
        return ReduceResult(nonfinite, largest, mismatched, out_of_step)


def _describe(layout: Layout, facts: Sequence[int]) -> str:
    index, numel, dtype, wire, edges = facts
    text = f"bucket {index} of {numel} {_DTYPES[dtype]} elements as {_FORMATS[wire]}"
    same = tuple(facts[:4]) == layout.facts[:4] and edges != layout.facts[4]
    return text + (" with other parameters in it" if same else "")
