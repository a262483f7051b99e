"""What every row of an exchange says before its payload, and how ranks are compared by it.

A header is six int64 words: whether the sender's values hold inf or NaN, their largest exponent,
which exchange it is (a code of what is exchanged, and a count), and two words of a scaler: what
must be the same on all ranks, and the loss scale. So all ranks know of an inf or NaN wherever it
is, and of a rank that does something else, without a collective more.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distamp.comm_hooks.blocks import EXPONENT_BIAS
from distamp.errors import LockstepError

__all__ = [
    "HEADER_BYTES",
    "ReduceResult",
    "code_of",
    "compare",
    "lockstep_words",
    "make_headers",
    "other_exchanges",
    "row_bytes",
    "words_differ",
]

HEADER_WORDS = 6
HEADER_BYTES = 8 * HEADER_WORDS
_WHICH, _SCALER = slice(2, 4), slice(4, 6)
# Rows of a collective begin at multiples of this, so that what lies in them can be viewed as int64.
_ALIGNMENT = 16


class ReduceResult(NamedTuple):
    """What all ranks know after an exchange, without having asked.

    Args:
        nonfinite: 0-d bool, whether a gradient is inf or NaN, or so large that their sum may be.
        largest_exponent: 0-d int64, floor(log2) of the largest magnitude that reached every rank.
        mismatched: 0-d bool, whether ranks sent different lockstep words.
        out_of_step: 0-d bool, whether ranks were in different exchanges; on a host, where that is
            an error at once, it is False.
    """

    nonfinite: Tensor
    largest_exponent: Tensor
    mismatched: Tensor
    out_of_step: Tensor


def lockstep_words(word: int, scale: Tensor | None, device: torch.device) -> Tensor:
    """Return what an exchange says for a scaler, int64 of shape (2,).

    Args:
        word: What a scaler says of its iteration, settings and calls.
        scale: The loss scale, 0-d float32; None says nothing at all.
        device: Where the gradients lie.
    """
    words = torch.zeros(2, dtype=torch.int64, device=device)
    if scale is not None:
        words[0] = word
        words[1] = scale.view(torch.int32)
    return words


def words_differ(words: Tensor) -> Tensor:
    """Return, 0-d bool, whether ranks sent different lockstep words.

    Args:
        words: int64, a row of each rank; one whose first word is 0 says nothing.
    """
    silent = words[..., :1] == 0
    most = torch.where(silent, torch.iinfo(torch.int64).min, words).amax(-2)
    least = torch.where(silent, torch.iinfo(torch.int64).max, words).amin(-2)
    return (most > least).any()


def make_headers(
    count: int, which: tuple[int, int], words: Tensor, nonfinite: Tensor | None = None
) -> Tensor:
    """Return headers of rows that are yet to be encoded, int64 (count, words).

    Args:
        count: How many.
        which: The code and the number of the exchange.
        words: What a scaler says, `lockstep_words`.
        nonfinite: What is known of the values before they are looked at.
    """
    headers = torch.empty(count, HEADER_WORDS, dtype=torch.int64, device=words.device)
    headers[:, 0] = 0 if nonfinite is None else nonfinite
    headers[:, 1] = -EXPONENT_BIAS
    headers[:, 2] = which[0]
    headers[:, 3] = which[1]
    headers[:, _SCALER] = words
    return headers


def other_exchanges(headers: Tensor, which: tuple[int, int]) -> Tensor:
    """Return which senders are in another exchange than this rank, bool (..., ranks)."""
    mine_code, mine_count = which
    return (headers[..., 2] != mine_code) | (headers[..., 3] != mine_count)


def row_bytes(wire: int) -> int:
    """Return how long a row of a collective is that holds a header and so many bytes of wire."""
    return HEADER_BYTES + -(-wire // _ALIGNMENT) * _ALIGNMENT


def code_of(*parts: object) -> int:
    """Return a number for some values, the same on every rank that has the same."""
    return zlib.crc32(repr(parts).encode())


def compare(
    rows: Sequence[Sequence[int]],
    ranks: Sequence[int],
    text: Callable[[Sequence[int]], str],
    what: str,
    fix: str,
) -> None:
    """Refuse, on every rank alike, ranks that say different things.

    Args:
        rows: What each rank says.
        ranks: Their numbers in the default group.
        text: What a row says, in words.
        what: What the ranks do.
        fix: What to do about it.

    Raises:
        LockstepError: a rank says something else than the first; all are named.
    """
    if all(list(row) == list(rows[0]) for row in rows):
        return
    by_text: dict[str, list[int]] = {}
    for rank, row in zip(ranks, rows, strict=True):
        by_text.setdefault(text(row), []).append(rank)
    parts = (f"rank {', '.join(map(str, each))}: {line}" for line, each in by_text.items())
    raise LockstepError(f"the ranks {what}: {'; '.join(parts)}. {fix}")
