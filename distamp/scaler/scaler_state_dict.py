"""Parsing of a scaler's state: torch's five keys, ours, Apex's, and pickles of torch's scaler.

A state is parsed whole before the scaler changes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from distamp.callers import stacklevel_of_caller
from distamp.errors import CallOrderError, ConfigError
from distamp.guard.step_guard import STATE_KEY, read_own_state
from distamp.scaler.loss_scale import LOSS_SCALES, DynamicLossScale, LossScale

__all__ = ["ParsedState", "loss_scale_state_dict", "parse_state_dict", "parse_torch_pickle"]

_VERSION = 1
#: Counters are int32 on a device.
_MAX_COUNT = 2**31 - 1
_TORCH_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
_TORCH_KEYS = frozenset(("scale", "_growth_tracker", *_TORCH_SETTINGS))
#: Keys of a `loss_scale_state_dict` that are no settings of the loss scale.
_OTHER_KEYS = ("version", "hysteresis_tracker", "kind")


@dataclass(frozen=True)
class ParsedState:
    """The values of a state, checked.

    Args:
        loss_scale: The rule of the loss scale.
        scale: The loss scale; None if the state has none.
        growth_tracker: Clean iterations since the last change of the scale; None if the state has
            no such number.
        hysteresis_tracker: Overflows that the rule still forgives; None if the state has no such
            number.
    """

    loss_scale: LossScale
    scale: float | None = None
    growth_tracker: int | None = None
    hysteresis_tracker: int | None = None


def parse_state_dict(state: Mapping[str, Any], current: LossScale) -> ParsedState:
    """Parse the ``state_dict()`` of this class or of a torch scaler, or Apex's.

    Args:
        state: torch's five keys; or ``amp.state_dict()`` of Apex (``{"loss_scaler0":
            {"loss_scale": ..., "unskipped": ...}}``).
        current: The loss scale of the scaler that loads. torch's five keys have no bounds and no
            hysteresis, so the current ones stay if the state has no key of ours.

    Raises:
        CallOrderError: ``state`` is empty, as torch raises RuntimeError for it.
        ConfigError: A value is missing or outside its range.
    """
    _check_mapping(state, "state_dict()")
    if not state:
        raise CallOrderError(
            "The source state dict is empty, possibly because it was saved "
            "from a disabled instance of GradScaler."
        )
    entry = read_own_state(state)
    if entry is not None and _TORCH_KEYS.isdisjoint(state):
        # The state of a StepGuard has no scale, so the current scale stays.
        return ParsedState(current)
    state = _from_apex(state, current)
    settings = {name: _require(state, name) for name in _TORCH_SETTINGS}
    hysteresis_tracker = None
    loss_scale = current.replace(**settings)
    if entry is not None:
        loss_scale, hysteresis_tracker = _parse_distamp_entry(entry, settings)
    growth_tracker = _require_count(state, "_growth_tracker")
    scale = _parse_scale(state, loss_scale)
    return ParsedState(loss_scale, scale, growth_tracker, hysteresis_tracker)


def loss_scale_state_dict(loss_scale: LossScale, hysteresis_tracker: int) -> dict[str, Any]:
    """Return the values for which torch's five keys have no place: the rule and its bounds."""
    settings = loss_scale.non_torch_settings()
    return {"version": _VERSION, **settings, "hysteresis_tracker": hysteresis_tracker}


def _parse_distamp_entry(entry: Any, settings: Mapping[str, Any]) -> tuple[LossScale, int]:
    """Return loss scale and hysteresis of a `loss_scale_state_dict`, with torch's settings."""
    _check_mapping(entry, f"state_dict()[{STATE_KEY!r}]")
    version = entry.get("version")
    if type(version) is not int or version != _VERSION:
        raise ConfigError(
            f"The scaler state was written by another version ({version!r:.80}) of distamp. This "
            f"one reads version {_VERSION}."
        )
    hysteresis_tracker = _require_count(entry, "hysteresis_tracker")
    kind = entry.get("kind", DynamicLossScale.kind)
    if not isinstance(kind, str) or kind not in LOSS_SCALES:
        hint = " 'headroom' was removed. Use 'dynamic'." if kind == "headroom" else ""
        kinds = sorted(LOSS_SCALES)
        raise ConfigError(f"The scaler state has loss scale {kind!r}, not one of {kinds}.{hint}")
    loss_scale_class = LOSS_SCALES[kind]
    saved_settings = dict(entry)
    for key in _OTHER_KEYS:
        saved_settings.pop(key, None)
    known_settings = {field.name for field in fields(loss_scale_class)}
    unknown = sorted(set(saved_settings) - known_settings)
    if unknown:
        raise ConfigError(
            f"The scaler state has settings that loss scale {kind!r} does not have: {unknown}."
        )
    return loss_scale_class(**settings, **saved_settings), hysteresis_tracker


def parse_torch_pickle(state: Mapping[str, Any]) -> ParsedState:
    """Parse the pickled attributes of a ``torch.amp.GradScaler``; a disabled one has no settings.

    Such a pickle names torch's class, which under ``distamp.patch_torch()`` is `DistGradScaler`.

    Raises:
        ConfigError: A setting is outside its range.
    """
    settings: dict[str, Any] = {}
    for name in _TORCH_SETTINGS:
        if f"_{name}" in state:
            settings[name] = state[f"_{name}"]
    loss_scale = DynamicLossScale(**settings)
    scale = loss_scale.checked_scale(state.get("_init_scale", 2.0**16))
    growth_tracker = state.get("_init_growth_tracker", 0)
    return ParsedState(loss_scale, scale, growth_tracker, hysteresis_tracker=1)


def _check_mapping(state: object, source: str) -> None:
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"A scaler's state is the dict that scaler.{source} returned, not {state!r:.80}."
        )


def _require(state: Mapping[str, Any], name: str) -> Any:
    if name not in state:
        keys = sorted(map(str, state))
        raise ConfigError(
            f"The scaler state has no {name!r}, only {keys}. It should be the result of "
            "scaler.state_dict()."
        )
    return state[name]


def _require_count(state: Mapping[str, Any], name: str) -> int:
    value = _require(state, name)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not 0 <= value <= _MAX_COUNT:
        raise ConfigError(
            f"The scaler state's {name} must be an integer from 0 to {_MAX_COUNT}, not {value!r}."
        )
    count: int = value
    return count


def _from_apex(state: Mapping[str, Any], current: LossScale) -> Mapping[str, Any]:
    """Return torch's keys for the state of Apex's ``amp`` or of one of its loss scalers."""
    names = [name for name in state if str(name).startswith("loss_scaler")]
    if len(names) > 1:
        raise ConfigError(
            f"The state has {len(names)} of Apex's loss scalers ({', '.join(names)}), and this is "
            f"one scaler. Load one of them, for example state[{names[0]!r}]."
        )
    apex_state = state[names[0]] if names else state
    _check_mapping(apex_state, "state_dict()")
    if "loss_scale" not in apex_state or "unskipped" not in apex_state:
        return state
    torch_state = {name: getattr(current, name) for name in _TORCH_SETTINGS}
    torch_state["scale"] = apex_state["loss_scale"]
    torch_state["_growth_tracker"] = apex_state["unskipped"]
    return torch_state


def _parse_scale(state: Mapping[str, Any], loss_scale: LossScale) -> float:
    value = _require(state, "scale")
    if not isinstance(value, (int, float, Tensor)):
        raise ConfigError(f"The scaler state's scale must be a number, not {value!r}.")
    scale = float(value)
    if not math.isfinite(scale) or scale <= 0:
        raise ConfigError(
            f"The scaler state has loss scale {scale}, with which no step can be taken. Load the "
            "state with another 'scale', such as 65536.0."
        )
    min_scale, max_scale = loss_scale.min_scale, loss_scale.max_scale
    clamped = min(max(scale, min_scale), max_scale)
    if clamped != scale:
        warnings.warn(
            f"The loaded loss scale {scale:g} is outside [{min_scale:g}, {max_scale:g}] and "
            f"becomes {clamped:g}.",
            stacklevel=stacklevel_of_caller(),
        )
    return clamped
