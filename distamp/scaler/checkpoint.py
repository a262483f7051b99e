"""Read a scaler's ``state_dict``, whoever wrote it, before anything is changed by it."""

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

__all__ = ["Saved", "from_torch", "read_state", "write_loss_scale"]

_VERSION = 1
# What the counters on a device hold.
_LARGEST_COUNT = 2**31 - 1
_TORCH_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")


@dataclass(frozen=True)
class Saved:
    """What was read from a state.

    Args:
        loss_scale: How the scale moves.
        scale: The loss scale; None where the state does not say.
        tracker: Clean iterations since the scale last moved; None where it does not say.
        hysteresis: Overflows still forgiven; None where it does not say.
    """

    loss_scale: LossScale
    scale: float | None = None
    tracker: int | None = None
    hysteresis: int | None = None


def read_state(state: Mapping[str, Any], current: LossScale) -> Saved:
    """Read what ``state_dict()`` of this class or of a torch scaler returned, or Apex's.

    Args:
        state: torch's five keys; or ``amp.state_dict()`` of Apex (``{"loss_scaler0":
            {"loss_scale": ..., "unskipped": ...}}``).
        current: The loss scale of the scaler that loads. torch's five keys say nothing of bounds or
            hysteresis, so those are kept where the state has no key of ours.

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
    own = read_own_state(state)
    if own is not None and "scale" not in state:
        return Saved(current)  # of a run that scaled nothing: the scale here is kept
    state = _from_apex(state, current)
    settings = {name: _value(state, name) for name in _TORCH_SETTINGS}
    loss_scale, hysteresis = current.replace(**settings), None
    if own is not None:
        loss_scale, hysteresis = _read_own(own, settings)
    tracker = _count(state, "_growth_tracker")
    return Saved(loss_scale, _scale(state, loss_scale), tracker, hysteresis)


def write_loss_scale(loss_scale: LossScale, hysteresis: int) -> dict[str, Any]:
    """Return what torch's five keys cannot hold: the kind of loss scale, its bounds and credit."""
    return {"version": _VERSION, **loss_scale.extras(), "hysteresis_tracker": hysteresis}


def _read_own(state: Any, settings: Mapping[str, Any]) -> tuple[LossScale, int]:
    """Return loss scale and credit of what `write_loss_scale` returned, and torch's settings."""
    _check_mapping(state, f"state_dict()[{STATE_KEY!r}]")
    version = state.get("version")
    if type(version) is not int or version != _VERSION:
        raise ConfigError(
            f"the scaler state was written by another version ({version!r:.80}) of "
            f"distamp; this one reads version {_VERSION}"
        )
    hysteresis = _count(state, "hysteresis_tracker")
    kind = state.get("kind", DynamicLossScale.kind)
    if not isinstance(kind, str) or kind not in LOSS_SCALES:
        instead = ": 'headroom' is gone, take 'dynamic'" if kind == "headroom" else ""
        raise ConfigError(
            f"the scaler state has loss scale {kind!r}; known are {sorted(LOSS_SCALES)}{instead}"
        )
    saved = {k: v for k, v in state.items() if k not in ("version", "hysteresis_tracker", "kind")}
    unknown = set(saved) - {field.name for field in fields(LOSS_SCALES[kind])}
    if unknown:
        raise ConfigError(
            f"the scaler state has settings that loss scale {kind!r} does not: {sorted(unknown)}"
        )
    return LOSS_SCALES[kind](**settings, **saved), hysteresis


def from_torch(state: Mapping[str, Any]) -> Saved:
    """Read what ``torch.amp.GradScaler`` pickled; a disabled one has no settings.

    Such a pickle names torch's class, which under ``distamp.patch_torch()`` is this one.

    Raises:
        ConfigError: A setting is outside its range.
    """
    names = [name for name in _TORCH_SETTINGS if f"_{name}" in state]
    loss_scale = DynamicLossScale(**{name: state[f"_{name}"] for name in names})
    scale = loss_scale.checked_scale(state.get("_init_scale", 2.0**16))
    return Saved(loss_scale, scale, state.get("_init_growth_tracker", 0), 1)


def _check_mapping(state: object, written_by: str) -> None:
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"a scaler's state is the dict that scaler.{written_by} returned, not {state!r:.80}"
        )


def _value(state: Mapping[str, Any], name: str) -> Any:
    if name not in state:
        raise ConfigError(
            f"the scaler state has no {name!r}, only {sorted(map(str, state))}; it should be what "
            "scaler.state_dict() returned"
        )
    return state[name]


def _count(state: Mapping[str, Any], name: str) -> int:
    value = _value(state, name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_COUNT:
        raise ConfigError(
            f"the scaler state's {name} must be an integer from 0 to {_LARGEST_COUNT}, not "
            f"{value!r}"
        )
    return value


def _from_apex(state: Mapping[str, Any], current: LossScale) -> Mapping[str, Any]:
    """Return torch's keys for what ``apex.amp.state_dict()`` or one of its loss scalers holds."""
    scalers = [name for name in state if str(name).startswith("loss_scaler")]
    if len(scalers) > 1:
        raise ConfigError(
            f"the state holds {len(scalers)} of Apex's loss scalers ({', '.join(scalers)}) and "
            f"this is one scaler; load one of them, for example state[{scalers[0]!r}]"
        )
    apex = state[scalers[0]] if scalers else state
    _check_mapping(apex, "state_dict()")
    if "loss_scale" not in apex or "unskipped" not in apex:
        return state
    kept = {name: getattr(current, name) for name in _TORCH_SETTINGS}
    return {**kept, "scale": apex["loss_scale"], "_growth_tracker": apex["unskipped"]}


def _scale(state: Mapping[str, Any], loss_scale: LossScale) -> float:
    value = _value(state, "scale")
    if not isinstance(value, (int, float, Tensor)):
        raise ConfigError(f"the scaler state's scale must be a number, not {value!r}")
    scale = float(value)
    if not math.isfinite(scale) or scale <= 0:
        raise ConfigError(
            f"the scaler state has loss scale {scale}, with which no step can be taken. Load it "
            "with another 'scale', such as 65536.0"
        )
    kept = min(max(scale, loss_scale.min_scale), loss_scale.max_scale)
    if kept != scale:
        warnings.warn(
            f"the loaded loss scale {scale:g} is outside [{loss_scale.min_scale:g}, "
            f"{loss_scale.max_scale:g}] and becomes {kept:g}",
            stacklevel=stacklevel_of_caller(),
        )
    return kept
