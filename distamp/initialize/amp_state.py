"""What is saved of an `Amp`, and what of other libraries it loads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from distamp.errors import SettingError
from distamp.masters.state import read_masters
from distamp.precision import Precision
from distamp.scaler import DistGradScaler, MasterParameters

__all__ = ["load", "saved"]

_VERSION = 1


def saved(
    precision: Precision,
    scaler: DistGradScaler,
    masters: Sequence[MasterParameters],
) -> dict[str, Any]:
    """Return level, what torch's scaler would save, schedule and masters."""
    return {
        "version": _VERSION,
        "opt_level": precision.level,
        "loss_scalers": [scaler.state_dict()] if scaler.is_enabled() else [],
        "schedule": scaler.schedule_state_dict(),
        "masters": [each.state_dict() for each in masters],
    }


def load(
    state: dict[str, Any],
    scaler: DistGradScaler,
    masters: Sequence[MasterParameters],
) -> None:
    """Load what `saved` returned, Apex's ``amp.state_dict()``, or one scaler's state.

    A state of another level is welcome: a scale that there is not here, or not in it, stays as it
    is; and masters that it does not hold follow their parameters. Where Apex had a scale for each
    loss, all losses here share the smallest.

    Nothing is changed by a state that is refused.

    Raises:
        SettingError: It is not a dict, holds another number of masters than there are, or
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
        _load_scale(state.get("schedule"), scalers, scaler)
    if masters and saved_masters:
        for each, saved_state in zip(masters, saved_masters, strict=True):
            each.load_state_dict(saved_state)


def _load_scale(schedule: Any, scalers: list[dict[str, Any]], scaler: DistGradScaler) -> None:
    before = scaler.schedule_state_dict()
    if schedule is not None and schedule != {}:
        scaler.load_schedule_state_dict(schedule)
    try:
        scaler.load_state_dict(_smallest(scalers))
    except Exception:
        scaler.load_schedule_state_dict(before)
        raise


def _smallest(scalers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state with the smallest scale, at which no loss overflows more than it did."""
    if len(scalers) == 1:
        return scalers[0]
    if not all(isinstance(each, Mapping) for each in scalers):
        raise SettingError(f"the state's loss scales must be dicts, not {scalers!r:.80}")
    return min(scalers, key=lambda each: each.get("loss_scale", each.get("scale", math.inf)))


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
