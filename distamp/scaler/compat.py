"""torch's inner names, which frameworks read or override on a GradScaler; all in one place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distamp.errors import StageError
from distamp.scaler.gradients import local_gradients, parameters_of, unscale
from distamp.scaler.schedule import ScaleState, Schedule
from distamp.scaler.stages import Records

__all__ = ["TorchInnerNames"]


class TorchInnerNames(torch.amp.GradScaler):
    """The private surface of torch.amp.GradScaler, answered from distamp's own state.

    ``_scale``, ``_growth_tracker``, ``_init_scale``, ``_init_growth_tracker``, ``_enabled``,
    ``_device`` and ``_per_optimizer_states`` are plain attributes of the scaler itself.
    """

    _schedule: Schedule
    _init_hysteresis: int
    _init_memory: tuple[int, ...]
    _hysteresis_tracker: Tensor | None
    _memory: Tensor | None
    _fp16_grads: str
    _per_optimizer_states: Records  # type: ignore[assignment]

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

    def _scale_on(self, device: torch.device) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale

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
        with torch.no_grad():
            gradients = local_gradients(
                parameters_of(optimizer), allow_fp16=allow_fp16, owner=optimizer
            )
            return {flag.device: flag for flag in unscale(gradients, inv_scale, found_inf)}

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise StageError(
                f"Attempted {funcname} but _scale is None.  This may indicate your script did not "
                "use scaler.scale(loss or outputs) earlier in the iteration."
            )
        return self._scale, self._growth_tracker

    def _scale_tensor(self) -> Tensor:
        return self._scale_on(torch.device(self._device)) if self._scale is None else self._scale
