"""Uneven inputs: what a scaler does inside ``Join``.

Ranks that ``Join`` joins hold replicas, whose gradients are equal, so they need no message: none is
sent while it lasts. At its end a rank that had inputs to the last tells the others how it went on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

__all__ = ["TakeOver"]


class TakeOver(JoinHook):
    """Takes the state of the scaler over from a rank that had inputs to the last.

    Args:
        group: The ranks that are joined; None where there is only this one.
        device: Where the group's messages lie.
        read: Returns what was counted, scale and what a schedule remembers as float64.
        write: Takes the same over, or None where there is nothing to take over.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        read: Callable[[], Tensor],
        write: Callable[[list[float] | None], None],
    ) -> None:
        self._group, self._device = group, device
        self._read, self._write = read, write

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast from the highest of the ranks that ended last."""
        state = None if self._group is None else self._broadcast(self._group, is_last_joiner)
        self._write(state)

    def _broadcast(self, group: dist.ProcessGroup, is_last_joiner: bool) -> list[float] | None:
        rank = dist.get_rank(group) if is_last_joiner else -1
        last = torch.tensor(rank, device=self._device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
        state = self._read().to(self._device)
        dist.broadcast(state, dist.get_global_rank(group, int(last.item())), group=group)
        return None if is_last_joiner else state.tolist()
