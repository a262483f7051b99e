"""Several losses, each with a loss scale of its own, whose gradients meet in one parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from distamp.errors import SettingError
from distamp.scaler.gradients import local_gradients, parameters_of, unscale
from distamp.scaler.schedule import ScaleState, Schedule
from distamp.scaler.state import read_state

__all__ = ["LossScales"]


class LossScales:
    """The scales of several losses, and the one scale that accumulated gradients have.

    Apex sets gradients aside before each backward pass and adds them up unscaled. Here those that
    are there already are brought to the scale of the loss that comes next, in place and in the pass
    that looks for inf and NaN; so what accumulates without syncing, or lies in a bucket of DDP, is
    right too. A loss is to blame for an overflow that was not there before its pass; in an
    iteration with an overflow the other losses cannot be judged, and their scales wait.

    Whose fault it was travels in the scaler's one message: each loss has a parameter of one element
    whose gradient is inf or 0, in an optimizer of its own.

    Args:
        count: How many losses.
        schedule: How each scale moves.
        init_scale: The first scale of each.
        device: Where the scales live.
        optimizers: Those that step the gradients.
    """

    def __init__(
        self,
        count: int,
        schedule: Schedule,
        init_scale: float,
        device: torch.device,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        self._schedule = schedule
        self._states = [_state(schedule, init_scale, device) for _ in range(count)]
        self._optimizers = list(optimizers)
        self._device = device
        self._scale = torch.ones((), device=device)
        # Values of their own tell them apart where ranks compare optimizers.
        weights = [torch.full((1,), float(i), device=device) for i in range(count)]
        self._told = [torch.nn.Parameter(weight) for weight in weights]
        self.tellers = [torch.optim.SGD([weight], lr=0.0) for weight in self._told]
        self._begin()

    def _begin(self) -> None:
        self._order: list[int] = []
        self._found: dict[int, Tensor] = {}

    def scale_of(self, loss_id: int) -> Tensor:
        """Return the scale of a loss: 0-d float32."""
        return self._states[loss_id].scale

    def enter(self, loss_id: int) -> None:
        """Bring what has accumulated to the scale of the loss whose backward pass comes next."""
        if self._order and self._order[-1] == loss_id:
            return
        self._rescale(self._states[loss_id].scale)
        self._order.append(loss_id)

    def close(self) -> None:
        """Bring what has accumulated to scale 1, and write down who overflowed."""
        self._rescale(torch.ones((), device=self._device))
        for loss_id, told in enumerate(self._told):
            found = self._found.get(loss_id)
            told.grad = torch.zeros_like(told)
            if found is not None:
                told.grad.masked_fill_(found > 0, torch.inf)

    def update(self, found_inf: Callable[[torch.optim.Optimizer], Tensor]) -> None:
        """Move each scale by its own flag, which all ranks agree on.

        Args:
            found_inf: The scaler's; returns the flag of one of ``tellers``.
        """
        flags = {i: found_inf(self.tellers[i]).to(self._device) for i in set(self._order)}
        anyone = torch.stack(list(flags.values())).max()
        for loss_id, flag in flags.items():
            waits = (anyone > 0) & (flag == 0)
            before = self._states[loss_id]
            after = self._schedule.next_state(before, flag)
            for name in ("scale", "growth_tracker", "hysteresis_tracker"):
                held, new = getattr(before, name), getattr(after, name)
                held.copy_(torch.where(waits, held, new))
        self._begin()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return for each loss torch's five keys, and the schedule's own under ``"distamp"``."""
        return [
            {
                "scale": state.scale.item(),
                "growth_factor": self._schedule.growth_factor,
                "backoff_factor": self._schedule.backoff_factor,
                "growth_interval": self._schedule.growth_interval,
                "_growth_tracker": int(state.growth_tracker.item()),
            }
            for state in self._states
        ]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Load what `state_dict` returned, or for each loss what a scaler of torch's returned.

        Raises:
            SettingError: There are more or fewer than there are losses, or a value is out of range.
        """
        if len(states) != len(self._states):
            raise SettingError(
                f"the state holds the scales of {len(states)} losses and num_losses is "
                f"{len(self._states)}; initialize with num_losses={len(states)}"
            )
        read = [read_state(state, self._schedule) for state in states]
        for held, (_, scale, tracker, *_) in zip(self._states, read, strict=True):
            held.scale.fill_(scale)
            held.growth_tracker.fill_(tracker)
        self._schedule = read[0][0]

    def _rescale(self, scale: Tensor) -> None:
        found = torch.zeros((), device=self._device)
        gradients = [
            gradient
            for optimizer in self._optimizers
            for gradient in local_gradients(parameters_of(optimizer), allow_fp16=True)
        ]
        ratio = (scale.double() / self._scale.double()).float()
        with torch.no_grad():
            for flag in unscale(gradients, ratio, found):
                found = torch.maximum(found, flag.to(self._device))
        self._scale = scale.clone()
        if self._order:
            earlier = sum(self._found.values(), torch.zeros((), device=self._device))
            mine = self._found.setdefault(self._order[-1], torch.zeros((), device=self._device))
            mine.copy_(torch.where(earlier > 0, mine, found))


def _state(schedule: Schedule, scale: float, device: torch.device) -> ScaleState:
    if schedule.initial_memory:
        raise SettingError(
            f"a schedule that watches the largest gradient ({schedule.kind}) serves one loss; with "
            "num_losses > 1 gradients of several losses are summed, so take DynamicSchedule"
        )
    return ScaleState.initial(scale, 0, schedule.initial_hysteresis, device)
