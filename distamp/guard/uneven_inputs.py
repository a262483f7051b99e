"""Uneven inputs: the part of a guard and a scaler in torch's ``Join``.

The ranks in ``Join`` hold replicas with equal gradients, so a guard sends no message inside of it.
At the end a rank that had inputs to the last sends loss scale and counts to the others. Optimizer
state and masters are not sent: ``Join`` raises if they differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from distamp.errors import CallOrderError
from distamp.guard.optimizer_history import OptimizerHistories
from distamp.optim_utils import describe_optimizer, view_of

__all__ = ["SyncStateHook", "check_no_masters"]


def check_no_masters(histories: OptimizerHistories) -> None:
    """Refuse optimizers with masters in ``Join``.

    Raises:
        CallOrderError: An optimizer has masters, which would differ between ranks afterwards.
    """
    for optimizer, _ in histories.live():
        if view_of(optimizer).has_masters:
            raise CallOrderError(
                f"Join was entered with {describe_optimizer(optimizer)}, which has masters. Join "
                "does not synchronise masters, so they would differ between ranks afterwards. "
                "Give every rank as many batches, or train without masters."
            )


class SyncStateHook(JoinHook):
    """Loads the state of a rank that had inputs to the last.

    Args:
        group: The ranks in ``Join``; None for a single rank.
        device: The device of the group's messages.
        histories: The optimizers that the guard has seen.
        get_state: Returns the counters and the values that ``update`` changes, as numbers.
        load_state: Loads them; empty on a rank that had inputs to the last itself.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        histories: OptimizerHistories,
        get_state: Callable[[], Sequence[float]],
        load_state: Callable[[Sequence[float]], None],
    ) -> None:
        self._group, self._device = group, device
        self._histories = histories
        self._get_state, self._load_state = get_state, load_state

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast the state from the highest of the ranks that ended last.

        Raises:
            CallOrderError: A rank ended early, and a rank has optimizer state or masters.
        """
        if self._group is None:
            self._load_state(())
            return
        rank = dist.get_rank(self._group) if is_last_joiner else -1
        optimizers = [optimizer for optimizer, _ in self._histories.live()]
        has_state = any(map(_has_unsynced_state, optimizers))
        flags = torch.tensor((rank, not is_last_joiner, has_state), device=self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        source_rank, a_rank_ended_early, a_rank_has_state = flags.tolist()
        state = torch.tensor(self._get_state(), dtype=torch.float64, device=self._device)
        global_source = dist.get_global_rank(self._group, source_rank)
        dist.broadcast(state, global_source, group=self._group)
        self._load_state(() if is_last_joiner else state.tolist())
        if a_rank_ended_early and a_rank_has_state:
            names = ", ".join(map(describe_optimizer, optimizers))
            raise CallOrderError(
                f"ranks ended Join after different numbers of batches, so the state of {names} "
                "differs between ranks. Join synchronises the model, the loss scale and the "
                f"counts, and no optimizer state. Rank {source_rank} of the group has the state to "
                "keep: catch this error and load that rank's optimizer.state_dict() on every rank, "
                "or give every rank as many batches."
            )


def _has_unsynced_state(optimizer: Any) -> bool:
    """Return whether a rank that ends ``Join`` early lacks values that this optimizer has.

    ZeroRedundancyOptimizer defines a separate hook for ``Join``.
    """
    view = view_of(optimizer)
    if view.is_zero_sharded:
        return False
    return view.has_masters or any(optimizer.state.values())
