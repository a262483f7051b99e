"""Read a scaler's ``state_dict``, whoever wrote it, before anything is changed by it."""

from __future__ import annotations

import math
import warnings
from dataclasses import fields
from typing import Any

from torch import Tensor

from distamp.errors import SettingError, StageError
from distamp.scaler.callers import stacklevel_of_caller
from distamp.scaler.headroom import HeadroomSchedule
from distamp.scaler.schedule import SCHEDULES, DynamicSchedule, Schedule

__all__ = ["read_state"]

_VERSION = 1
_KINDS: dict[str, type[Schedule]] = {**SCHEDULES, HeadroomSchedule.kind: HeadroomSchedule}


def read_state(
    state: dict[str, Any], current: Schedule
) -> tuple[Schedule, float, int, int, tuple[int, ...]]:
    """Return schedule, scale, growth tracker, hysteresis tracker and the schedule's memory.

    Args:
        state: What ``state_dict()`` of this class or of a torch scaler returned, or Apex's
            ``amp.state_dict()`` (``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}}``).
        current: The schedule of the scaler that loads. A torch scaler's dict says nothing of
            bounds or hysteresis, so those are kept.

    Raises:
        StageError: ``state`` is empty, as torch raises RuntimeError for it.
        SettingError: A value is missing or outside its range.
    """
    if not state:
        raise StageError(
            "The source state dict is empty, possibly because it was saved "
            "from a disabled instance of GradScaler."
        )
    state = _from_apex(state, current)
    settings = {name: _value(state, name) for name in _TORCH_SETTINGS}
    extras = state.get("distamp")
    if extras is None:
        schedule = current.replaced(**settings)
        hysteresis, memory = schedule.initial_hysteresis, schedule.initial_memory
    else:
        schedule, hysteresis, memory = _with_extras(extras, settings)
    tracker = _count(state, "_growth_tracker")
    return schedule, _scale(state, schedule), tracker, hysteresis, memory


_TORCH_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")


def _value(state: dict[str, Any], name: str) -> Any:
    if name not in state:
        raise SettingError(
            f"the scaler state has no {name!r}, only {sorted(map(str, state))}; it should be what "
            "scaler.state_dict() returned"
        )
    return state[name]


def _count(state: dict[str, Any], name: str) -> int:
    value = _value(state, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SettingError(f"the scaler state's {name} must be an integer >= 0, not {value!r}")
    return value


def _from_apex(state: dict[str, Any], current: Schedule) -> dict[str, Any]:
    """Return torch's keys for what ``apex.amp.state_dict()`` or one of its loss scalers holds."""
    scalers = [name for name in state if str(name).startswith("loss_scaler")]
    if len(scalers) > 1:
        raise SettingError(
            f"the state holds {len(scalers)} of Apex's loss scalers ({', '.join(scalers)}) and "
            f"this is one scaler; load one of them, for example state[{scalers[0]!r}]"
        )
    apex = state[scalers[0]] if scalers else state
    if "loss_scale" not in apex or "unskipped" not in apex:
        return state
    kept = {name: getattr(current, name) for name in _TORCH_SETTINGS}
    return {**kept, "scale": apex["loss_scale"], "_growth_tracker": apex["unskipped"]}


def _with_extras(
    extras: dict[str, Any], settings: dict[str, Any]
) -> tuple[Schedule, int, tuple[int, ...]]:
    if extras.get("version") != _VERSION:
        raise SettingError(
            f"the scaler state was written by another version ({extras.get('version')!r}) of "
            f"distamp; this one reads version {_VERSION}"
        )
    saved = dict(_value(extras, "schedule"))
    hysteresis = _count(saved, "hysteresis_tracker")
    del saved["hysteresis_tracker"]
    kind = saved.pop("kind", DynamicSchedule.kind)
    if kind not in _KINDS:
        raise SettingError(f"the scaler state has schedule {kind!r}; known are {sorted(_KINDS)}")
    memory = saved.pop("memory", None)
    unknown = set(saved) - {field.name for field in fields(_KINDS[kind])}
    if unknown:
        raise SettingError(
            f"the scaler state has settings that schedule {kind!r} does not: {sorted(unknown)}"
        )
    schedule = _KINDS[kind](**settings, **saved)
    if memory is None:
        return schedule, hysteresis, schedule.initial_memory
    if len(memory) != len(schedule.initial_memory):
        raise SettingError(
            f"the scaler state has a memory of {len(memory)} numbers for schedule {kind!r}, which "
            f"has {len(schedule.initial_memory)}"
        )
    return schedule, hysteresis, tuple(map(int, memory))


def _scale(state: dict[str, Any], schedule: Schedule) -> float:
    value = _value(state, "scale")
    if not isinstance(value, (int, float, Tensor)):
        raise SettingError(f"the scaler state's scale must be a number, not {value!r}")
    scale = float(value)
    if not math.isfinite(scale) or scale <= 0:
        raise SettingError(
            f"the scaler state has loss scale {scale}, with which no step can be taken. Load it "
            "with another 'scale', such as 65536.0"
        )
    kept = min(max(scale, schedule.min_scale), schedule.max_scale)
    if kept != scale:
        warnings.warn(
            f"the loaded loss scale {scale:g} is outside [{schedule.min_scale:g}, "
            f"{schedule.max_scale:g}] and becomes {kept:g}",
            stacklevel=stacklevel_of_caller(),
        )
    return kept
