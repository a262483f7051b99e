"""Parts of error messages and log lines: counts, ranks, and similar names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "choices_text",
    "count_text",
    "lines_by_rank",
    "names_with_ranks_text",
    "ranks_text",
    "similar_names",
]

#: The largest number of lines about ranks in one message.
_MAX_LINES = 8


def choices_text(names: Iterable[str]) -> str:
    """Return names in quotes, with commas between them."""
    quoted = map(repr, names)
    return ", ".join(quoted)


def count_text(number: int, noun: str) -> str:
    """Return a number with its noun: "1 step", "2 steps"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks in order, with each run of three or more as a range: "ranks 0-16, 18, 19"."""
    runs: list[list[int]] = []
    last = None
    for rank in sorted(ranks):
        if last is None or rank > last + 1:
            runs.append([])
        runs[-1].append(rank)
        last = rank
    parts: list[str] = []
    count = 0
    for run in runs:
        count += len(run)
        if len(run) > 2:
            parts.append(f"{run[0]}-{run[-1]}")
        else:
            parts.extend(map(str, run))
    text = ", ".join(parts)
    return f"rank {text}" if count == 1 else f"ranks {text}"


def names_with_ranks_text(rank_names: Iterable[tuple[int, str]], max_names: int = 4) -> str:
    """Return names with the ranks of each, such as "head.weight (ranks 0-3), bias (rank 1)".

    Args:
        rank_names: Pairs of a rank and a name.
        max_names: The number of different names that the text has at most.
    """
    ranks_by_name: dict[str, list[int]] = {}
    for rank, name in rank_names:
        ranks_by_name.setdefault(name, []).append(rank)
    parts: list[str] = []
    for name, ranks in ranks_by_name.items():
        ranks_of_name = ranks_text(ranks)
        parts.append(f"{name} ({ranks_of_name})")
    num_left = len(parts) - max_names
    if num_left > 0:
        parts = parts[:max_names]
        parts.append(count_text(num_left, "other"))
    return ", ".join(parts)


def lines_by_rank(text_by_rank: Iterable[tuple[int, str]]) -> list[str]:
    """Return an indented line for each text, with all ranks that have it.

    The line of the fewest ranks comes first, because they are most likely the cause.

    Args:
        text_by_rank: Pairs of a rank and its text.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in text_by_rank:
        ranks_of.setdefault(text, []).append(rank)
    groups: list[tuple[int, int, str]] = []
    for text, ranks in ranks_of.items():
        groups.append((len(ranks), min(ranks), text))
    groups.sort()
    lines: list[str] = []
    num_left = 0
    for count, _, text in groups:
        if len(lines) == _MAX_LINES:
            num_left += count
        else:
            ranks = ranks_of[text]
            lines.append(f"  {ranks_text(ranks)}: {text}")
    if num_left:
        noun = count_text(num_left, "more rank")
        lines.append(f"  {noun}: other values")
    return lines


def similar_names(name: object, candidates: Sequence[str], cutoff: float = 0.6) -> str:
    """Return a sentence with the candidates that are most similar to a name.

    The case of letters does not matter, and torch's name of a dtype counts as our short one.
    """
    original: dict[str, str] = {}
    for candidate in candidates:
        original[candidate.lower()] = candidate
    short = str(name).lower()
    short = short.replace("bfloat", "bf")
    short = short.replace("float", "fp")
    if short in original:
        return f"Did you mean {original[short]!r}?"
    matches = difflib.get_close_matches(short, original, cutoff=cutoff)
    if not matches:
        return "There is no similar name."
    quoted = [repr(original[match]) for match in matches]
    alternatives = " or ".join(quoted)
    return f"Did you mean {alternatives}?"
