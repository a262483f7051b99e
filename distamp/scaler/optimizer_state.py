"""What a scaler knows of each optimizer, and what an optimizer's own kernel takes."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from distamp.gradients import version_of
from distamp.optimizers import innermost, unwrapped
from distamp.scaler.ranks import Flag

__all__ = [
    "Agreed",
    "OptimizerState",
    "OptimizerStates",
    "StepCounts",
    "leaves_garbage",
    "takes_flags",
    "takes_scaler",
]


@dataclass(frozen=True)
class StepCounts:
    """How many times ``step()`` let an optimizer step, and how many times it did not."""

    taken: int
    skipped: int


@dataclass(slots=True, eq=False)
class Agreed:
    """What all ranks agreed on of one optimizer in one iteration.

    It lies in torch's record of the iteration, so it goes where that is popped or replaced.

    Args:
        flag: Whether some rank overflowed: our own, whatever others do to the record's tensors.
        ranks: Those that did, where the host knows.
        given: The record's tensor as it was made.
        iteration: When it was agreed on.
        late: Whether a backward pass has changed the gradients since they were unscaled.
        closed: The error because of which there is no step in this iteration.
        version: How often that tensor was written to when it was made.
    """

    flag: Flag
    ranks: tuple[int, ...] | None
    given: torch.Tensor
    iteration: int
    late: bool = False
    closed: str = ""
    version: int = 0

    def __post_init__(self) -> None:
        self.version = version_of(self.given)


class OptimizerState:
    """What survives an iteration, of one optimizer.

    Attributes:
        key: The optimizer inside all wrappers, which a wrapper shares its state with.
        optimizer: The first that was given, which holds its gradients: ZeRO's, not the one inside.
        place: In the order in which optimizers were first seen; ranks compare it.
        used: The scaler's clock when its gradients were last looked at; they wait otherwise.
        counts: Steps so far, for `DistGradScaler.step_counts`.
        in_a_row: Skipped steps since the last that was taken, for ``max_consecutive_skips``.
        last_step: The flag of the last step, for `DistGradScaler.stepped`.
    """

    __slots__ = ("counts", "in_a_row", "key", "last_step", "optimizer", "place", "used")

    def __init__(self, key: Callable[[], Any], optimizer: Callable[[], Any], place: int) -> None:
        self.key = key
        self.optimizer = optimizer
        self.place = place
        self.used = -1
        self.counts = StepCounts(0, 0)
        self.in_a_row = 0
        self.last_step: Flag | None = None

    def count(self, skipped: bool) -> None:
        """Count one step that the host knows of."""
        before = self.counts
        self.counts = StepCounts(before.taken + (not skipped), before.skipped + skipped)
        self.in_a_row = self.in_a_row + 1 if skipped else 0


class OptimizerStates:
    """The states of the optimizers that a scaler has seen, which are held weakly."""

    def __init__(self) -> None:
        self._states: dict[int, OptimizerState] = {}
        self._seen = 0

    def find(self, key: Any) -> OptimizerState | None:
        """Return the state of the optimizer inside all wrappers; None if never seen."""
        state = self._states.get(id(key))
        return state if state is not None and state.key() is key else None

    def add(self, given: Any) -> OptimizerState:
        """Return the state of an optimizer that is seen for the first time.

        Raises:
            TypeError: Not an optimizer, or something in it is not a tensor.
        """
        optimizer = unwrapped(given)
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"expected an optimizer, not {type(optimizer).__name__}; several are given as "
                "unscale_(*optimizers) or step_all(optimizers)"
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not isinstance(parameter, torch.Tensor):
                    name = type(parameter).__name__
                    raise TypeError(f"expected param to be torch.Tensor, got {name}")
        key = innermost(optimizer)
        forget = functools.partial(_forget, self._states, id(key))
        references = _reference(key, forget), _reference(optimizer)
        state = self._states[id(key)] = OptimizerState(*references, self._seen)
        self._seen += 1
        return state

    def live(self) -> Iterator[tuple[Any, OptimizerState]]:
        """Yield every optimizer seen that is still alive, in the order of first sight."""
        for state in list(self._states.values()):
            if (optimizer := state.optimizer()) is not None:
                yield optimizer, state


def _reference(optimizer: Any, *gone: Callable[[Any], None]) -> Callable[[], Any]:
    try:
        return weakref.ref(optimizer, *gone)
    except TypeError:  # __slots__ without __weakref__: held for as long as the scaler lives
        return lambda: optimizer


def _forget(states: dict[int, OptimizerState], key: int, gone: weakref.ref[Any]) -> None:
    state = states.get(key)
    if state is not None and state.key is gone:
        del states[key]


def takes_flags(optimizer: Any) -> bool:
    """Return whether the optimizer's own kernel unscales and skips, as torch asks it.

    One that a loaded state has made unfused does not: torch leaves its mark on the optimizer and
    fails in the step.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return True  # a step of its own, also of a subclass, does what the mark says
    return all(group.get("fused", True) for group in optimizer.param_groups)


@functools.lru_cache(maxsize=64)
def takes_scaler(kind: Hashable) -> bool:
    """Return whether the ``step`` of a class takes the scaler itself: torch's older protocol."""
    return "grad_scaler" in inspect.signature(kind.step).parameters  # type: ignore[attr-defined]


def leaves_garbage(optimizer: Any) -> bool:
    """Return whether a step skipped inside the kernel would spoil the optimizer's state.

    torch's fused SGD makes its momentum buffers uninitialised and fills them in the first step; if
    the kernel skips that one, the next takes what lies there for momentum.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    state = optimizer.state
    return not all(
        group["momentum"] == 0 or state.get(p, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    )
