"""Uneven inputs: what a guard and a scaler do inside ``Join``.

Ranks that ``Join`` joins hold replicas with equal gradients, so a guard sends no message inside of
``Join``. At the end a rank that had inputs to the last sends loss scale and counts to the others.
Optimizer state and masters are not sent: ``Join`` raises where they differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig

from distamp.errors import CallOrderError
from distamp.groups import Group
from distamp.guard.asked import Asked
from distamp.guard.optimizer_state import OptimizerStates
from distamp.optimizers import describe
from distamp.sources import source_of

__all__ = ["Joins"]


class _TakeOver(JoinHook):
    """Takes the state over from a rank that had inputs to the last.

    Args:
        group: The ranks that are joined; None where there is only this one.
        device: Where the group's messages lie.
        read: Returns what was counted, and what moves a scale, as float64.
        write: Takes the same over; empty where there is nothing to take over.
        optimizers: The optimizers that the guard has seen.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        read: Callable[[], Tensor],
        write: Callable[[Sequence[float]], None],
        optimizers: OptimizerStates,
    ) -> None:
        self._group, self._device = group, device
        self._read, self._write = read, write
        self._optimizers = optimizers

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast from the highest of the ranks that ended last.

        Raises:
            CallOrderError: A rank ended early, and a rank has optimizer state or masters.
        """
        if self._group is None:
            self._write([])
            return
        rank = dist.get_rank(self._group) if is_last_joiner else -1
        has_state = any(map(_has_state, self._live_optimizers()))
        flags = torch.tensor((rank, not is_last_joiner, has_state), device=self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        rank, a_rank_ended_early, a_rank_has_state = flags.tolist()
        state = self._read().to(self._device)
        dist.broadcast(state, dist.get_global_rank(self._group, rank), group=self._group)
        self._write([] if is_last_joiner else state.tolist())
        if a_rank_ended_early and a_rank_has_state:
            names = ", ".join(map(describe, self._live_optimizers()))
            raise CallOrderError(
                f"ranks ended Join after different numbers of batches, so the state of {names} "
                "differs between ranks. Join synchronises the model, the loss scale and the "
                f"counts, and no optimizer state. Rank {rank} of the group has the state to keep: "
                "catch this error and load that rank's optimizer.state_dict() on every rank, or "
                "give every rank as many batches."
            )

    def _live_optimizers(self) -> list[Any]:
        return [optimizer for optimizer, _ in self._optimizers.live()]


def _has_state(optimizer: Any) -> bool:
    """Return whether a rank that ends ``Join`` early lacks values that this optimizer has.

    ZeRO takes part in ``Join`` by a hook of its own.
    """
    source = source_of(optimizer)
    return not source.part and (source.casts or any(optimizer.state.values()))


class Joins(Asked, Joinable):
    """The methods of a guard and a scaler that ``torch.distributed.algorithms.Join`` calls."""

    def _remembered(self) -> Sequence[float]:
        """Return what moves a scale; nothing without one."""
        return ()

    def _has_joined(self, remembered: Sequence[float]) -> None:
        """Take over what `_remembered` is on another rank; empty where this one goes on."""

    def _group(self, device: torch.device) -> Group | None:
        """Return the ranks to agree with; None without any, and where replicas need no message."""
        if not self._join_config.enable:
            return self._guard.ranks.group(device)
        if self._join_config.is_first_joinable:
            raise CallOrderError("the model comes first: Join([model, scaler])")
        return None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that acts for this scaler on a rank without more inputs.

        See ``torch.distributed.algorithms.Join``: ``with Join([model, scaler])``.

        Raises:
            CallOrderError: An optimizer has masters, which would differ between ranks afterwards.
        """
        for optimizer, _ in self._guard.optimizers.live():
            if source_of(optimizer).casts:
                raise CallOrderError(
                    f"Join was entered with {describe(optimizer)}, which has masters. Join does "
                    "not synchronise masters, so they would differ between ranks afterwards. "
                    "Give every rank as many batches, or train without masters."
                )
        self._guard.ranks.settle()  # while no rank is in Join's own collectives yet
        return _TakeOver(
            self.join_process_group,
            self.join_device,
            self._joined_state,
            self._take_over,
            self._guard.optimizers,
        )

    @property
    def join_process_group(self) -> Any:
        """The group of the scaler's ranks, for ``Join``."""
        return self._guard.ranks.process_group

    def _joined_state(self) -> Tensor:
        ranks = self._guard.ranks
        values = (ranks.iteration, ranks.steps, *self._remembered())
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    def _take_over(self, state: Sequence[float]) -> None:
        """End ``Join``, and go on as a rank that had inputs to the last, where one did."""
        self._join_config = _JoinConfig.construct_disabled_join_config()
        if self._enabled:
            self._has_joined(state[2:])
            if state:
                ranks = self._guard.ranks
                ranks.iteration, ranks.steps = map(int, state[:2])
