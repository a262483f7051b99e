"""The scaler's one message: found-inf flags of all ranks, and whether the ranks are in lockstep.

One all-reduce over int64 words, whose number depends on the size of the group and on what was
agreed before, so it has the same shape on every rank whatever a rank holds or calls. It is a SUM,
because NCCL has no OR: a rank adds only bits of its own, so the sum is a union. The words are few
because gloo's ring sends each of the first ``2 * size`` by itself, and each wakes a thread.

::

    fields   of ``size`` bits, a bit for each rank: an error; scale() was called; and a flag for
             each optimizer, with room for as many as `Traffic` says
    digest   a number made of call, iteration, settings, optimizers and loss scale: the upper half
             of the one word if the fields fit into the lower half, else a word of its own
    extras   where there is room: six float64 for each rank, as bits: the five words of a gradient
             norm and the largest gradient

The ranks agree if the digest sums up to ``size`` times what this rank sent. It is a hash, so ranks
that differ may pass as equal, with a chance below 2**-29.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distamp.errors import LockstepError
from distamp.scaler import host
from distamp.scaler.host import HostCopy
from distamp.scaler.process_group import Group

__all__ = [
    "Message",
    "Reply",
    "exchange",
    "gather",
    "gather_extras",
    "joined_extras",
    "merged",
    "parted_extras",
]

_ERROR, _SCALED, _FLAGS = 0, 1, 2
_NORM_WORDS = 5
_EXTRAS = _NORM_WORDS + 1
_PRIME = 2**31 - 1


class _Layout(NamedTuple):
    """Where things lie in a message.

    Args:
        fields: How many fields there are.
        words: int64 words before the extras; the digest is at the top of the last.
        digest: The bits of that word which are the digest's.
    """

    fields: int
    words: int
    digest: int

    @classmethod
    def of(cls, group: Group) -> _Layout:
        """Return what all ranks of ``group`` send now."""
        return _layout(group.size, group.traffic.flag_slots)


@functools.lru_cache(maxsize=16)
def _layout(size: int, flag_slots: int) -> _Layout:
    fields = _FLAGS + flag_slots
    if fields * size <= 32:
        return _Layout(fields, 1, 2**64 - 2**32)
    return _Layout(fields, 1 + -(-fields * size // 64), 2**64 - 1)


class Message(NamedTuple):
    """What one rank says.

    Args:
        digest: Call, iteration, settings and optimizers as one number.
        scale: 0-d float32, the loss scale.
        flags: For each optimizer its local flags, one for each device that holds gradients.
        error: Whether this rank found something it must raise.
        scaled: Whether this rank has ever called ``scale()``.
        extras: float64 of shape (6,): the five words of a gradient norm and the largest gradient.
    """

    digest: int
    scale: Tensor
    flags: Sequence[Sequence[Tensor]]
    error: bool = False
    scaled: bool = True
    extras: Tensor | None = None


class Reply:
    """What all ranks said together; read on the host only when somebody asks.

    Args:
        packed: The reduced words.
        sent: This rank's own last word: an int where the words lie on the host, else int64 of
            shape (1,).
        group: The ranks.
        optimizers: Flags in the message.
    """

    def __init__(self, packed: Tensor, sent: Tensor | int, group: Group, optimizers: int) -> None:
        self._packed = packed
        self._sent = sent
        self._group = group
        self._optimizers = optimizers
        self._layout = layout = _Layout.of(group)
        self._values: tuple[int, int] | None = None
        self._host: HostCopy | None = None
        self.reconciled = False  # set where ranks rightly hold different optimizers
        if isinstance(sent, int):
            self._values = sent, _joined(packed.tolist()[: layout.words])
        else:
            self._host = HostCopy(torch.cat((sent, packed[: layout.words])))

    @property
    def known(self) -> bool:
        """Whether the host has the values already."""
        return self._values is not None

    def _read(self) -> tuple[int, int]:
        """Return the last word as sent, and the sum of all words as one number; may wait."""
        if self._values is None:
            assert self._host is not None
            sent, *words = map(int, self._host.values())
            self._values = sent, _joined(words)
        return self._values

    def _ranks(self, field: int) -> int:
        """Return a field: bit ``r`` is set if rank ``r`` set it."""
        size = self._group.size
        return self._read()[1] >> field * size & (1 << size) - 1

    def flags(self, device: torch.device) -> list[Tensor]:
        """Return a 0-d float32 flag for each optimizer, exactly 0 or 1; a mismatch sets all."""
        if self._values is not None:
            bad = not self.in_lockstep or self.any_error
            return [
                (torch.ones if bad or self._ranks(_FLAGS + index) else torch.zeros)(
                    (), device=device
                )
                for index in range(self._optimizers)
            ]
        size, packed, layout, sent = self._group.size, self._packed, self._layout, self._sent
        assert isinstance(sent, Tensor)
        _, masks = _bits(size, layout, self._group.rank, packed.device)
        fields = (packed[: layout.words] & masks[: _FLAGS + self._optimizers]).ne(0).any(1)
        digest = _signed(layout.digest)
        last = packed[layout.words - 1]
        bad_ranks = (last & digest).ne((sent[0] & digest) * size)
        bad_ranks = bad_ranks | fields[_ERROR] | ~fields[_SCALED]
        flags = fields[_FLAGS:].logical_or(bad_ranks)
        return list(flags.to(device=device, dtype=torch.float32, non_blocking=True).unbind())

    def first_rank(self, index: int) -> int | None:
        """Return the lowest rank of the group on which optimizer ``index`` overflowed."""
        ranks = self._ranks(_FLAGS + index)
        return (ranks & -ranks).bit_length() - 1 if ranks else None

    @property
    def in_lockstep(self) -> bool:
        """Whether all ranks sent the same, or rightly hold different optimizers."""
        sent, words = self._read()
        digest, last = self._layout.digest, words >> 64 * (self._layout.words - 1)
        return self.reconciled or not ((last & digest) - (sent & digest) * self._group.size) % 2**64

    @property
    def any_error(self) -> bool:
        """Whether some rank found something it must raise."""
        return self._ranks(_ERROR) > 0

    @property
    def any_scaled(self) -> bool:
        """Whether some rank has ever called ``scale()``."""
        return self._ranks(_SCALED) > 0

    def extras(self) -> Tensor:
        """Return every rank's extras, float64 of shape (ranks, 6), without waiting."""
        words = self._packed[self._layout.words :]
        return words.view(torch.float64).view(self._group.size, _EXTRAS)


def exchange(group: Group, message: Message, *, room: bool) -> Reply:
    """Send this rank's message and return what all ranks said.

    Args:
        group: The ranks to agree with.
        message: What this rank says.
        room: Whether the message has room for extras; must be the same on all ranks.

    Raises:
        LockstepError: A peer died, or did not call within the group's timeout.
    """
    packed, sent = _packed(group, message, room)
    try:
        work = group.process_group.allreduce([packed], _SUM)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise LockstepError(
            f"rank {group.global_rank} lost its peers while agreeing on found_inf: a rank died, or "
            f"did not make the same scaler call within the group's timeout ({error})"
        ) from error
    return Reply(packed, sent, group, len(message.flags))


def gather_extras(group: Group, extras: Tensor) -> Tensor:
    """Return every rank's extras in a collective of their own, where a message had no room."""
    mine = extras.to(group.device)
    everyone = torch.empty(group.size * _EXTRAS, dtype=mine.dtype, device=group.device)
    dist.all_gather_into_tensor(everyone, mine, group=group.process_group)
    return everyone.view(group.size, _EXTRAS)


def gather(group: Group, value: Any) -> list[Any]:
    """Return every rank's ``value``, by rank of the group; used off the fast path only."""
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def joined_extras(norms: Tensor | None, largest: Tensor | None) -> Tensor | None:
    """Return what a rank says besides flags, as float64 of shape (6,); None if it is nothing."""
    given = norms if norms is not None else largest
    if given is None:
        return None
    extras = torch.zeros(_EXTRAS, dtype=torch.float64, device=given.device)
    if norms is not None:
        extras[:_NORM_WORDS] = norms
    if largest is not None:
        extras[_NORM_WORDS] = largest
    return extras


def parted_extras(extras: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return norm words, float64 (ranks, 5), and the largest gradient of all, 0-d float32."""
    largest = extras[:, _NORM_WORDS].max().to(device, torch.float32, non_blocking=True)
    return extras[:, :_NORM_WORDS], largest


def merged(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return one 0-d flag on ``device`` for the flags of several devices."""
    first, *others = flags
    total = first if first.device == device else first.to(device, non_blocking=True)
    for flag in others:
        total = torch.maximum(total, flag.to(device, non_blocking=True))
    return total


_SUM = dist.AllreduceOptions()
_SUM.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)


def _packed(group: Group, m: Message, room: bool) -> tuple[Tensor, Tensor | int]:
    """Return this rank's words, and the last of those before the extras by itself."""
    size, rank, device, layout = group.size, group.rank, group.device, _Layout.of(group)
    bits = m.scale.view(torch.int32)
    sent: Tensor | int
    if host.is_host(device):
        value = (m.error << _ERROR * size | m.scaled << _SCALED * size) << rank
        for index, flags in enumerate(m.flags):
            if any(flag.item() for flag in flags):
                value |= 1 << (_FLAGS + index) * size + rank
        top = 64 * layout.words - layout.digest.bit_count()
        digest = m.digest + _mixed(int(bits.item())) & (1 << layout.digest.bit_count()) - 1
        words = _split(value | digest << top, layout.words)
        packed, sent = torch.tensor(words, dtype=torch.int64), words[-1]
    else:
        found = [
            torch.full((), float(m.error), device=device),
            torch.full((), float(m.scaled), device=device),
            *(merged(flags, device) for flags in m.flags),
        ]
        mine, _ = _bits(size, layout, rank, device)
        on = torch.stack(found).gt(0).unsqueeze(1)
        packed = torch.where(on, mine[: len(found)], 0).sum(0)
        mixed = _mixed(bits.to(device, torch.int64, non_blocking=True))
        packed[-1:] += mixed + _signed(m.digest) << 64 - layout.digest.bit_count()
        sent = packed[-1:].clone()
    if not room:
        return packed, sent
    extras = torch.zeros(size, _EXTRAS, dtype=torch.float64, device=device)
    if m.extras is not None:
        extras[rank] = m.extras.to(device, non_blocking=True)
    return torch.cat((packed, extras.view(-1).view(torch.int64))), sent


def _mixed(bits: Any) -> Any:
    """Spread the bits of a positive float32, an int or an int64 tensor, over 31 bits.

    Squared, so that scales of several ranks cannot make up for each other in a sum.
    """
    spread = bits * 1103515245 % _PRIME
    return spread * spread % _PRIME


def _signed(word: int) -> int:
    """Return the lower 64 bits as int64 has them."""
    return (word + 2**63) % 2**64 - 2**63


def _split(value: int, words: int) -> list[int]:
    """Return a number as signed 64-bit words, the lowest first."""
    return [_signed(value >> 64 * word) for word in range(words)]


def _joined(words: Sequence[int]) -> int:
    """Return what `_split` took apart."""
    value = 0
    for index, word in enumerate(words):
        value |= word % 2**64 << 64 * index
    return value


@functools.lru_cache(maxsize=16)
def _bits(size: int, layout: _Layout, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the bit of ``rank`` in each field, and all bits of each field, as rows of words."""
    starts = [field * size for field in range(layout.fields)]
    mine = [_split(1 << start + rank, layout.words) for start in starts]
    all_ranks = [_split((1 << size) - 1 << start, layout.words) for start in starts]
    return torch.tensor(mine, device=device), torch.tensor(all_ranks, device=device)
