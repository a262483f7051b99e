"""The communication hooks that a scaler was joined with, and what it need not do thanks to them.

A hook's exchange leaves every rank with the same gradients and the news of inf and NaN among them,
so neither a check nor a message is needed. What the message would have compared, the loss scale and
the calls so far, travels in the hook's exchange.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from distamp.protocols import CommHook, GradientWatch
from distamp.scaler.gradients import inner_optimizer, parameters_of
from distamp.scaler.master_lookup import carriers

__all__ = ["Attached", "checked_hook"]

Optimizers: TypeAlias = Sequence[torch.optim.Optimizer]

# Calls whose gradients are as the backward pass left them.
_CALLS = ("step", "unscale_", "clip_grad_norm_")


class Attached:
    """Hooks, and for each optimizer whether all its gradients come through one of them.

    Whether they do is told to all ranks in the first message about that optimizer; from the next
    call on there is none.
    """

    def __init__(self) -> None:
        self.hooks: list[CommHook] = []
        self._watches: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[int, GradientWatch]
        ] = weakref.WeakKeyDictionary()
        self._told: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._telling: list[bool] = []
        self._calls = 0

    def add(self, hook: CommHook) -> None:
        """Join one more hook."""
        self.hooks.append(hook)
        # Its exchanges speak from the first on: a rank whose loss is not scaled is not silent.
        hook.scale_changed(torch.ones(()), 1)

    def announce(self, scale: Tensor, iteration: int, settings: Callable[[], str]) -> None:
        """Tell the hooks what the coming backward pass is scaled by."""
        if not self.hooks:
            return
        word = hash((iteration, zlib.crc32(settings().encode()), self._calls)) & (2**62 - 1)
        for hook in self.hooks:
            hook.scale_changed(scale, word or 1)

    def count(self, call: str, identities: Sequence[tuple[int, int]]) -> None:
        """Add a call that is settled without a message to what the next exchange compares."""
        self._calls = hash((self._calls, zlib.crc32(call.encode()), tuple(identities))) & (
            2**61 - 1
        )

    def flags(
        self,
        call: str,
        optimizers: Optimizers,
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
        self._telling = [watch is not None for watch in watches]
        apart = [hook.ranks_mismatched() for hook in self.hooks]
        known = agreed and all(optimizer in self._told for optimizer in optimizers)
        if call not in _CALLS or not known or any(apart):
            return None
        if measured and not (optimizers and all(map(_holds_all, optimizers, watches))):
            return None
        flags = [watch.found_inf() for watch in watches if watch is not None]
        return flags if len(flags) == len(watches) else None

    def in_words(self, settings: str) -> str:
        """Return the settings, and what else must be the same on all ranks because of hooks."""
        if not self.hooks:
            return settings
        return f"{settings}, gradients by hook={self._telling}, calls without message={self._calls}"

    def settled(self, optimizers: Optimizers) -> None:
        """Note that all ranks know which of these optimizers' gradients come through a hook."""
        if self.hooks:
            told = zip(optimizers, self._telling, strict=False)
            self._told.update(optimizer for optimizer, through in told if through)

    def step_ended(self, optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
        """Tell the hooks whether a step was taken or skipped."""
        for hook in self.hooks:
            hook.step_ended(carriers(optimizer), found_inf)

    def iteration_ended(self) -> None:
        """Tell the hooks that the next iteration begins."""
        for hook in self.hooks:
            hook.iteration_ended()

    def _watch(
        self, optimizer: torch.optim.Optimizer, ranks: Sequence[int]
    ) -> GradientWatch | None:
        """Return the watch over this optimizer's gradients, if all came through just now."""
        parameters = parameters_of(optimizer)
        count = len(parameters)
        held = self._watches.get(optimizer)
        if held is not None and held[0] == count and held[1].exchanged():
            return held[1]
        for hook in self.hooks:
            watch = hook.watch(parameters, ranks)
            if watch is not None and watch.exchanged():
                self._watches[optimizer] = (count, watch)
                return watch
        return None


def _holds_all(optimizer: torch.optim.Optimizer, watch: GradientWatch | None) -> bool:
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
