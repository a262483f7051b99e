"""State of optimizers between iterations: counts of steps, and the decision on the last step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distamp.clip_grad import StepDecision, as_found_inf_tensor
from distamp.optim_utils import params_of, unwrap_optimizer, view_of

__all__ = ["OptimizerHistories", "OptimizerHistory", "StepCounts", "clone_if_tensor"]


@dataclass(frozen=True)
class StepCounts:
    """How many times ``step()`` let an optimizer step, and how many times it did not.

    Args:
        taken: Steps that were taken.
        skipped: Steps that were skipped because of inf or NaN.
        norm_skips: Steps that were skipped because their norm exceeded ``skip_norm_above``.
        requested_skips: Steps that were skipped because a rank requested it by ``skip_if``.
    """

    taken: int
    skipped: int
    norm_skips: int = 0
    requested_skips: int = 0


class OptimizerHistory:
    """The steps of one optimizer, as far as the host knows them.

    Attributes:
        base_ref: Returns the optimizer inside all wrappers; None if it is gone.
        steps_taken: Steps that were taken.
        steps_skipped: Steps that were skipped because of inf or NaN.
        consecutive_skips: Steps that were skipped so since the last step that was taken.
        norm_skips: Steps that were skipped because of their norm.
        consecutive_norm_skips: The same since the last step that was taken.
        requested_skips: Steps that were skipped by ``skip_if``.
        first_skipped_scale: The loss scale of the first skipped step; None before.
        last_decision: The decision on the last step; None before the first.
        was_idle: Whether the last step found no gradient on any rank, and did nothing: a bool if
            the host knows it, else 0-d bool.
        total_norm: The last norm that was measured, for `StepGuard.grad_norm`.
    """

    __slots__ = (
        "__weakref__",
        "_optimizer_ref",
        "base_ref",
        "consecutive_norm_skips",
        "consecutive_skips",
        "first_skipped_scale",
        "last_decision",
        "norm_skips",
        "requested_skips",
        "steps_skipped",
        "steps_taken",
        "total_norm",
        "was_idle",
    )

    def __init__(self, optimizer: Any) -> None:
        view = view_of(optimizer)
        self._optimizer_ref = _weakref_or_strong(view.holder)
        self.base_ref = _weakref_or_strong(view.base)
        self.reset()

    def reset(self) -> None:
        """Begin as if no step had been made."""
        self.steps_taken = self.steps_skipped = self.consecutive_skips = self.norm_skips = 0
        self.consecutive_norm_skips = self.requested_skips = 0
        self.first_skipped_scale: float | None = None
        self.last_decision: StepDecision | None = None
        self.was_idle: bool | Tensor = False
        self.total_norm: float | Tensor | None = None

    def snapshot_state(self) -> dict[str, Any]:
        """Return the attributes that steps change, with copies of tensors."""
        state: dict[str, Any] = {}
        for name in self.__slots__:
            if name not in _IDENTITY_ATTRS:
                state[name] = clone_if_tensor(getattr(self, name))
        decision = self.last_decision
        if decision is not None:
            state["last_decision"] = StepDecision(*map(clone_if_tensor, decision))
        return state

    def load_snapshot_state(self, state: dict[str, Any]) -> None:
        """Set the attributes of a `snapshot_state`."""
        for name, value in state.items():
            setattr(self, name, value)

    @property
    def optimizer(self) -> Any:
        """The optimizer that has the parameters; None if it is gone."""
        return self._optimizer_ref()

    @property
    def next_step(self) -> int:
        """The number of the next step, counted from 1."""
        skips = self.steps_skipped + self.norm_skips + self.requested_skips
        return self.steps_taken + skips + 1

    @property
    def counts(self) -> StepCounts:
        """The numbers of steps taken and skipped."""
        return StepCounts(
            self.steps_taken, self.steps_skipped, self.norm_skips, self.requested_skips
        )

    def record_pending(self, decision: StepDecision, is_idle: Tensor) -> None:
        """Store a decision while the host does not know whether any rank has a gradient.

        Args:
            decision: The decision of all ranks.
            is_idle: 0-d bool: whether no rank has a gradient.
        """
        # An idle optimizer was not skipped, even if the norm of the others is inf.
        skip = as_found_inf_tensor(decision.skip, is_idle.device)
        self.last_decision = StepDecision(skip * is_idle.logical_not())
        self.was_idle = is_idle


#: The attributes of `OptimizerHistory` that no step changes.
_IDENTITY_ATTRS = ("__weakref__", "_optimizer_ref", "base_ref")


def clone_if_tensor(value: Any) -> Any:
    """Return a copy of a tensor; another value unchanged."""
    return value.clone() if isinstance(value, Tensor) else value


def _weakref_or_strong(optimizer: Any) -> Callable[[], Any]:
    """Return a weak reference, or a strong one if the class has ``__slots__`` that forbid it."""
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer


class OptimizerHistories:
    """The histories of the optimizers that a guard or scaler has seen, which are held weakly."""

    def __init__(self) -> None:
        # By the id of the optimizer inside all wrappers, because some classes are unhashable.
        self._histories: dict[int, OptimizerHistory] = {}

    def get(self, base: Any) -> OptimizerHistory | None:
        """Return the history of an optimizer inside all wrappers; None if it was never seen."""
        history = self._histories.get(id(base))
        return history if history is not None and history.base_ref() is base else None

    def register(self, optimizer: Any) -> OptimizerHistory:
        """Return the history of an optimizer that is seen for the first time.

        Raises:
            TypeError: The object is no optimizer, or something in it is no tensor.
        """
        unwrapped = unwrap_optimizer(optimizer)
        if not hasattr(unwrapped, "param_groups"):
            raise TypeError(
                f"expected an optimizer, not {type(unwrapped).__name__}. Pass several as "
                "unscale_(*optimizers) or step_all(optimizers)."
            )
        params: list[Any] = params_of(unwrapped)
        for param in params:
            if not isinstance(param, Tensor):
                name = type(param).__name__
                raise TypeError(f"expected param to be torch.Tensor, got {name}")
        alive: dict[int, OptimizerHistory] = {}
        for key, known_history in self._histories.items():
            if known_history.base_ref() is not None:
                alive[key] = known_history
        history = OptimizerHistory(unwrapped)
        alive[id(history.base_ref())] = history
        self._histories = alive
        return history

    def live(self) -> Iterator[tuple[torch.optim.Optimizer, OptimizerHistory]]:
        """Yield every optimizer that was seen and is alive, in the order of registration."""
        for history in list(self._histories.values()):
            optimizer = history.optimizer
            if optimizer is not None:
                yield optimizer, history
