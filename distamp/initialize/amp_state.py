"""What is saved of an `Amp`, and what of other libraries it loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distamp.errors import SettingError
from distamp.initialize.losses import LossScales
from distamp.precision import Precision
from distamp.scaler import DistGradScaler, MasterParameters

__all__ = ["load", "saved"]

_VERSION = 1


def saved(
    precision: Precision,
    scaler: DistGradScaler,
    losses: LossScales | None,
    masters: Sequence[MasterParameters],
) -> dict[str, Any]:
    """Return level, what torch's scaler would save of each loss, schedule and masters."""
    if losses is not None:
        scalers = losses.state_dict()
    else:
        scalers = [scaler.state_dict()] if scaler.is_enabled() else []
    return {
        "version": _VERSION,
        "opt_level": precision.level,
        "loss_scalers": scalers,
        "schedule": {} if losses is not None else scaler.schedule_state_dict(),
        "masters": [each.state_dict() for each in masters],
    }


def load(
    state: dict[str, Any],
    scaler: DistGradScaler,
    losses: LossScales | None,
    masters: Sequence[MasterParameters],
) -> None:
    """Load what `saved` returned, Apex's ``amp.state_dict()``, or one scaler's state.

    A state of another level is welcome: scales that there are none of here, or that it does not
    hold, are left as they are; and masters that it does not hold follow their parameters.

    Raises:
        SettingError: It holds another number of losses or masters than there are, or a value out
            of range.
        ValueError: It holds masters of other parameters.
    """
    saved_masters = state.get("masters") or []
    if masters and saved_masters:
        if len(saved_masters) != len(masters):
            raise SettingError(
                f"the state holds the masters of {len(saved_masters)} optimizers and "
                f"{len(masters)} have some here; initialize with the same optimizers"
            )
        for each, saved_state in zip(masters, saved_masters, strict=True):
            each.load_state_dict(saved_state)
    scalers = _scalers(state)
    if not scaler.is_enabled() or not scalers:
        return
    if losses is not None:
        losses.load_state_dict(scalers)
    elif len(scalers) == 1:
        if state.get("schedule"):
            scaler.load_schedule_state_dict(state["schedule"])
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
