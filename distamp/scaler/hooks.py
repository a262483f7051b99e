"""Communication hooks that a scaler tells of its scale and of skipped steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distamp.gradients import flag_of
from distamp.protocols import CommHook
from distamp.sources import source_of

__all__ = ["Hooks", "checked_hook"]


class Hooks:
    """The attached hooks."""

    def __init__(self) -> None:
        self.joined: list[CommHook] = []
        self._scale: Tensor | None = None

    def add(self, hook: CommHook) -> None:
        """Join one more hook."""
        self.remove(hook)
        self.joined.append(hook)
        # Until `scale` is called, nobody knows what a backward pass is scaled by.
        hook.iteration_ended()
        self._scale = None

    def remove(self, hook: CommHook) -> bool:
        """Forget a hook; return whether it was joined."""
        left = [each for each in self.joined if each is not hook]
        if len(left) == len(self.joined):
            return False
        self.joined = left
        # The hook hears no more of the scale, nor of skips.
        hook.iteration_ended()
        return True

    def scale_is(self, scale: Tensor) -> None:
        """Tell the hooks what the coming backward pass is scaled by."""
        for hook in self.joined:
            hook.scale_changed(scale)
        self._scale = scale

    def before_join(self, scale: Tensor) -> None:
        """Tell the hooks the scale of backward passes that this rank may never take part in.

        A rank without any inputs sends zeros in the others' passes. What rounding takes from the
        means that it owns is in units of their scale.
        """
        if self._scale is scale:
            return
        for hook in self.joined:
            hook.scale_changed(scale)
            hook.iteration_ended()

    def shadowed(self, skipped: Sequence[Any], *, all_skipped: bool) -> None:
        """End an iteration that the ranks with inputs took without this one.

        Args:
            skipped: Optimizers of this rank that skipped there.
            all_skipped: Whether all did, of which this rank may not know some.
        """
        flag = flag_of(True, "cpu")
        for hook in self.joined:
            if all_skipped:
                hook.step_ended(None, flag)
            for optimizer in skipped:
                hook.step_ended(source_of(optimizer).watched(), flag)
            hook.iteration_ended()

    def step_ended(self, optimizer: Any, found_inf: Tensor) -> None:
        """Tell the hooks whether a step was taken or skipped."""
        for hook in self.joined:
            hook.step_ended(source_of(optimizer).watched(), found_inf)

    def iteration_ended(self) -> None:
        """Tell the hooks that the next iteration begins."""
        for hook in self.joined:
            hook.iteration_ended()


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
