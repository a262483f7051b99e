"""The state of an optimizer: in one iteration, between iterations, and its flags."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from distamp import host
from distamp.errors import CallOrderError
from distamp.gradients import flag_of
from distamp.guard.ranks import Absence, Flag
from distamp.optimizers import innermost, unwrapped
from distamp.sources import GradientSource

__all__ = [
    "OWN",
    "OptimizerState",
    "OptimizerStates",
    "Resolved",
    "StepCounts",
    "as_tensor",
    "check_step",
    "check_unscale",
    "merged",
]

#: Where in torch's record of an iteration our own `Resolved` lies.
OWN = "distamp"


@dataclass(frozen=True)
class StepCounts:
    """How many times ``step()`` let an optimizer step, and how many times it did not.

    Args:
        taken: Steps that were taken.
        skipped: Steps that were skipped for inf or NaN.
        norm_skips: Steps that were skipped because their norm lay above ``skip_norm_above``.
    """

    taken: int
    skipped: int
    norm_skips: int = 0


class OptimizerState:
    """The state of one optimizer between iterations.

    Attributes:
        optimizer: Weakly, the first that was given, which holds its gradients: ZeRO's, not the one
            inside.
        inside: What is inside all wrappers, which a wrapper and what it wraps share.
        counts: Steps that were taken, that were skipped, skipped ones since the last taken, and
            those that were skipped for their norm.
        last_step: The flag of the last step, for `DistGradScaler.step_was_taken`.
        was_idle: Whether the last step found no gradient on any rank, and did nothing.
        norm: The norm of the last step that measured one, for `StepGuard.grad_norm`.
    """

    __slots__ = ("__weakref__", "counts", "inside", "last_step", "norm", "optimizer", "was_idle")

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = _reference(optimizer)
        self.inside = _reference(innermost(optimizer))
        self.counts = (0, 0, 0, 0)
        self.last_step: Flag | None = None
        self.was_idle: Flag = False
        self.norm: float | Tensor | None = None


def _reference(optimizer: Any) -> Callable[[], Any]:
    """Return a weak reference; where a class has ``__slots__`` and allows none, a strong one."""
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer


class OptimizerStates:
    """The states of the optimizers that a scaler has seen, which are held weakly."""

    def __init__(self) -> None:
        # By the id of what is inside all wrappers, for some are unhashable.
        self._states: dict[int, OptimizerState] = {}

    def find(self, inside: Any) -> OptimizerState | None:
        """Return the state of what is inside all wrappers; None if it was never seen."""
        state = self._states.get(id(inside))
        return state if state is not None and state.inside() is inside else None

    def add(self, wrapper: Any) -> OptimizerState:
        """Return the state of an optimizer that is seen for the first time.

        Raises:
            TypeError: Not an optimizer, or something in it is not a tensor.
        """
        optimizer = unwrapped(wrapper)
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"expected an optimizer, not {type(optimizer).__name__}; several are given as "
                "unscale_(*optimizers) or step_all(optimizers)"
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not isinstance(parameter, Tensor):
                    name = type(parameter).__name__
                    raise TypeError(f"expected param to be torch.Tensor, got {name}")
        kept = {key: s for key, s in self._states.items() if s.inside() is not None}
        state = OptimizerState(optimizer)
        self._states = {**kept, id(state.inside()): state}
        return state

    def live(self) -> Iterator[tuple[Any, OptimizerState]]:
        """Yield every optimizer seen that is still alive, in the order of first sight."""
        for state in list(self._states.values()):
            if (optimizer := state.optimizer()) is not None:
                yield optimizer, state


# -- torch's record of an iteration ----------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Resolved:
    """An optimizer as one iteration sees it, looked through once.

    It lies in torch's record of the iteration, so it goes where that is popped or replaced.

    Args:
        given: The optimizer as it was passed, perhaps a wrapper.
        holder: The optimizer that has the parameters.
        inside: What is inside all wrappers.
        stepping: Whose own ``step`` runs.
        source: Where its gradients are.
        record: torch's record.
        state: What survives an iteration; None until it is looked at.
        only_check: Whether gradients stay as they are, for its own kernel unscales.
        takes_flags: Whether its own kernel skips; asked by ``step``.
        agreed: Whether the flags in the record are what all ranks agreed on.
        ranks: Those that overflowed, where the host knows.
        bad_names: For each of them the name of its first bad parameter, where known.
        own: Whether this rank did, where ranks agreed and the host does not know which.
        absence: Whether it has gradients, on this rank and on any rank.
        is_silent: Whether its ``step`` in this iteration sends no message, because an earlier call
            has unscaled its gradients.
    """

    given: Any
    holder: Any
    inside: Any
    stepping: Any
    source: GradientSource
    record: dict[str, Any]
    state: OptimizerState | None = None
    only_check: bool = False
    takes_flags: bool = False
    agreed: bool = False
    ranks: tuple[int, ...] | None = None
    bad_names: tuple[str, ...] = ()
    own: Flag | None = None
    absence: Absence = field(default_factory=Absence)
    is_silent: bool = False


def check_unscale(record: dict[str, Any]) -> None:
    """Refuse ``unscale_`` where it was called already, with torch's own words."""
    if record["stage"] is OptState.UNSCALED:
        raise CallOrderError(
            "unscale_() has already been called on this optimizer since the last update(). Call it "
            "once in each iteration, and update() at the end."
        )
    if record["stage"] is OptState.STEPPED:
        raise CallOrderError(
            "unscale_() is being called after step(). Call it before step(), or call update() to "
            "begin the next iteration."
        )


def check_step(record: dict[str, Any]) -> None:
    """Refuse a second ``step``, also after a ``step`` that raised, in torch's words first."""
    if record["stage"] is OptState.STEPPED:
        raise CallOrderError(
            "step() has already been called since the last update(). Call update() once at the end "
            "of each iteration. After a step that raised, call zero_grad() and update()."
        )


def merged(flags: Sequence[Tensor], device: torch.device) -> Flag:
    """Return whether any flag is set, also if other code has changed the flags.

    Returns:
        A bool where the loss scale is on the host, else 0-d float32 on ``device``: exactly 0 or 1.
    """
    if host.is_host(device):
        return any(map(Tensor.item, flags))
    there = [host.moved(flag, device) for flag in flags]
    one = there[0] if len(there) == 1 else torch.stack(there).amax()
    return one.reshape(()).clamp(max=1.0)


def as_tensor(flag: Flag, device: torch.device | str) -> Tensor:
    """Return a flag as 0-d float32, exactly 0 or 1; on ``device`` where the host knows it."""
    return flag.float() if isinstance(flag, Tensor) else flag_of(flag, device)
