"""torch's private names, which frameworks read or override on a GradScaler; all in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distamp.errors import StageError
from distamp.scaler.optimizer_state import OptimizerStates, Records
from distamp.scaler.schedule import ScaleState, Schedule
from distamp.sources import GradientSource

__all__ = ["TorchNames", "overrides"]


def overrides(scaler: object, name: str, base: type) -> bool:
    """Return whether a subclass, or the object itself, has another method of this name."""
    kind = type(scaler)
    if kind is base:
        return name in scaler.__dict__
    return getattr(kind, name) is not getattr(base, name) or name in scaler.__dict__


class TorchNames(torch.amp.GradScaler):
    """The private surface of torch.amp.GradScaler, answered from distamp's own state.

    ``_scale``, ``_growth_tracker``, ``_init_scale``, ``_init_growth_tracker``, ``_enabled`` and
    ``_device`` are plain attributes of the scaler itself; ``unscale_``, ``_unscale_grads_``,
    ``_check_inf_per_device``, ``_maybe_opt_step``, ``update`` and ``get_scale`` are called by
    `DistGradScaler` wherever torch's class calls them, so that an override of one is used.
    """

    _schedule: Schedule
    _init_hysteresis: int
    _init_memory: tuple[int, ...]
    _hysteresis_tracker: Tensor | None
    _memory: Tensor | None
    _states: OptimizerStates

    def _begin_iteration(self, records: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        raise NotImplementedError

    @property
    def _per_optimizer_states(self) -> Records:  # type: ignore[override]
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
                self._init_memory,
            )
        self._scale, self._growth_tracker = state.scale, state.growth_tracker
        self._hysteresis_tracker, self._memory = state.hysteresis_tracker, state.memory

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
