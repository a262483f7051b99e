"""Uneven inputs: what a guard and a scaler do inside ``Join``.

Ranks that ``Join`` joins hold replicas, whose gradients are equal, so they need no message: none is
sent while it lasts. At its end a rank that had inputs to the last tells the others how it went on,
and sends what DDP does not: what its optimizers remember, and masters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig
from torch.utils._pytree import tree_map_only

from distamp.errors import CallOrderError
from distamp.groups import Group
from distamp.guard.asked import Asked
from distamp.guard.optimizer_state import OptimizerStates
from distamp.sources import source_of

__all__ = ["Joins"]


class _TakeOver(JoinHook):
    """Takes the state over from a rank that had inputs to the last.

    Args:
        group: The ranks that are joined; None where there is only this one.
        device: Where the group's messages lie.
        read: Returns what was counted, and what moves a scale, as float64.
        write: Takes the same over; empty where there is nothing to take over.
        optimizers: Those that were seen. What they remember is taken over, unless each rank has
            its own share of it.
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
        """Broadcast from the highest of the ranks that ended last."""
        state = [] if self._group is None else self._broadcast(self._group, is_last_joiner)
        self._write(state)

    def _broadcast(self, group: dist.ProcessGroup, is_last_joiner: bool) -> list[float]:
        rank = dist.get_rank(group) if is_last_joiner else -1
        last = torch.tensor((rank, not is_last_joiner), device=self._device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
        rank, one_was_early = last.tolist()
        source = dist.get_global_rank(group, rank)
        state = self._read().to(self._device)
        dist.broadcast(state, source, group=group)
        if one_was_early:
            self._broadcast_optimizers(group, source, is_last_joiner)
        return [] if is_last_joiner else state.tolist()

    def _broadcast_optimizers(
        self, group: dist.ProcessGroup, source: int, is_last_joiner: bool
    ) -> None:
        sources = [
            (optimizer, of)
            for optimizer, _ in self._optimizers.live()
            if not (of := source_of(optimizer)).part
        ]
        own = None
        if dist.get_rank() == source:  # the state of split masters is a copy
            own = [(each.state_dict(), of.state_dict()) for each, of in sources]
        # A tensor of a device would be unpickled on that of the rank that sends.
        sent = [tree_map_only(Tensor, Tensor.cpu, own)]
        dist.broadcast_object_list(sent, source, group=group)
        if is_last_joiner:
            return
        for (optimizer, of), (theirs, standing_in) in zip(sources, sent[0] or (), strict=False):
            # schedulefree counts in its groups. A learning rate that is a tensor stays that tensor.
            ours = optimizer.state_dict()["param_groups"]
            groups = zip(ours, theirs["param_groups"], strict=True)
            counted = [
                mine | {key: each for key, each in other.items() if not isinstance(each, Tensor)}
                for mine, other in groups
            ]
            optimizer.load_state_dict({**theirs, "param_groups": counted})
            of.load_state_dict(standing_in)


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
        """
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
