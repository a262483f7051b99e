"""What each call begins with: its optimizers, and errors that reach every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distamp.errors import StageError
from distamp.optimizers import unwrapped
from distamp.scaler import joining, local_pass
from distamp.scaler.flow import Subject, look_and_agree, subject_of
from distamp.scaler.optimizer_state import OptimizerState, OptState

if TYPE_CHECKING:
    from distamp.scaler.grad_scaler import DistGradScaler

__all__ = ["enter"]


def enter(
    scaler: DistGradScaler,
    call: str,
    given: Sequence[Any],
    check: Callable[[OptimizerState], None],
) -> list[Subject]:
    """Return what a call is about; an error reaches every rank in this message or the next."""
    subjects: list[Subject] = []
    try:
        scaler._require_scale("step" if call == "step_all" else call)
        if len(given) != 1:
            _check_given(call, given)
        for optimizer in given:
            subject = subject_of(scaler, optimizer)
            joining.check(scaler, subject.optimizer)
            check(subject.state)
            subjects.append(subject)
    except Exception as error:
        if scaler._ranks.alone:
            raise
        if _is_due(scaler, given):
            look_and_agree(scaler, "step", subjects, local_pass.check, refused=error)
        shown = _with_peers(error, given) if call.startswith("step") else error
        scaler._ranks.raise_later_elsewhere(shown)
        raise shown from error
    return subjects


def _is_due(scaler: DistGradScaler, given: Sequence[Any]) -> bool:
    """Return whether the other ranks send a message in the call that is refused here."""
    unscaled_some = any(
        state["stage"] is OptState.UNSCALED for state in scaler._states.records.values()
    )
    for optimizer in given:
        state = scaler._states.get(optimizer)
        if state is None:
            if not unscaled_some:
                return True
        elif state["stage"] is OptState.READY and state.closed is None:
            return True
    return not given and not unscaled_some


def _check_given(call: str, given: Sequence[Any]) -> None:
    if not given and call == "unscale_":
        raise TypeError("unscale_() needs at least one optimizer")
    if len(given) > 1 and len(set(map(id, map(unwrapped, given)))) != len(given):
        raise StageError(
            f"{call}() was given one optimizer twice; each is unscaled and stepped once"
        )


def _with_peers(error: Exception, given: Sequence[Any]) -> Exception:
    """Return an error of a step as one rank alone raises it: the others may have taken the step."""
    names = ", ".join(type(unwrapped(optimizer)).__name__ for optimizer in given)
    if not isinstance(error, StageError):
        return error
    return StageError(
        f"{error} (ranks that did not raise this may be one step ahead, by {names}; all raise at "
        "their next message)"
    )
