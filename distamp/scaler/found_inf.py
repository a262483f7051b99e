"""The scaler's one message: found-inf flags of all ranks, and whether the ranks are in lockstep.

One all-reduce over int64 words, whose number depends on the size of the group and on what was
agreed before, so it has the same shape on every rank whatever a rank holds or calls. It is a SUM,
because NCCL has no OR: a rank adds only bits of its own, so the sum is a union. The words are few
because gloo's ring sends each of the first ``2 * size`` by itself, and each wakes a thread.

::

    0      a number made of call, iteration, settings, optimizers and loss scale
    1...   fields of ``size`` bits, a bit for each rank: an error; scale() was called; and a flag
           for each optimizer, with room for 14 or for as many as one call ever had
    ...    where there is room: six float64 for each rank, as bits: the five words of a gradient
           norm and the largest gradient

The ranks agree if word 0 sums up to ``size`` times what this rank sent. Word 0 is a hash, so ranks
that differ may pass as equal, with a chance below 2**-30.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
_HASH = 2**62 - 1
_PRIME = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Message:
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
        sent: int64 of shape (1,), this rank's own word 0.
        group: The ranks.
        optimizers: Flags in the message.
    """

    def __init__(self, packed: Tensor, sent: Tensor, group: Group, optimizers: int) -> None:
        self._packed = packed
        self._sent = sent
        self._group = group
        self._optimizers = optimizers
        self._fields = _fields(group)
        self._words = _field_words(group)
        self._values: tuple[int, int, int] | None = None
        self._host: HostCopy | None = None
        self.reconciled = False  # set where ranks rightly hold different optimizers
        if host.is_host(packed.device):
            self._values = _joined([*sent.tolist(), *packed.tolist()[: 1 + self._words]])
        else:
            self._host = HostCopy(torch.cat((sent, packed[: 1 + self._words])))

    @property
    def known(self) -> bool:
        """Whether the host has the values already."""
        return self._values is not None

    def _read(self) -> tuple[int, int, int]:
        """Return word 0 as sent, its sum, and the fields as one number; waits if need be."""
        if self._values is None:
            assert self._host is not None
            self._values = _joined(self._host.values())
        return self._values

    def _ranks(self, field: int) -> int:
        """Return a field: bit ``r`` is set if rank ``r`` set it."""
        size = self._group.size
        return self._read()[2] >> field * size & (1 << size) - 1

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
        size, packed = self._group.size, self._packed
        _, masks = _bits(size, self._fields, self._group.rank, packed.device)
        fields = (packed[1 : 1 + self._words] & masks[: _FLAGS + self._optimizers]).ne(0).any(1)
        bad_ranks = packed[0].ne(self._sent[0] * size) | fields[_ERROR] | ~fields[_SCALED]
        flags = fields[_FLAGS:].logical_or(bad_ranks)
        return list(flags.to(device=device, dtype=torch.float32, non_blocking=True).unbind())

    def first_rank(self, index: int) -> int | None:
        """Return the lowest rank of the group on which optimizer ``index`` overflowed."""
        ranks = self._ranks(_FLAGS + index)
        return (ranks & -ranks).bit_length() - 1 if ranks else None

    @property
    def in_lockstep(self) -> bool:
        """Whether all ranks sent the same, or rightly hold different optimizers."""
        sent, total, _ = self._read()
        return self.reconciled or (total - sent * self._group.size) % 2**64 == 0

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
        words = self._packed[1 + self._words :]
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
    packed = _packed(group, message, room)
    sent = packed[:1].clone()
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
    total = flags[0].to(device, non_blocking=True)
    for flag in flags[1:]:
        total = torch.maximum(total, flag.to(device, non_blocking=True))
    return total


_SUM = dist.AllreduceOptions()
_SUM.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)


def _packed(group: Group, m: Message, room: bool) -> Tensor:
    size, rank, device = group.size, group.rank, group.device
    bits = m.scale.view(torch.int32)
    if host.is_host(device):
        set_fields = [m.error, m.scaled, *(any(f.item() for f in flags) for flags in m.flags)]
        value = sum(1 << field * size + rank for field, on in enumerate(set_fields) if on)
        words = [(m.digest & _HASH) + _mixed(int(bits.item())), *_split(value, _field_words(group))]
        packed = torch.tensor(words, dtype=torch.int64)
    else:
        on_device = _mixed(bits.to(device, torch.int64, non_blocking=True))
        found = [
            torch.full((), float(m.error), device=device),
            torch.full((), float(m.scaled), device=device),
            *(merged(flags, device) for flags in m.flags),
        ]
        mine, _ = _bits(size, _fields(group), rank, device)
        on = torch.stack(found).gt(0).unsqueeze(1)
        fields = torch.where(on, mine[: len(found)], 0).sum(0)
        packed = torch.cat(((on_device + (m.digest & _HASH)).view(1), fields))
    if not room:
        return packed
    extras = torch.zeros(size, _EXTRAS, dtype=torch.float64, device=device)
    if m.extras is not None:
        extras[rank] = m.extras.to(device, non_blocking=True)
    return torch.cat((packed, extras.view(-1).view(torch.int64)))


def _mixed(bits: Any) -> Any:
    """Spread the bits of a positive float32, an int or an int64 tensor, over 31 bits.

    Squared, so that scales of several ranks cannot make up for each other in a sum.
    """
    spread = bits * 1103515245 % _PRIME
    return spread * spread % _PRIME


def _fields(group: Group) -> int:
    return _FLAGS + group.traffic.flag_slots


def _field_words(group: Group) -> int:
    return -(-_fields(group) * group.size // 64)


def _split(value: int, words: int) -> list[int]:
    """Return the fields as signed 64-bit words."""
    data = value.to_bytes(8 * words, "little")
    return [
        int.from_bytes(data[start : start + 8], "little", signed=True)
        for start in range(0, len(data), 8)
    ]


def _joined(words: Sequence[float]) -> tuple[int, int, int]:
    sent, total, *fields = map(int, words)
    value = 0
    for index, word in enumerate(fields):
        value |= (word % 2**64) << 64 * index
    return sent, total, value


@functools.lru_cache(maxsize=16)
def _bits(size: int, fields: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the bit of ``rank`` in each field, and all bits of each field, as rows of words."""
    words = -(-fields * size // 64)
    mine = [_split(1 << field * size + rank, words) for field in range(fields)]
    all_ranks = [_split((1 << size) - 1 << field * size, words) for field in range(fields)]
    return torch.tensor(mine, device=device), torch.tensor(all_ranks, device=device)
