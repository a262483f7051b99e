"""What a scaler is set to, and how that is checked, saved, loaded and pickled."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from distamp.errors import SettingError, StageError
from distamp.scaler import process_group as groups
from distamp.scaler.agreement import Agreement
from distamp.scaler.attached import Attached
from distamp.scaler.compat import TorchInnerNames
from distamp.scaler.device import resolve_device_type
from distamp.scaler.known import KnownOptimizers
from distamp.scaler.norms import Parts
from distamp.scaler.process_group import GroupLike
from distamp.scaler.schedule import MAX_SCALE, MIN_SCALE, DynamicSchedule, Schedule
from distamp.scaler.stages import Records
from distamp.scaler.state import read_state

__all__ = ["ScalerSettings"]

_FP16_GRADS = ("error", "inplace", "master")


class ScalerSettings(TorchInnerNames):
    """The settings of a `DistGradScaler`, whose docstring explains them."""

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: GroupLike = None,
        min_scale: float = MIN_SCALE,
        max_scale: float = MAX_SCALE,
        schedule: Schedule | None = None,
        fp16_grads: Literal["error", "inplace", "master"] = "error",
        recheck: bool = False,
        max_consecutive_skips: int | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        # torch's __init__ is not called: it warns about CUDA and asserts on what is checked here.
        self._device, available = resolve_device_type(device)
        self._enabled = bool(enabled) and available
        if enabled and not available:
            warnings.warn(
                f"DistGradScaler is enabled, but {self._device} is not available.  Disabling.",
                stacklevel=2,
            )
        settings = (growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
        if schedule is None:
            schedule = DynamicSchedule(*settings)
        elif not isinstance(schedule, Schedule):
            raise TypeError(f"schedule must be a Schedule, not {type(schedule).__name__}")
        elif settings != (2.0, 0.5, 2000, MIN_SCALE, MAX_SCALE):
            raise SettingError(
                "growth_factor, backoff_factor, growth_interval, min_scale and max_scale belong to "
                "the schedule when one is given; set them there"
            )
        if fp16_grads not in _FP16_GRADS:
            raise SettingError(f"fp16_grads must be one of {_FP16_GRADS}, not {fp16_grads!r}")
        if max_consecutive_skips is not None and (
            type(max_consecutive_skips) is not int or max_consecutive_skips < 1
        ):
            raise SettingError(
                f"max_consecutive_skips must be an integer >= 1 or None, not "
                f"{max_consecutive_skips!r}"
            )
        groups.check(process_group)
        self._schedule = schedule
        self._fp16_grads = fp16_grads
        self._recheck = recheck
        self._max_consecutive_skips = max_consecutive_skips
        self._names = _names_by_id(named_parameters)
        self._init_scale = schedule.checked_scale(init_scale)
        self._init_growth_tracker = 0
        self._init_hysteresis = schedule.initial_hysteresis
        self._init_memory = schedule.initial_memory
        self._start(process_group)

    def _start(self, process_group: GroupLike) -> None:
        """Set what neither a checkpoint nor a pickle carries."""
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._hysteresis_tracker: Tensor | None = None
        self._memory: Tensor | None = None
        self._largest: Tensor | None = None
        self._met: Tensor | None = None
        self._scale_called = False
        self._warned_seed = False
        self._parts: dict[tuple[tuple[int, ...], int], Parts] = {}
        self._in_words: tuple[Any, str] = (None, "")
        self._per_optimizer_states = Records()
        self._known = KnownOptimizers()
        self._agreement = Agreement(process_group)
        self._attached = Attached()

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor that the scale grows by; > 1, else SettingError."""
        self._growth_factor = new_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor that an overflow multiplies the scale by; in (0, 1), else SettingError."""
        self._backoff_factor = new_factor

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the clean iterations before the scale grows; >= 1, else SettingError."""
        self._growth_interval = new_interval

    @property
    def process_group(self) -> GroupLike:
        """The group as given; assign to it after unpickling or after a group was made anew."""
        return self._agreement.process_group

    @process_group.setter
    def process_group(self, process_group: GroupLike) -> None:
        groups.check(process_group)
        self._agreement = Agreement(process_group)
        self._known.forget_agreements()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five keys; anything more under ``"distamp"``; empty when disabled.

        ``"distamp"`` is absent while the schedule's extras are at their defaults, so that
        ``torch.amp.GradScaler`` and this class load each other's.
        """
        if not self._enabled:
            return {}
        state: dict[str, Any] = {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }
        extras = self._schedule.extras()
        if extras != DynamicSchedule().extras():
            left = self._hysteresis_tracker
            extras["hysteresis_tracker"] = (
                self._init_hysteresis if left is None else int(left.item())
            )
            if self._init_memory:
                extras["memory"] = list(self._current_memory())
            state["distamp"] = {"version": 1, "schedule": extras}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, of this class, of torch's, or Apex's.

        A disabled scaler loads nothing, as in torch.

        Raises:
            StageError: The dict is empty (torch raises RuntimeError).
            SettingError: A value is outside its range; nothing is changed then.
        """
        if not self._enabled:
            return
        schedule, scale, tracker, hysteresis, memory = read_state(state_dict, self._schedule)
        self._schedule = schedule
        self._init_scale, self._init_growth_tracker = scale, tracker
        self._init_hysteresis, self._init_memory = hysteresis, memory
        if self._scale is not None:
            self._scale.fill_(scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(tracker)
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(hysteresis)
        self._load_memory(memory)
        self._agreement.restart()

    def _current_memory(self) -> tuple[int, ...]:
        return self._init_memory if self._memory is None else tuple(self._memory.tolist())

    def _load_memory(self, memory: tuple[int, ...]) -> None:
        self._largest = None
        if self._memory is not None and self._memory.numel() == len(memory):
            self._memory.copy_(torch.tensor(memory))
        elif self._scale is not None:  # the loaded schedule is of another kind
            self._memory = torch.tensor(memory, device=self._scale.device) if memory else None

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._per_optimizer_states:
            raise StageError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        # What a subclass added goes along, as with torch's class.
        left_out = {"_names", *self._fresh()}
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        state["_init_scale"] = self.get_scale() if self._enabled else self._init_scale
        state["_init_growth_tracker"] = self._get_growth_tracker()
        left = self._hysteresis_tracker
        state["_init_hysteresis"] = self._init_hysteresis if left is None else int(left.item())
        state["_init_memory"] = self._current_memory()
        state["group_was_default"] = self._agreement.process_group is None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        was_default = state.pop("group_was_default")
        self.__dict__.update(state)
        self._names = {}
        self._start(None)
        if not was_default:
            self._agreement.require_group()

    def _fresh(self) -> dict[str, Any]:
        fresh = object.__new__(type(self))
        ScalerSettings._start(fresh, None)
        return fresh.__dict__

    def _settings_in_words(self) -> str:
        """Return what must be the same on every rank; a collapse gathers from all, so its limit."""
        settings = (
            self._schedule,
            self._init_growth_tracker,
            self._init_memory,
            self._recheck,
            self._max_consecutive_skips,
        )
        if self._in_words[0] != settings:
            schedule, tracker, memory, recheck, limit = settings
            words = f"{schedule}, loaded tracker {tracker}, loaded memory {memory}"
            words = f"{words}, recheck={recheck}, max_consecutive_skips={limit}"
            self._in_words = (settings, words)
        return self._in_words[1]


def _names_by_id(named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[int, str]:
    try:
        return {id(parameter): name for name, parameter in named_parameters or ()}
    except (TypeError, ValueError):
        raise TypeError(
            "named_parameters must be pairs of name and parameter, as model.named_parameters() "
            f"gives them, not {type(named_parameters).__name__}"
        ) from None
