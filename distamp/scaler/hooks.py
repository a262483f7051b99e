"""Communication hooks that a scaler is joined with, and the messages that it need not send.

A hook's exchange leaves every rank with the same gradients and knows of inf and NaN among them, so
neither a check nor a message is needed. What the message would have compared, the loss scale and
the calls so far, travels in the hook's exchange.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from distamp.gradients import flag_of
from distamp.optimizers import inner_optimizer
from distamp.protocols import CommHook, GradientWatch, is_stepped
from distamp.scaler.optimizer_state import OptimizerState
from distamp.sources import source_of

__all__ = ["Hooks", "checked_hook"]

# Calls whose gradients are as the backward pass left them.
_CALLS = ("step", "clip_grad_norm_")


class _Watched(NamedTuple):
    """The watch over an optimizer's gradients; the parameters that it had then, and the ranks."""

    ids: list[int]
    left_out: list[int]
    ranks: Sequence[int]
    watch: GradientWatch

    @classmethod
    def now(
        cls, parameters: Sequence[Tensor], ranks: Sequence[int], watch: GradientWatch
    ) -> _Watched:
        left_out = [place for place, p in enumerate(parameters) if not is_stepped(p)]
        return cls(list(map(id, parameters)), left_out, ranks, watch)

    def holds_for(self, parameters: Sequence[Tensor], ranks: Sequence[int]) -> bool:
        """Return whether they are the same, and none is stepped that was not."""
        same = self.ids == list(map(id, parameters)) and self.ranks == ranks
        return same and not any(is_stepped(parameters[place]) for place in self.left_out)


class Hooks:
    """Hooks, and for each optimizer whether all its gradients come through one of them.

    Whether they do is part of the first message about that optimizer; from the next call on there
    is none.
    """

    def __init__(self) -> None:
        self.joined: list[CommHook] = []
        self._watches: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self._announced: weakref.WeakSet[Any] = weakref.WeakSet()
        self._announcing: list[bool] = []
        self._scale: Tensor | None = None
        # Calls without a message so far, as a number that all ranks must have.
        self.calls = 0

    def add(self, hook: CommHook) -> None:
        """Join one more hook."""
        self.remove(hook)
        self.joined.append(hook)
        # Its exchanges compare from the first on: a rank whose loss is not scaled is seen, too.
        hook.scale_changed(flag_of(True, "cpu"), 1)
        # Until `scale` is called, nobody knows what a backward pass is scaled by.
        hook.iteration_ended()
        self._scale = None

    def remove(self, hook: CommHook) -> bool:
        """Forget a hook and all that was learned from hooks; return whether it was joined."""
        left = [each for each in self.joined if each is not hook]
        if len(left) == len(self.joined):
            return False
        self.joined = left
        # The hook hears no more of the scale, nor of skips.
        hook.iteration_ended()
        self._watches.clear()
        self._announced.clear()
        return True

    def scale_is(self, scale: Tensor, iteration: int, settings: Callable[[], str]) -> None:
        """Tell the hooks what the coming backward pass is scaled by."""
        word = hash((iteration, zlib.crc32(settings().encode()), self.calls)) & (2**62 - 1)
        for hook in self.joined:
            hook.scale_changed(scale, word or 1)
        self._scale = scale

    def before_join(self, scale: Tensor) -> None:
        """Tell the hooks the scale of backward passes that this rank may never take part in.

        A rank without any inputs sends zeros in the others' passes. What rounding takes from the
        means that it owns is in units of their scale.
        """
        if self._scale is scale:
            return
        for hook in self.joined:
            hook.scale_changed(scale, 1)
            hook.iteration_ended()

    def shadowed(self, calls: int, skipped: Sequence[Any], *, all_skipped: bool) -> None:
        """End an iteration that the ranks with inputs took without this one.

        Args:
            calls: Their `calls`.
            skipped: Optimizers of this rank that skipped there.
            all_skipped: Whether all did, of which this rank may not know some.
        """
        self.calls = calls
        flag = flag_of(True, "cpu")
        for hook in self.joined:
            if all_skipped:
                hook.step_ended(None, flag)
            for optimizer in skipped:
                hook.step_ended(source_of(optimizer).watched(), flag)
            hook.iteration_ended()

    def count(self, call: str, states: Sequence[OptimizerState]) -> None:
        """Add a call that takes no message to what the next exchange compares."""
        identities = tuple(state.identity for state in states)
        words = (self.calls, zlib.crc32(call.encode()), identities)
        # Inside Join ranks sum theirs up.
        self.calls = hash(words) & (2**31 - 1)

    def flags(
        self,
        call: str,
        optimizers: Sequence[Any],
        ranks: Sequence[int],
        *,
        agreed: bool,
        measured: bool,
    ) -> list[Tensor] | None:
        """Return a flag for each optimizer, or None where the ranks must send a message.

        Args:
            call: The method the user called.
            optimizers: Those of one message.
            ranks: Those that must agree, by their numbers in the default group.
            agreed: Whether the ranks have compared these optimizers before.
            measured: Whether the gradients are measured too: without a message that takes a rank
                which holds all of them.
        """
        watches = [self._watch(optimizer, ranks) for optimizer in optimizers]
        self._announcing = [watch is not None for watch in watches]
        mismatched = [hook.ranks_mismatched() for hook in self.joined]
        known = agreed and all(optimizer in self._announced for optimizer in optimizers)
        if call not in _CALLS or not known or any(mismatched):
            return None
        if measured and not (optimizers and all(map(_holds_all, optimizers, watches))):
            return None
        flags = [watch.found_inf() for watch in watches if watch is not None]
        return flags if len(flags) == len(watches) else None

    def as_text(self, settings: str) -> str:
        """Return the settings, and what else must be the same on all ranks because of hooks."""
        if not self.joined:
            return settings
        return (
            f"{settings}, gradients by hook={self._announcing}, calls without message={self.calls}"
        )

    def agreed(self, optimizers: Sequence[Any]) -> None:
        """Note that all ranks know which of these optimizers' gradients come through a hook."""
        through = zip(optimizers, self._announcing, strict=False)
        self._announced.update(optimizer for optimizer, is_through in through if is_through)

    def step_ended(self, optimizer: Any, found_inf: Tensor) -> None:
        """Tell the hooks whether a step was taken or skipped."""
        for hook in self.joined:
            hook.step_ended(source_of(optimizer).watched(), found_inf)

    def iteration_ended(self) -> None:
        """Tell the hooks that the next iteration begins."""
        for hook in self.joined:
            hook.iteration_ended()

    def _watch(self, optimizer: Any, ranks: Sequence[int]) -> GradientWatch | None:
        """Return the watch over this optimizer's gradients, if all came through just now."""
        parameters = source_of(optimizer).stepped()
        known = self._watches.get(optimizer)
        if known is not None and not known.holds_for(parameters, ranks):
            # What the ranks told each other was of other parameters, or to others.
            self._announced.discard(optimizer)
        elif known is not None and known.watch.exchanged():
            return known.watch
        for hook in self.joined:
            watch = hook.watch(parameters, ranks)
            if watch is not None and watch.exchanged():
                self._watches[optimizer] = _Watched.now(parameters, ranks, watch)
                return watch
        return None


def _holds_all(optimizer: Any, watch: GradientWatch | None) -> bool:
    """Return whether each rank steps all of the optimizer's parameters, as ZeRO's do not."""
    return watch is not None and watch.replicated and inner_optimizer(optimizer) is None


def checked_hook(state: object) -> CommHook:
    """Return the state of a hook that a scaler can be joined with.

    Raises:
        ValueError: The state of torch's PowerSGD.
        TypeError: Something else that is none.
    """
    if type(state).__name__ == "PowerSGDState":
        raise ValueError(
            "PowerSGD cannot be joined with a scaler: its error feedback keeps an inf for ever, "
            "and grows when the loss scale moves; use distamp.comm_hooks.register(model, 'int8'), "
            "whose error feedback follows the scale"
        )
    if not isinstance(state, CommHook):
        raise TypeError(
            f"attach() takes what distamp.comm_hooks.register returned, not {type(state).__name__}"
        )
    return state
