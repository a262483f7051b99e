"""torch's private names, which frameworks read or override on a GradScaler; settings and state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Joinable

from distamp import host
from distamp.errors import StageError
from distamp.scaler import groups, settings
from distamp.scaler.agreement import Ranks
from distamp.scaler.checkpoint import Saved, read_schedule, read_state, written_schedule
from distamp.scaler.groups import GroupLike
from distamp.scaler.guard import BackwardWatch
from distamp.scaler.optimizer_state import OptimizerStates, Records
from distamp.scaler.schedule import DynamicSchedule, ScaleState, Schedule
from distamp.sources import GradientSource

__all__ = ["MAYBE_OPT_STEP", "UNSCALE_GRADS", "TorchNames", "overrides"]


def overrides(scaler: object, own: Callable[..., Any]) -> bool:
    """Return whether something stands in place of one of this package's methods.

    In a subclass, in the object itself, or patched into the class.
    """
    name = own.__name__
    return getattr(type(scaler), name) is not own or name in scaler.__dict__


def _from_torch(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``torch.amp.GradScaler`` pickled, as a pickle of `DistGradScaler` says it.

    Such a pickle names torch's class, which under ``distamp.install()`` is this one. A disabled
    scaler of torch's has no settings.

    Raises:
        SettingError: A setting is outside its range.
    """
    names = ("_growth_factor", "_backoff_factor", "_growth_interval")
    schedule = DynamicSchedule(**{name[1:]: state[name] for name in names if name in state})
    left_out = {*names, "_per_optimizer_states"}
    return {
        **{name: value for name, value in state.items() if name not in left_out},
        "_schedule": schedule,
        "_fp16_grads": "error",
        "_max_consecutive_skips": None,
        "_init_scale": schedule.checked_scale(state.get("_init_scale", 2.0**16)),
        "_init_growth_tracker": state.get("_init_growth_tracker", 0),
        "_init_hysteresis": schedule.initial_hysteresis,
        "group_was_default": True,
    }


class TorchNames(torch.amp.GradScaler, Joinable):
    """The private surface of torch.amp.GradScaler, answered from distamp's own state.

    Also what torch's class has besides the flow of a step: settings, checkpoints and pickles.

    ``_scale``, ``_growth_tracker``, ``_init_scale``, ``_init_growth_tracker``, ``_enabled`` and
    ``_device`` are plain attributes of the scaler itself; ``unscale_``, ``_unscale_grads_``,
    ``_check_inf_per_device``, ``_maybe_opt_step``, ``update`` and ``get_scale`` are called by
    `DistGradScaler` wherever torch's class calls them, so that an override of one is used.
    """

    _schedule: Schedule
    _init_hysteresis: int
    _hysteresis_tracker: Tensor | None
    _states: OptimizerStates
    _ranks: Ranks
    _watch: BackwardWatch
    _names: settings.Names
    _state: ScaleState | None
    _known_settings: tuple[Any, ...]
    _known_live: tuple[Any, ...]
    _moves: int
    _max_consecutive_skips: int | None

    def _start(self, process_group: GroupLike) -> None:
        raise NotImplementedError

    def _scale_tensor(self) -> Tensor:
        raise NotImplementedError

    def _begin_iteration(self, records: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        raise NotImplementedError

    @property  # type: ignore[override]
    def _per_optimizer_states(self) -> Records:
        return self._states.records

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, records: Mapping[int, Mapping[str, Any]]) -> None:
        # What ends an update() of torch's classes, and of those written after them.
        self._begin_iteration(records)

    @property
    def _growth_factor(self) -> float:
        return self._schedule.growth_factor

    @_growth_factor.setter
    def _growth_factor(self, value: float) -> None:
        self._schedule = self._schedule.replaced(growth_factor=value)

    @property
    def _backoff_factor(self) -> float:
        return self._schedule.backoff_factor

    @_backoff_factor.setter
    def _backoff_factor(self, value: float) -> None:
        self._schedule = self._schedule.replaced(backoff_factor=value)

    @property
    def _growth_interval(self) -> int:
        return self._schedule.growth_interval

    @_growth_interval.setter
    def _growth_interval(self, value: int) -> None:
        self._schedule = self._schedule.replaced(growth_interval=value)

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        found: dict[Any, Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return found

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # The first call may come from validation; the tensors must be fit for training afterwards.
        with torch.inference_mode(False):
            state = ScaleState.initial(
                self._init_scale,
                self._init_growth_tracker,
                self._init_hysteresis,
                dev,
            )
        self._scale, self._growth_tracker = state.scale, state.growth_tracker
        self._hysteresis_tracker = state.hysteresis_tracker

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        # The local pass under torch's name and signature: frameworks override or wrap it.
        source = GradientSource(optimizer)
        return {f.device: f for f in source.unscale(inv_scale, found_inf, allow_fp16)}

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if any(flag.item() for flag in optimizer_state["found_inf_per_device"].values()):
            return None
        return optimizer.step(*args, **kwargs)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise StageError(
                f"Attempted {funcname} but _scale is None.  This may indicate your script did not "
                "use scaler.scale(loss or outputs) earlier in the iteration."
            )
        return self._scale, self._growth_tracker

    # -- settings and state ----------------------------------------------------------------------

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
        """The group as given; assign to it after unpickling or after a group was made again."""
        return self._ranks.process_group

    @process_group.setter
    def process_group(self, process_group: GroupLike) -> None:
        groups.check_group(process_group)
        self._ranks = Ranks(process_group)
        self._states.forget_agreements()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five keys, whatever the schedule; empty when disabled.

        ``torch.amp.GradScaler`` and this class load each other's. What a schedule remembers beyond
        them is in `schedule_state_dict`.
        """
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, of this class in any version, of torch's, or Apex's.

        A disabled scaler loads nothing, as in torch.

        Raises:
            StageError: The dict is empty (torch raises RuntimeError).
            SettingError: A value is outside its range; nothing is changed then.
        """
        if self._enabled:
            self._load(read_state(state_dict, self._schedule))

    def schedule_state_dict(self) -> dict[str, Any]:
        """Return what the schedule is and remembers beyond torch's five keys; empty when disabled.

        Numbers, strings and lists of them, to be saved beside ``state_dict()``.
        """
        if not self._enabled:
            return {}
        left = self._hysteresis_tracker
        hysteresis = self._init_hysteresis if left is None else int(left.item())
        return written_schedule(self._schedule, hysteresis)

    def load_schedule_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `schedule_state_dict` returned; best before ``load_state_dict``.

        Sets the kind of schedule, its bounds and what it remembers, and leaves the scale, which
        is moved into the bounds.

        Raises:
            SettingError: A value is missing or outside its range; nothing is changed then.
        """
        if self._enabled:
            self._load(read_schedule(state_dict, self._schedule))

    def _load(self, saved: Saved) -> None:
        schedule = self._schedule = saved.schedule
        if saved.scale is not None and saved.tracker is not None:
            self._init_scale, self._init_growth_tracker = saved.scale, saved.tracker
            if self._scale is not None:
                self._scale.fill_(saved.scale)
            if self._growth_tracker is not None:
                self._growth_tracker.fill_(saved.tracker)
        if saved.hysteresis is not None:
            self._init_hysteresis = saved.hysteresis
            if self._hysteresis_tracker is not None:
                self._hysteresis_tracker.fill_(saved.hysteresis)
        self._init_scale = min(max(self._init_scale, schedule.min_scale), schedule.max_scale)
        if self._scale is not None:
            self._scale.clamp_(schedule.min_scale, schedule.max_scale)
            self._watch.scale_is(self._scale)
        self._rebase()
        self._ranks.iteration = 0

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._states.records:
            raise StageError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        # What a subclass added goes along, as with torch's class.
        left_out = {"_names", *self._fresh()}
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        if self._enabled:
            state["_init_scale"] = self.get_scale()
        state["_init_growth_tracker"] = self._get_growth_tracker()
        left = self._hysteresis_tracker
        state["_init_hysteresis"] = self._init_hysteresis if left is None else int(left.item())
        state["group_was_default"] = self._ranks.process_group is None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        Joinable.__init__(self)
        state = dict(state) if "_schedule" in state else _from_torch(state)
        was_default = state.pop("group_was_default")
        self.__dict__.update(state)
        self._names = settings.Names()
        self._start(None)
        if not was_default:
            self._ranks.lost_group = (
                "this scaler was pickled with a process group, which cannot be pickled; assign "
                "scaler.process_group (None is the default group) before you use the scaler"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # As a pickle, but in the same process: the group is the same one, and is no part of it.
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin._ranks = Ranks(self._ranks.process_group)
        twin._ranks.lost_group = self._ranks.lost_group
        return twin

    def _fresh(self) -> dict[str, Any]:
        fresh: TorchNames = object.__new__(type(self))
        fresh._start(None)
        return fresh.__dict__

    # -- what all ranks must have alike ----------------------------------------------------------

    def _live_state(self) -> tuple[Any, ...]:
        """Return scale and tracker, or what they follow from where reading would wait."""
        if self._scale is not None and host.is_host(self._scale.device):
            return self._read_live_state()
        return (*self._known_live, self._moves)

    def _read_live_state(self) -> tuple[Any, ...]:
        scale, tracker = self._scale_tensor(), self._growth_tracker
        assert tracker is not None
        live: tuple[Any, ...] = (scale.item(), tracker.item())
        if self._schedule.initial_hysteresis > 1 and self._hysteresis_tracker is not None:
            live = (*live, self._hysteresis_tracker.item())
        return live

    def _rebase(self) -> None:
        """Note that the scale is as it is on all ranks, from where they move it alike."""
        if self._scale is not None and not host.is_host(self._scale.device):
            self._known_live, self._moves = self._read_live_state(), 0

    def _settings_text(self) -> str:
        """Return what must be the same on every rank; a collapse gathers from all, so its limit."""
        known = self._known_settings
        if not known or known[0] is not self._schedule:
            words = str(self._schedule)
            words = f"{words}, max_consecutive_skips={self._max_consecutive_skips}"
            known = self._known_settings = (self._schedule, words)
        return str(known[1])


# As they are before anybody patches the class.
UNSCALE_GRADS = TorchNames._unscale_grads_
MAYBE_OPT_STEP = TorchNames._maybe_opt_step
