"""Reduce-scatter and all-reduce by wires: sent in parts, added up in fp32 by their owners.

A rank sends each other rank the wire of that rank's part, and before it a header of its own whole
contribution, so that all ranks know of an inf or NaN wherever it is, with no collective more.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distamp.comm_hooks.channel import by_turns, row_bytes, words_differ
from distamp.comm_hooks.choice import AUTO
from distamp.comm_hooks.stats import Account
from distamp.comm_hooks.wire import WIRE_FORMATS, WireFormat
from distamp.errors import LockstepError

__all__ = ["News", "agree", "all_reduce", "reduce_scatter"]

# Of each row, int64: non-finite or not, which format, how many elements, two lockstep words.
HEADER_WORDS = 5
HEADER_BYTES = 8 * HEADER_WORDS
# Sums of this many contributions more are provided for: .grad adds up several backward passes.
MARGIN = 1 << 10
# A format that is yet to be chosen is not sent in, but agreed on.
_FORMATS = (*WIRE_FORMATS, AUTO)


class News(NamedTuple):
    """What all ranks know after an exchange, without having asked.

    Args:
        nonfinite: 0-d bool, whether any rank's values hold inf or NaN, or are so large (about
            1e34) that sums of them may.
        apart: 0-d bool, whether ranks sent different lockstep words.
    """

    nonfinite: Tensor
    apart: Tensor


def agree(name: str, numel: int, group: ProcessGroup, device: torch.device) -> None:
    """Compare format and length with all ranks of the group, once, before anything is sent.

    Args:
        name: The format on the way, or ``"auto"``.
        numel: How many elements this rank holds, of all that will be sent.
        group: The ranks.
        device: One that the group can send from.

    Raises:
        LockstepError: a rank holds another format or length; on all ranks.
    """
    mine = torch.tensor([0, _FORMATS.index(name), numel, 0, 0], device=device)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(rows, mine, group=group)
    _compare(torch.stack(rows).tolist(), name, numel, group)


def reduce_scatter(
    wire: WireFormat,
    values: Tensor,
    out: Tensor,
    group: ProcessGroup,
    *,
    divisor: float,
    account: Account,
    terms: int | None = None,
    words: Tensor | None = None,
) -> News:
    """Write this rank's part of the sum over all ranks of ``values / divisor`` to ``out``.

    Unlike ``torch.distributed.reduce_scatter_single`` it sends the wire's bytes, on gloo too,
    and every gradient is rounded once, before an fp32 sum in the order of the ranks.

    Args:
        wire: The format on the way.
        values: 1-D, contiguous, floating: a part for each rank, of equal length.
        out: 1-D, contiguous, floating: ``values.numel() / group.size()`` elements.
        group: The ranks.
        divisor: By which each contribution is divided in fp32 before it is rounded.
        account: Where bytes and waiting are counted.
        terms: How many ranks' contributions will be added up, here and later; the size of the
            group if None.
        words: int64 of shape (2,), to be the same on all ranks; a first word of 0 says nothing.

    Raises:
        LockstepError: a rank sent another format or length; on the host only.
    """
    size, part = group.size(), out.numel()
    nbytes = wire.nbytes(part)
    flat = wire.encode(_in_whole_blocks(values, size, wire.block), divisor=divisor)
    nonfinite = wire.has_nonfinite(flat, terms=(terms or size) * MARGIN)
    sent = _rows(flat.view(size, nbytes), wire, part, nonfinite, words)
    received = _all_to_all(sent, group, account)
    account.exchanges += 1
    account.sent[wire.name] += sent.numel() * (size - 1) // size
    # gloo makes a reduce-scatter of an all-reduce.
    rounds = 2 if dist.get_backend(group) == "gloo" else 1
    account.uncompressed += rounds * values.numel() * values.element_size() * (size - 1) // size
    news = _read_headers(received, wire, part, group)
    _add_up(wire, _payload(received, nbytes), out, at_once=out.device.type != "cpu")
    _note(wire, flat, account)
    return news


def all_reduce(
    wire: WireFormat,
    values: Tensor,
    group: ProcessGroup,
    *,
    divisor: float,
    account: Account,
    before: News | None = None,
    words: Tensor | None = None,
) -> News:
    """Replace ``values`` by the sum over all ranks of ``values / divisor``.

    Unlike ``torch.distributed.all_reduce`` every gradient is rounded twice, before and after the
    fp32 sum, however many ranks there are; all ranks read the same bytes.

    Args:
        wire: The format on the way.
        values: 1-D, contiguous, floating.
        group: The ranks.
        divisor: By which each contribution is divided in fp32 before it is rounded.
        account: Where bytes and waiting are counted.
        before: What the exchange that ``values`` come from brought; added to what is returned.
        words: int64 of shape (2,), to be the same on all ranks; a first word of 0 says nothing.

    Raises:
        LockstepError: a rank sent another format or length; on the host only.
    """
    size, numel = group.size(), values.numel()
    part = wire.part_numel(numel, size)
    nbytes = wire.nbytes(part)
    flat = torch.zeros(size * nbytes, dtype=torch.uint8, device=values.device)
    wire.encode(values, flat[: wire.nbytes(numel)], divisor=divisor)
    known = wire.has_nonfinite(flat, terms=size * MARGIN)
    if before is not None:
        known = known | before.nonfinite
    sent = _rows(flat.view(size, nbytes), wire, numel, known, words)
    received = _all_to_all(sent, group, account)
    news = _read_headers(received, wire, numel, group)
    mean = wire.sum_encoded(_payload(received, nbytes), part)
    row = _rows(mean.view(1, nbytes), wire, numel, news.nonfinite, words)
    _gather(received, row, group, account)
    wire.decode(_payload(received, nbytes).reshape(-1)[: wire.nbytes(numel)], numel, values)
    account.exchanges += 1
    account.sent[wire.name] += row.numel() * 2 * (size - 1)
    account.uncompressed += 2 * numel * values.element_size() * (size - 1) // size
    _note(wire, flat, account)
    if before is not None:
        news = News(news.nonfinite, news.apart | before.apart)
    return news


def _in_whole_blocks(values: Tensor, size: int, block: int) -> Tensor:
    """``values`` with each of its ``size`` parts filled up with zeros to whole blocks."""
    part = values.numel() // size
    if part % block == 0:
        return values
    rows = torch.nn.functional.pad(values.view(size, part), (0, -part % block))
    return rows.view(-1)


def _rows(
    wires: Tensor, wire: WireFormat, numel: int, nonfinite: Tensor, words: Tensor | None
) -> Tensor:
    """Each of ``wires`` behind a header, all of one aligned length."""
    count, nbytes = wires.shape
    rows = torch.empty(
        (count, row_bytes(HEADER_BYTES, nbytes)), dtype=torch.uint8, device=wires.device
    )
    header = rows[:, :HEADER_BYTES].view(torch.int64)
    header[:, 0] = nonfinite
    header[:, 1] = _FORMATS.index(wire.name)
    header[:, 2] = numel
    header[:, 3:] = 0 if words is None else words
    rows[:, HEADER_BYTES : HEADER_BYTES + nbytes] = wires
    rows[:, HEADER_BYTES + nbytes :] = 0
    return rows


def _payload(rows: Tensor, nbytes: int) -> Tensor:
    return rows[:, HEADER_BYTES : HEADER_BYTES + nbytes]


def _read_headers(rows: Tensor, wire: WireFormat, numel: int, group: ProcessGroup) -> News:
    """What the senders say; on the host also whether all sent what this rank did."""
    header = rows[:, :HEADER_BYTES].view(torch.int64)
    if rows.device.type == "cpu":
        _compare(header.tolist(), wire.name, numel, group)
    return News((header[:, 0] != 0).any(), words_differ(header[:, 3:]))


def _compare(headers: list[list[int]], name: str, numel: int, group: ProcessGroup) -> None:
    others = [
        f"rank {rank} {_FORMATS[number]} and {count}"
        for rank, (_, number, count, *_) in zip(
            dist.get_process_group_ranks(group), headers, strict=True
        )
        if (number, count) != (_FORMATS.index(name), numel)
    ]
    if others:
        raise LockstepError(
            f"this rank sends {name} and {numel} elements, but {'; '.join(others)}: register "
            "the same format on the same model on every rank"
        )


def _add_up(wire: WireFormat, wires: Tensor, out: Tensor, *, at_once: bool) -> None:
    """Write the fp32 sum of the wires to ``out``; ``at_once`` in few kernels and more memory."""
    numel = out.numel()
    if at_once:
        size = len(wires)
        padded = -(-numel // wire.block) * wire.block
        values = wire.decode(wires.reshape(-1), size * padded)
        out.copy_(values.view(size, padded).sum(0)[:numel])
        return
    total = out if out.dtype == torch.float32 else torch.empty(numel, device=out.device)
    wire.decode(wires[0], numel, total)
    for each in wires[1:]:
        wire.add_decoded(each, total)
    if total is not out:
        out.copy_(total)


def _all_to_all(sent: Tensor, group: ProcessGroup, account: Account) -> Tensor:
    """Send the r-th row to rank r, and return what was received, by rank.

    On a host to one peer after the other: gloo's own sends to all at once, and streams that share
    a link take 1.4 times as long (docs/comm_hooks_figures.md).
    """
    received = torch.empty_like(sent)
    if sent.device.type != "cpu":
        dist.all_to_all_single(received, sent, group=group)
        return received
    start = time.perf_counter()
    _by_turns(received, sent, group)
    account.waiting += time.perf_counter() - start
    return received


def _gather(received: Tensor, row: Tensor, group: ProcessGroup, account: Account) -> None:
    """Collect every rank's ``row``, of shape (1, bytes), by rank.

    On a host two ranks send to each other: gloo's ring of two takes 1.5 times as long.
    """
    start = time.perf_counter()
    if row.device.type == "cpu" and group.size() == 2:
        _by_turns(received, row.expand(2, -1), group)
    else:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(received.view(-1), row.view(-1), group=group)
    account.waiting += time.perf_counter() - start if row.device.type == "cpu" else 0.0


def _by_turns(received: Tensor, sent: Tensor, group: ProcessGroup) -> None:
    by_turns(
        received,
        sent,
        group.rank(),
        receive=lambda row, source, _: dist.irecv(row, group=group, group_src=source),
        send=lambda row, target, _: dist.isend(row, group=group, group_dst=target),
    )


def _note(wire: WireFormat, flat: Tensor, account: Account) -> None:
    """Note the largest exponent, where reading it costs nothing."""
    if flat.device.type == "cpu" and wire.block > 1:
        account.met(int(wire.largest_exponent(flat)))
