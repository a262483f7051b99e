"""Tensors in blocks that lie in a cache, so that memory is read once and written once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from distamp import device_utils

__all__ = ["blocks"]

# Elements that several ops work on while they lie in a cache. On an accelerator, where a block is
# one launch for many tensors, it only bounds how much lies in memory twice.
_ON_HOST = 2**17
_ON_DEVICE = 2**25


def blocks(rows: Iterable[tuple[Tensor, ...]]) -> Iterator[list[list[Tensor]]]:
    """Yield rows of tensors as columns, some at a time: small ones together, a large one in pieces.

    A block is of one device. Only what is contiguous, and on the host, is cut. No row is held for
    longer than its turn, so whoever makes rows can free what they hold.

    Args:
        rows: The tensors of one row have the same size and device.
    """
    block: list[tuple[Tensor, ...]] = []
    elements = 0
    for row in rows:
        device, size = row[0].device, row[0].numel()
        limit = _ON_HOST if device_utils.is_cpu(device) else _ON_DEVICE
        if block and (elements + size > limit or device != block[0][0].device):
            yield _columns(block)
            block, elements = [], 0
        if (
            device_utils.is_cpu(device)
            and size > limit
            and all(each.is_contiguous() for each in row)
        ):
            for pieces in zip(*(each.view(-1).split(limit) for each in row), strict=True):
                yield [[piece] for piece in pieces]
            del pieces
        else:
            block.append(row)
            elements += size
        del row
    if block:
        yield _columns(block)


def _columns(rows: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    return [list(column) for column in zip(*rows, strict=True)]
