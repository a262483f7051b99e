"""The scaler's one message: its words, the collective that sums them, and over which ranks.

One all-reduce over int64 words, whose number depends on the group and on what its ranks have agreed
on before, so it has the same length on every rank whatever a rank holds or calls. It is a SUM,
because NCCL has no OR: a rank adds only bits of its own, so the sum is a union.

::

    upper 32 bits of each word   the digest: a number made of what must be the same on every rank
    lower 32 bits                for each optimizer a bit for each rank: whether it overflowed there
    rows, where it takes them    for each rank three words: its part of a gradient norm and its
                                 largest gradient as float64, and a check of what counts as replica

The ranks agree if the digests sum up to ``size`` times what this rank sent. It is a hash, so ranks
that differ may pass as equal, with a chance of about 2**-32. On the host several optimizers share a
word, because each of the first words costs gloo another round; on a device each has its own, so
that packing and reading are a few kernels and nothing is uploaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distamp import host
from distamp.errors import LockstepError
from distamp.gradients import flag_of, merged
from distamp.scaler.groups import Group, Layout

__all__ = [
    "ROW",
    "Reply",
    "exchange",
    "exchange_nothing",
    "gather",
    "gather_rows",
]

#: Words of a row: the part of a norm, the largest gradient, the check.
ROW = 3
_HALF = 32
_LOW = 2**_HALF - 1


class Reply:
    """What all ranks sent, summed; read on the host only when somebody asks.

    Args:
        summed: The reduced words.
        digest: What this rank sent in the upper half of each.
        group: The ranks.
        layout: Of the message.
        optimizers: How many it was about.
        tail: Words at its end, of which the first counts the ranks that sent something.
    """

    def __init__(
        self,
        summed: Tensor,
        digest: int,
        group: Group,
        layout: Layout,
        optimizers: int,
        tail: int = 0,
    ) -> None:
        self._summed = summed
        self._layout = layout
        self._optimizers = optimizers
        self.present = int(summed[-tail].item()) if tail else group.size
        self._expected: int = digest * self.present & _LOW
        self._words: list[int] | None = None
        self._on_host: host.HostCopy | None = None
        self.global_ranks = group.global_ranks
        if group.on_host:
            self._words = summed.tolist()
        else:
            self._on_host = host.HostCopy(summed)

    @property
    def known(self) -> bool:
        """Whether the host has the words already."""
        return self._words is not None

    def _read(self) -> list[int]:
        if self._words is None:
            assert self._on_host is not None
            self._words = [int(word) for word in self._on_host.values()]
        return self._words

    @property
    def in_agreement(self) -> bool:
        """Whether all ranks sent the same digest; may wait."""
        return bool((self._read()[0] >> _HALF & _LOW) == self._expected)

    def overflowed(self, optimizer: int) -> list[int]:
        """Return the ranks, by their global numbers, on which an optimizer overflowed; may wait."""
        found = self._layout.found(self._read(), optimizer)
        return [rank for place, rank in enumerate(self.global_ranks) if found >> place & 1]

    def flags(self, device: torch.device) -> list[Tensor]:
        """Return a 0-d float32 flag for each optimizer, exactly 0 or 1, without waiting.

        Where the host has not read the words, a digest that differs sets all flags.
        """
        layout = self._layout
        if self._words is not None:
            words = self._words
            return [flag_of(layout.found(words, i) > 0, device) for i in range(self._optimizers)]
        summed = self._summed
        if summed.numel() != layout.words:
            summed = summed[: layout.words]
        differs = summed.ne(_signed(self._expected << _HALF))
        if layout.for_one > 1:
            differs = differs.view(layout.capacity, layout.for_one).any(1)
        flags = host.moved(differs, device, torch.float32)
        return list(flags.unbind())[: self._optimizers]

    def differs(self) -> Tensor:
        """Return whether some rank sent another digest: 0-d bool, without waiting."""
        upper = self._summed[:1].view(torch.int32)[1]
        return upper.ne(_signed(self._expected << _HALF) >> _HALF)

    def rows(self) -> Tensor:
        """Return every rank's row, int64 of shape (ranks, 3), without waiting."""
        return self._rows_in(self._summed)

    def rows_on_host(self) -> Tensor:
        """Return the same on the host; may wait."""
        if host.is_host(self._summed.device):
            return self.rows()
        return self._rows_in(torch.tensor(self._read(), dtype=torch.int64, device="cpu"))

    def replicas_agree(self) -> bool:
        """Return whether replicas have the same gradients, by their rows; may wait."""
        return not self.rows_on_host()[:, 2].sum()

    def _rows_in(self, words: Tensor) -> Tensor:
        start, size = self._layout.words, self._layout.size
        return words[start : start + size * ROW].view(size, ROW)


# -- the collective --------------------------------------------------------------------------------

_SUM = dist.AllreduceOptions()
_SUM.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)


def exchange(
    group: Group,
    digest: int,
    flags: Sequence[Sequence[Tensor]],
    row: Tensor | None,
    *,
    takes_rows: bool,
    tail: Sequence[int] = (),
) -> Reply:
    """Send this rank's words and return what all ranks sent.

    Args:
        group: The ranks to agree with.
        digest: 32 bits that all ranks must send alike.
        flags: For each optimizer its local flags, one for each device that holds gradients.
        row: int64 of shape (3,), this rank's part of a norm.
        takes_rows: Whether the message takes rows; the same on all ranks.
        tail: Words for ranks that have no more inputs; the same number on all ranks.

    Raises:
        LockstepError: A peer died, or did not call within the group's timeout.
    """
    layout = group.layout()
    pack = _host_words if group.on_host else _device_words
    packed = pack(group, layout, digest, flags)
    if takes_rows:
        rows = torch.zeros(group.size, ROW, dtype=torch.int64, device=group.device)
        if row is not None:
            rows[group.rank] = host.moved(row, group.device)
        packed = torch.cat((packed, rows.view(-1)))
    if tail:
        words = torch.tensor(tail, dtype=torch.int64, device="cpu")
        packed = torch.cat((packed, words.to(group.device)))
    _sum(group, packed)
    return Reply(packed, digest, group, layout, len(flags), len(tail))


def exchange_nothing(group: Group, tail: int) -> list[int]:
    """Take part in a message with nothing to say; return the sum of its last ``tail`` words."""
    length = group.layout().words + group.size * ROW + tail
    packed = torch.zeros(length, dtype=torch.int64, device=group.device)
    _sum(group, packed)
    return [int(word) for word in packed[-tail:].tolist()]


def _host_words(
    group: Group, layout: Layout, digest: int, flags: Sequence[Sequence[Tensor]]
) -> Tensor:
    words = [digest << _HALF] * layout.words
    for optimizer, of_devices in enumerate(flags):
        for flag in of_devices:
            if flag.item():
                word, bit = layout.bit(optimizer, group.rank)
                words[word] |= 1 << bit
    return torch.tensor([_signed(word) for word in words], dtype=torch.int64, device="cpu")


def _device_words(
    group: Group, layout: Layout, digest: int, flags: Sequence[Sequence[Tensor]]
) -> Tensor:
    found = [merged(of_devices, group.device) for of_devices in flags]
    if len(found) < layout.capacity:
        # Made anew: one that is kept was maybe made on another stream, and is not there yet.
        found += [flag_of(False, group.device)] * (layout.capacity - len(found))
    bits = torch.stack(found).to(torch.int64)
    if layout.for_one > 1:
        words = bits.new_zeros(layout.capacity, layout.for_one)
        words[:, group.rank // _HALF] = bits << group.rank % _HALF
        bits = words.view(-1)
    else:
        bits = bits.mul_(1 << group.rank)
    return bits.add_(_signed(digest << _HALF))


def _sum(group: Group, packed: Tensor) -> None:
    try:
        work = group.process_group.allreduce([packed], _SUM)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise LockstepError(
            f"rank {group.global_rank} lost its peers while agreeing on found_inf: a rank died, "
            "its scaler is not enabled, or it did not make the same scaler call within the group's "
            f"timeout ({error})"
        ) from error


def gather_rows(group: Group, row: Tensor | None) -> Tensor:
    """Return every rank's row, zeros for None, in a collective of their own."""
    mine = torch.zeros(ROW, dtype=torch.int64, device="cpu") if row is None else row
    mine = mine.to(group.device)
    everyone = torch.empty(group.size * ROW, dtype=torch.int64, device=group.device)
    dist.all_gather_into_tensor(everyone, mine, group=group.process_group)
    return everyone.view(group.size, ROW)


def gather(group: Group, value: Any) -> list[Any]:
    """Return every rank's ``value``, by rank of the group; used off the fast path only."""
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def _signed(word: int) -> int:
    """Return the lower 64 bits as int64 has them."""
    word &= 2**64 - 1
    return word - 2**64 if word >> 63 else word
