"""Uneven inputs: what ranks with and without more of them send inside ``Join``.

A rank that has no more inputs takes part in every message with nothing to say, until one says that
the iteration has ended, and how the scale stands. So inside ``Join`` messages have a tail, and
``update`` sends one more. It also has what an attached hook needs: which optimizers skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook

from distamp.errors import StageError
from distamp.optimizers import inner_optimizer
from distamp.scaler.groups import Group
from distamp.scaler.message import exchange, exchange_nothing
from distamp.scaler.optimizer_state import OptState

if TYPE_CHECKING:
    from distamp.scaler.grad_scaler import DistGradScaler

__all__ = ["ShadowScaler", "check", "end_iteration", "tail_of"]

# Ranks that have inputs; whether the iteration ends; optimizers of the whole call; which of them
# skipped; then the state.
_PRESENT, _ENDS, _TOTAL, _SKIPS, _STATE = 0, 1, 2, 3, 4
# Optimizers whose skips a word takes, summed over up to 2**20 ranks.
_COUNTED = 40


def check(scaler: DistGradScaler, optimizer: Any) -> None:
    """Refuse what cannot work inside ``Join``, as far as it can be seen.

    Raises:
        StageError: An optimizer with collectives of its own, or one that is joined without the
            scaler.
    """
    own = getattr(optimizer, "_join_config", None)
    joins = own is not None and own.enable
    if joins or (scaler._join_config.enable and inner_optimizer(optimizer) is not None):
        raise StageError(
            f"{type(optimizer).__name__} inside Join steps by itself on ranks without inputs, also "
            "where the others skip; use an optimizer without collectives of its own and "
            "Join([model, scaler])"
        )


def tail_of(scaler: DistGradScaler, total: int) -> Sequence[int]:
    """Return the tail of a message; empty outside of ``Join``."""
    if not scaler._join_config.enable:
        return ()
    if not scaler._notified_join:
        scaler._notified_join = True
        work = Join.notify_join_context(scaler)
        if work is not None:
            work.wait()
    return (1, 0, total, 0, *([0] * len(_state(scaler))))


def end_iteration(scaler: DistGradScaler) -> None:
    """Tell ranks without inputs that the iteration has ended, and how the scale stands."""
    scaler._notified_join = False
    group = scaler._ranks.group_for(scaler._scale_tensor(), scaler._states)
    if group is not None:
        tail = (1, 1, 0, _skips(scaler), *_state(scaler))
        exchange(group, 0, [], None, takes_rows=True, tail=tail)


def _skips(scaler: DistGradScaler) -> int:
    """Return a bit for each optimizer that skipped, by its place, and in bit 0 whether all did."""
    if not scaler._hooks.joined:
        return 0
    stepped = {
        state.index: flag
        for state in scaler._states.records.values()
        if state["stage"] is OptState.STEPPED and (flag := state.flag()) is not None
    }
    skipped = [index for index, flag in stepped.items() if flag.item()]
    every = int(bool(skipped) and len(skipped) == len(stepped))
    return every | sum(2 << index for index in skipped if 0 <= index < _COUNTED)


def _state(scaler: DistGradScaler) -> list[int]:
    """Return scale, tracker and hysteresis as integers."""
    scale, tracker = scaler._scale_tensor(), scaler._growth_tracker
    hysteresis = scaler._hysteresis_tracker
    assert tracker is not None
    assert hysteresis is not None
    bits = int(scale.cpu().view(torch.int32).item())
    return [bits, int(tracker.item()), int(hysteresis.item())]


class ShadowScaler(JoinHook):
    """Stands in for a scaler on a rank that has no more inputs.

    Args:
        scaler: The rank's own, which goes on as the others' do.
    """

    def __init__(self, scaler: DistGradScaler) -> None:
        self._scaler = scaler
        if scaler.is_enabled() and scaler._hooks.joined:
            scaler._hooks.before_join(scaler._scale_tensor())

    def main_hook(self) -> None:
        """Take part in the messages of one iteration of the others."""
        scaler = self._scaler
        group = self._group()
        if group is None:
            return
        scaler._ranks.drain()
        words = _STATE + len(_state(scaler))
        while True:
            tail = exchange_nothing(group, words)
            present = max(tail[_PRESENT], 1)
            if tail[_ENDS]:
                break
            length = group.length
            length.capacity = max(length.capacity, tail[_TOTAL] // present)
        state = [word // present for word in tail[_STATE:]]
        self._take_over(state)
        skips = tail[_SKIPS] // present
        skipped = [each for each, known in scaler._states.live() if skips >> known.index + 1 & 1]
        scaler._hooks.shadowed(skipped, all_skipped=bool(skips & 1))
        scaler._ranks.iteration += 1

    def _group(self) -> Group | None:
        scaler = self._scaler
        if not scaler.is_enabled():
            return None
        return scaler._ranks.group_for(scaler._scale_tensor(), scaler._states)

    def _take_over(self, state: list[int]) -> None:
        scaler = self._scaler
        bits, tracker, hysteresis = state
        scale = torch.tensor(bits, dtype=torch.int32, device="cpu").view(torch.float32)
        pairs = (
            (scaler._scale, scale),
            (scaler._growth_tracker, tracker),
            (scaler._hysteresis_tracker, hysteresis),
        )
        for held, value in pairs:
            if held is not None:
                held.copy_(torch.as_tensor(value))
        scaler._rebase()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Compare optimizers anew: a rank may have seen fewer of them than the others.

        On a device, messages compare an earlier scale and how often it moved since: not the same
        on a rank that took the scale over, so all begin with what it is now.
        """
        self._scaler._states.forget_agreements()
        self._scaler._rebase()
