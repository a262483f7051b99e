"""The agreement of all ranks that a part of a call failed on one of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from distamp.errors import ConfigError

__all__ = ["raise_on_every_rank"]


def raise_on_every_rank(call: str, error: Exception | None, group: ProcessGroup | None) -> None:
    """Raise on every rank if a rank passes an error.

    Collective: every rank of ``group`` must call this.

    Args:
        call: The call that the user made, for the message.
        error: The exception of this rank, or None.
        group: The ranks, or None for a single process.

    Raises:
        ConfigError: Another rank failed, and this rank did not.
        Exception: ``error``, on a rank that failed.
    """
    texts: list[Any] = [None]
    ranks = [0]
    if group is not None:
        ranks = dist.get_process_group_ranks(group)
        texts = [None] * len(ranks)
        text = None if error is None else str(error)
        dist.all_gather_object(texts, text, group=group)
    if error is not None:
        raise error
    for rank, text in zip(ranks, texts, strict=True):
        if text is not None:
            raise ConfigError(f"{call} failed on rank {rank}, so it stops on every rank. {text}")
