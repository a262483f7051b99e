"""What is saved of an `Amp`, and what of other libraries it loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distamp.errors import SettingError
from distamp.initialize.losses import LossScales
from distamp.masters.state import read_masters
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

    Nothing is changed by a state that is refused.

    Raises:
        SettingError: It is not a dict, holds another number of losses or masters than there are, or
            a value out of range.
        ValueError: It holds masters of other parameters.
    """
    if not isinstance(state, Mapping):
        raise SettingError(
            f"the state is the dict that amp.state_dict() returned, not {state!r:.80}"
        )
    scalers, saved_masters = _scalers(state), _list_of(state, "masters")
    if masters and saved_masters:
        if len(saved_masters) != len(masters):
            raise SettingError(
                f"the state holds the masters of {len(saved_masters)} optimizers and "
                f"{len(masters)} have some here; initialize with the same optimizers"
            )
        for each, saved_state in zip(masters, saved_masters, strict=True):
            # They are compared, and nothing is written yet.
            read_masters(saved_state, each.state_dict()["masters"])
    if scaler.is_enabled() and scalers:
        _load_scales(state.get("schedule"), scalers, scaler, losses)
    if masters and saved_masters:
        for each, saved_state in zip(masters, saved_masters, strict=True):
            each.load_state_dict(saved_state)


def _load_scales(
    schedule: Any,
    scalers: list[dict[str, Any]],
    scaler: DistGradScaler,
    losses: LossScales | None,
) -> None:
    if losses is not None:
        losses.load_state_dict(scalers)
    elif len(scalers) == 1:
        before = scaler.schedule_state_dict()
        if schedule is not None and schedule != {}:
            scaler.load_schedule_state_dict(schedule)
        try:
            scaler.load_state_dict(scalers[0])
        except Exception:
            scaler.load_schedule_state_dict(before)
            raise
    else:
        raise SettingError(
            f"the state holds the scales of {len(scalers)} losses and num_losses is 1; initialize "
            f"with num_losses={len(scalers)}"
        )


def _scalers(state: Mapping[str, Any]) -> list[Any]:
    if "loss_scalers" in state:
        version = state.get("version")
        if not isinstance(version, int) or version != _VERSION:
            raise SettingError(
                f"the state was written by another version ({version!r}) of distamp; this one "
                f"reads version {_VERSION}"
            )
        return _list_of(state, "loss_scalers")
    apex = [name for name in state if str(name).startswith("loss_scaler")]
    if apex:
        numbers = {name: str(name).removeprefix("loss_scaler") for name in apex}
        wrong = [name for name, number in numbers.items() if not number.isdecimal()]
        if wrong:
            raise SettingError(f"the state has {wrong[0]!r} where Apex writes loss_scaler0, 1, ...")
        return [state[name] for name in sorted(apex, key=lambda name: int(numbers[name]))]
    return [state]


def _list_of(state: Mapping[str, Any], name: str) -> list[Any]:
    found = state.get(name)
    if found is None:
        return []
    if not isinstance(found, (list, tuple)):
        raise SettingError(f"the state's {name!r} must be a list, not {found!r:.80}")
    return list(found)
