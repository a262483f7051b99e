"""Where elements go: arithmetic alone, no messages.

A bucket is divided between all ranks, each of which owns the sum of a part. Of shards and weights
each rank owns its own. Blocks begin where parameters do. What blocks would make larger (in int8,
parameters of less than 65 elements) is not encoded: plans call it small, and it is sent as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from distamp.comm_hooks.formats import BLOCK, CommFormat, Places

__all__ = ["Part", "Plan", "bucket_plan", "shard_plan", "weight_plan"]

# Shards are reduced in so many parts, of which two are on their way at once, that buffers take at
# most a quarter of the gradients in fp32; but not in parts of fewer elements.
PARTS, PARTS_OF_TWO_LEVELS = 9, 18
LEAST_PART = 1 << 17


@dataclass(frozen=True, eq=False)
class Part:
    """What is sent at once: a bucket, weights, or some of a shard.

    Args:
        mine: The rows that this rank sends to other hosts, in what its host has of them.
        whole: Where all rows that it gets back lie; of shards not used.
        row_bytes: Of a row.
        lengths: How many elements each rank of this host adds up; of weights not used.
        start: The first element, of a shard.
        begin: Of residuals, the first of what is encoded.
    """

    mine: Places
    whole: Places
    row_bytes: int
    lengths: Sequence[int] = ()
    start: int = 0
    begin: int = 0


@dataclass(frozen=True)
class Plan:
    """Where the elements of a bucket, shard or weights go.

    Args:
        parts: What is sent, one after another.
        small: What is sent as it is: elements of the bucket, or of a shard; int64.
        residuals: For how many elements each rounding has error feedback.
    """

    parts: Sequence[Part]
    small: Tensor
    residuals: Sequence[int] = ()


def bucket_plan(
    wire: CommFormat, wide: int, here: int, local: int, numels: Sequence[int], itemsize: int
) -> Plan | None:
    """Return where a bucket goes, or None where it would not get fewer bytes.

    Args:
        wire: The format.
        wide: How many hosts.
        here: Ranks of each.
        local: Which of its host's this one is.
        numels: Elements of parameters, of which no block has some of two.
        itemsize: Bytes of an element.
    """
    runs, small, padded = _laid_out(wire, numels)
    total, part = sum(numels), _whole(-(-padded // (wide * here)))
    nbytes = wide * here * wire.row_bytes(part) + 4 * len(small)
    if not runs or nbytes >= total * itemsize:
        return None
    own = wide * part
    whole = Places(here * own, runs)
    # Each local rank's part of the bucket begins where its first block does.
    of_each = [[*whole.inside(each * own, (each + 1) * own)] for each in range(here)]
    begins = [0, *(some[0][1] if some else total for some in of_each[1:]), total]
    lengths = [stop - start for start, stop in pairwise(begins)]
    mine = Places(own, [(b - local * own, at - begins[local], n) for b, at, n in of_each[local]])
    found = Part(mine, whole, wire.row_bytes(part), lengths)
    return Plan([found], small, [own, part])


def shard_plan(
    wire: CommFormat, wide: int, here: int, numels: Sequence[int], itemsize: int
) -> Plan | None:
    """Return how shards are reduced; as `bucket_plan`, with what a shard has of each parameter."""
    runs, small, padded = _laid_out(wire, numels)
    numel, pattern = sum(numels), Places(padded, runs)
    most = PARTS if here == 1 else PARTS_OF_TWO_LEVELS
    count = max(1, min(most, numel * wide * here // LEAST_PART))
    step = max(BLOCK, _whole(-(-padded // count)))
    parts = []
    for first in range(0, padded, step):
        size = min(step, padded - first)
        some = [*pattern.inside(first, first + size)]
        start, (_, last, length) = some[0][1], some[-1]
        length += last - start
        # Of two levels, what goes to a rank of this host is packed.
        stride = numel if here == 1 else length
        inside = [(begin - first, at - start, n) for begin, at, n in some]
        mine = Places(size, inside, range(0, wide * stride, stride))
        lengths, begin = [wide * length] * here, wide * first
        parts.append(Part(mine, mine, wire.row_bytes(size), lengths, start, begin))
    # A rank of many sends its part of what is small to all, and gets it from all.
    nbytes = sum(part.row_bytes for part in parts) + 8 * len(small)
    if not parts or nbytes >= numel * itemsize:
        return None
    return Plan(parts, small, [sum(part.mine.numel for part in parts)])


def weight_plan(
    wire: CommFormat, order: Sequence[int], numels: Sequence[int], itemsize: int
) -> Plan | None:
    """Return how weights are gathered from shards; as `shard_plan`, of ranks in this order."""
    runs, small, padded = _laid_out(wire, numels)
    numel, row_bytes = sum(numels), wire.row_bytes(padded)
    if not runs or row_bytes + itemsize * len(small) >= numel * itemsize:
        return None
    whole = Places(padded, runs, [rank * numel for rank in order])
    return Plan([Part(Places(padded, runs), whole, row_bytes)], small)


def _whole(numel: int) -> int:
    """Return the elements of so many blocks as are needed."""
    return -(-numel // BLOCK) * BLOCK


def _laid_out(
    wire: CommFormat, numels: Sequence[int]
) -> tuple[list[tuple[int, int, int]], Tensor, int]:
    """Return runs of parameters as `Places` has them, what is small, and elements of all blocks."""
    runs: list[tuple[int, int, int]] = []
    small: list[int] = []
    padded = flat = 0
    for numel in numels:
        if _whole(numel) // BLOCK * wire.block_bytes > 4 * numel:
            small.extend(range(flat, flat + numel))
        elif numel:
            runs.append((padded, flat, numel))
            padded += _whole(numel)
        flat += numel
    return runs, torch.tensor(small, dtype=torch.int64, device="cpu"), padded
