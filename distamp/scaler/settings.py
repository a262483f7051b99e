"""What a scaler is made with, checked; and small things that are asked of its caller."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from distamp.errors import SettingError
from distamp.scaler.schedule import MAX_SCALE, MIN_SCALE, DynamicSchedule, Schedule

__all__ = [
    "Names",
    "check_fp16_grads",
    "check_skips",
    "one_number",
    "resolve_device",
    "schedule_of",
    "stacklevel_of_caller",
]

_FP16_GRADS = ("error", "inplace", "master")


def resolve_device(device: Any) -> tuple[Any, bool]:
    """Return the device type and whether this machine has it.

    Raises:
        TypeError: Something that can be no device: a number, a list.
        ValueError: torch knows no such device.
    """
    is_there = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if is_there else None
    if device is None:
        return (accelerator.type if accelerator is not None else "cpu"), True
    if isinstance(device, (bool, int, float)):
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


def check_fp16_grads(fp16_grads: object) -> None:
    """Refuse what is no way to treat float16 gradients."""
    if fp16_grads not in _FP16_GRADS:
        raise SettingError(f"fp16_grads must be one of {_FP16_GRADS}, not {fp16_grads!r}")


def check_skips(limit: object) -> None:
    """Refuse a limit on skipped steps that is no integer >= 1."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise SettingError(f"max_consecutive_skips must be an integer >= 1 or None, not {limit!r}")


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


def stacklevel_of_caller() -> int:
    """Return the ``stacklevel`` with which the caller's warning names the first line outside us.

    A fixed number would name a line of this package wherever a structure is walked recursively.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("distamp."):
        level, frame = level + 1, frame.f_back
    return level
