"""The parts of an `Amp`'s state dict, also in states of Apex's ``amp`` and of scalers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distamp.errors import ConfigError
from distamp.guard.step_guard import OLD_STATE_KEY, STATE_KEY
from distamp.scaler import DistGradScaler, StaticLossScale

__all__ = ["VERSION", "check_is_state", "load_loss_scale", "saved_loss_scale", "saved_masters"]

_GUARD_STATE_KEYS = (STATE_KEY, OLD_STATE_KEY)
_SCALER_KEYS = ("scale", *_GUARD_STATE_KEYS)
#: The version of a state.
VERSION = 1


def check_is_state(state: Mapping[str, Any]) -> None:
    """Refuse a dict without any key of a state, also at levels without a loss scale.

    Raises:
        ConfigError: The dict is no state.
    """
    keys = [str(key) for key in state]
    if any(key in _SCALER_KEYS or key.startswith("loss_scale") for key in keys):
        return
    description = "no keys"
    if keys:
        description = f"the keys {', '.join(map(repr, keys[:5]))}"
        if len(keys) > 5:
            description += ", ..."
    raise ConfigError(
        f"amp.load_state_dict() was given a dict with {description}, which is no state of an Amp. "
        "It loads what amp.state_dict() returned (keys 'version', 'opt_level', 'loss_scalers', "
        "'masters'), Apex's amp.state_dict() (keys 'loss_scaler0', ...) or a scaler's state (keys "
        "'scale', '_growth_tracker', ...). Pass that part of the checkpoint, as in "
        "amp.load_state_dict(checkpoint['amp'])."
    )


def saved_loss_scale(state: Mapping[str, Any]) -> Any:
    """Return the state of the loss scale in a state of an Amp, of Apex or of a scaler, or None."""
    if "loss_scalers" in state:
        version = state.get("version")
        if not isinstance(version, int) or version != VERSION:
            raise ConfigError(
                f"The state was written by another version ({version!r}) of distamp. This version "
                f"reads version {VERSION}."
            )
        loss_scalers = _list_at(state, "loss_scalers")
        return loss_scalers[0] if loss_scalers else None
    apex_scalers = [state[key] for key in state if str(key).startswith("loss_scaler")]
    if apex_scalers:
        return min(apex_scalers, key=_apex_loss_scale)
    return state


def _apex_loss_scale(apex_scaler: Any) -> Any:
    """Return the loss scale of one of Apex's states; 0 for another object, which is loaded first.

    The scaler's own error refuses the object.
    """
    if isinstance(apex_scaler, Mapping):
        return apex_scaler.get("loss_scale", 0)
    return 0


def saved_masters(state: Mapping[str, Any]) -> list[Any]:
    """Return the states of the masters of each optimizer in a state of an Amp."""
    return _list_at(state, "masters")


def _list_at(state: Mapping[str, Any], key: str) -> list[Any]:
    value = state.get(key)
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{key!r} in the state must be a list, not {value!r:.80}.")
    return list(value)


def load_loss_scale(scaler: DistGradScaler, state: Any) -> None:
    """Load a scaler's state if the loss scale is dynamic both here and in the state."""
    saved_scaler = DistGradScaler("cpu")
    saved_scaler.load_state_dict(scaler.state_dict())
    saved_scaler.load_state_dict(state)
    kind = scaler.state_dict()[STATE_KEY]["kind"]
    saved_kind = saved_scaler.state_dict()[STATE_KEY]["kind"]
    if StaticLossScale.kind in (kind, saved_kind):
        return
    if kind != saved_kind:
        # The argument of `initialize` decides the rule, so that of the state is left out.
        state = {key: value for key, value in state.items() if key not in _GUARD_STATE_KEYS}
    scaler.load_state_dict(state)
