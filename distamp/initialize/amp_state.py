"""What is saved of an `Amp`, and what of other libraries it loads."""

from __future__ import annotations

from typing import Any

from distamp.errors import SettingError
from distamp.initialize.losses import LossScales
from distamp.precision import Precision
from distamp.scaler import DistGradScaler

__all__ = ["load", "saved"]

_VERSION = 1


def saved(
    precision: Precision, scaler: DistGradScaler, losses: LossScales | None
) -> dict[str, Any]:
    """Return the level's name and, for each loss, what a scaler of torch's would save."""
    if losses is not None:
        scalers = losses.state_dict()
    else:
        scalers = [scaler.state_dict()] if scaler.is_enabled() else []
    return {"version": _VERSION, "opt_level": precision.level, "loss_scalers": scalers}


def load(
    state: dict[str, Any],
    precision: Precision,
    scaler: DistGradScaler,
    losses: LossScales | None,
) -> None:
    """Load what `saved` returned, Apex's ``amp.state_dict()``, or one scaler's state.

    A level without a scaler loads nothing; a state without scales, from such a level, leaves the
    scale as it is.

    Raises:
        SettingError: It holds another number of losses than there are, or a value out of range.
    """
    scalers = _scalers(state)
    if not scaler.is_enabled() or not scalers:
        return
    if losses is not None:
        losses.load_state_dict(scalers)
    elif len(scalers) == 1:
        scaler.load_state_dict(scalers[0])
    else:
        raise SettingError(
            f"the state holds the scales of {len(scalers)} losses and num_losses is 1; initialize "
            f"with num_losses={len(scalers)}"
        )


def _scalers(state: dict[str, Any]) -> list[dict[str, Any]]:
    if "loss_scalers" in state:
        if state.get("version") != _VERSION:
            raise SettingError(
                f"the state was written by another version ({state.get('version')!r}) of "
                f"distamp; this one reads version {_VERSION}"
            )
        return list(state["loss_scalers"])
    apex = [name for name in state if str(name).startswith("loss_scaler")]
    if apex:
        by_number = sorted(apex, key=lambda name: int(name.removeprefix("loss_scaler")))
        return [state[name] for name in by_number]
    return [state]
