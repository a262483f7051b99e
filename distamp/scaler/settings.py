"""What a scaler is made with, checked."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from distamp.errors import SettingError
from distamp.protocols import CommHook
from distamp.scaler.schedule import MAX_SCALE, MIN_SCALE, DynamicSchedule, Schedule
from distamp.sources import GradientSource

__all__ = ["Names", "Settings", "checked_hook", "one_number", "resolve_device", "schedule_of"]

_FP16_GRADS = ("error", "inplace", "master")


def resolve_device(device: Any) -> tuple[Any, bool]:
    """Return the device type and whether this machine has it.

    Raises:
        TypeError: Something that is no device: a number, a list.
        ValueError: torch knows no such device.
    """
    is_there = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if is_there else None
    if device is None:
        return ("cpu" if accelerator is None else accelerator.type), True
    if isinstance(device, (int, float)):
        raise TypeError(
            f"device must be a device type such as 'cuda' or 'cpu', not {device!r}; "
            f"a loss scale is given by keyword: init_scale={device!r}"
        )
    if isinstance(device, (bytes, Tensor, list, tuple, dict, set)):
        raise TypeError(f"device must be a str or None, not {type(device).__name__}")
    if not isinstance(device, (str, torch.device)):
        return device, True  # a stand-in, which torch stores unread as well
    try:
        device_type = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is not a device that torch knows: {error}") from None
    there = device_type == "cpu" or (accelerator is not None and accelerator.type == device_type)
    return device_type, there


def schedule_of(
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    schedule: Schedule | None,
) -> Schedule:
    """Return the schedule that a scaler's settings ask for.

    Raises:
        TypeError: ``schedule`` is none.
        SettingError: A setting is outside its range, or belongs to the schedule that is given.
    """
    settings = (growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
    if schedule is None:
        return DynamicSchedule(*settings)
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a Schedule, not {type(schedule).__name__}")
    if settings != (2.0, 0.5, 2000, MIN_SCALE, MAX_SCALE):
        raise SettingError(
            "growth_factor, backoff_factor, growth_interval, min_scale and max_scale belong to "
            "the schedule when one is given; set them there"
        )
    return schedule


def one_number(value: float | Tensor) -> float:
    """Return a new scale as a number; raise where a tensor of it has no one value."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1 or value.requires_grad:
        raise SettingError(
            "new_scale should be a float or a 1-element tensor with requires_grad=False, not a "
            f"tensor of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
        )
    return float(value.item())


class Names:
    """The names of parameters, which are held weakly.

    Args:
        named_parameters: Pairs, as ``model.named_parameters()`` gives them.

    Raises:
        TypeError: They are no pairs.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]] | None = None) -> None:
        try:
            pairs = [(name, parameter) for name, parameter in named_parameters or ()]
        except (TypeError, ValueError):
            raise TypeError(
                "named_parameters must be pairs of name and parameter, as model.named_parameters() "
                f"gives them, not {type(named_parameters).__name__}"
            ) from None
        self._names = {id(p): (weakref.ref(p), name) for name, p in pairs}

    def of(self, parameter: Tensor, default: str) -> str:
        """Return the name of a parameter."""
        reference, name = self._names.get(id(parameter), (None, default))
        return name if reference is not None and reference() is parameter else default


class Settings:
    """What a scaler was made with; made anew where a setting changes.

    Args:
        schedule: How the scale moves.
        fp16_grads: What to do with float16 gradients.
        max_consecutive_skips: The limit on skipped steps in a row.
        names: Of parameters.

    Raises:
        SettingError: ``fp16_grads`` or ``max_consecutive_skips`` is none of what is allowed.
    """

    def __init__(
        self, schedule: Schedule, fp16_grads: str, max_consecutive_skips: int | None, names: Names
    ) -> None:
        limit = max_consecutive_skips
        if fp16_grads not in _FP16_GRADS:
            raise SettingError(f"fp16_grads must be one of {_FP16_GRADS}, not {fp16_grads!r}")
        if limit is not None and (type(limit) is not int or limit < 1):
            raise SettingError(
                f"max_consecutive_skips must be an integer >= 1 or None, not {limit!r}"
            )
        self.schedule = schedule
        self.fp16_grads = fp16_grads
        self.max_consecutive_skips = limit
        self.names = names
        #: What all ranks must have alike.
        self.text = f"{schedule}, fp16_grads={fp16_grads!r}, max_consecutive_skips={limit}"

    def with_schedule(self, schedule: Schedule) -> Settings:
        """Return the same with another schedule."""
        return Settings(schedule, self.fp16_grads, self.max_consecutive_skips, self.names)

    def check_masters(self, optimizer: Any, source: GradientSource) -> None:
        """Refuse masters that the scaler does not know of, and the other way round.

        Raises:
            SettingError: The optimizer has masters and the settings do not say so, or has float16
                parameters without masters although they do.
        """
        if source.casts == (self.fp16_grads == "master"):
            return
        name = type(optimizer).__name__
        if source.casts:
            raise SettingError(
                f"{name} has master parameters and the scaler has fp16_grads="
                f"{self.fp16_grads!r}: make it with fp16_grads='master', which unscales on the way "
                "to them"
            )
        if any(p.dtype is torch.float16 for p in source.parameters()):
            raise SettingError(
                f"fp16_grads='master', and {name} holds float16 parameters without masters: call "
                "MasterParameters(optimizer) before the first step"
            )


def checked_hook(state: object) -> CommHook:
    """Return the state of a hook that a scaler can tell of its scale.

    Raises:
        ValueError: The state of torch's PowerSGD.
        TypeError: Something else that is none.
    """
    if type(state).__name__ == "PowerSGDState":
        raise ValueError(
            "PowerSGD cannot be joined with a scaler: its error feedback keeps an inf for ever, "
            "and grows when the loss scale moves; use distamp.comm_hooks.register(model, 'int8'), "
            "whose error feedback follows the scale"
        )
    if not isinstance(state, CommHook):
        raise TypeError(
            f"attach() takes what distamp.comm_hooks.register returned, not {type(state).__name__}"
        )
    return state
