"""Several losses, each with a loss scale of its own, whose gradients meet in one parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from distamp.errors import SettingError
from distamp.gradients import local_gradients, merged, unscale
from distamp.scaler import DistGradScaler
from distamp.scaler.checkpoint import read_state
from distamp.scaler.schedule import ScaleState, Schedule
from distamp.sources import source_of

__all__ = ["LossScales"]


class LossScales:
    """The scales of several losses, and the one scale that accumulated gradients have.

    Apex sets gradients aside before each backward pass and adds them up unscaled. Here those that
    are there already are brought to the scale of the loss that comes next, in place and in the pass
    that looks for inf and NaN; so what accumulates without syncing, or lies in a bucket of DDP, is
    right too. The scaler's own scale is always that of the accumulated gradients.

    A loss is to blame for an overflow that was not there before its backward pass. In an iteration
    with an overflow the other losses cannot be judged, and their scales wait. Whose fault it was
    travels in the scaler's one message, as a flag for each loss.

    Args:
        count: How many losses.
        schedule: How each scale moves.
        init_scale: The first scale of each.
        scaler: Its schedule is static; the scales here are written into it.
        device: Where the scales live.
        optimizers: Those that step the gradients.
    """

    def __init__(
        self,
        count: int,
        schedule: Schedule,
        init_scale: float,
        scaler: DistGradScaler,
        device: torch.device,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        if schedule.initial_memory:
            raise SettingError(
                f"a schedule that watches the largest gradient ({schedule.kind}) serves one loss; "
                "with num_losses > 1 gradients of several are summed, so take DynamicSchedule"
            )
        self._schedule = schedule
        self._states = [
            ScaleState.initial(init_scale, 0, schedule.initial_hysteresis, device)
            for _ in range(count)
        ]
        self._scale = scaler._scale_on(device)
        self._optimizers = list(optimizers)
        self._scaler = scaler
        self._begin()

    def _begin(self) -> None:
        self._order: list[int] = []
        self._found = [torch.zeros_like(self._scale) for _ in self._states]

    def scale_of(self, loss_id: int) -> Tensor:
        """Return the scale of a loss: 0-d float32."""
        return self._states[loss_id].scale

    def enter(self, loss_id: int) -> None:
        """Bring what has accumulated to the scale of the loss whose backward pass comes next."""
        scale = self._states[loss_id].scale
        if self._order and self._order[-1] != loss_id:
            found = self._rescale(scale)
            earlier = torch.stack(self._found).max()
            self._found[self._order[-1]].copy_(torch.where(earlier > 0, 0.0, found))
        self._scale.copy_(scale)
        self._order.append(loss_id)

    def _rescale(self, scale: Tensor) -> Tensor:
        """Multiply gradients to another scale; return 0-d float32, 1.0 if inf or NaN was there."""
        gradients = [
            gradient
            for optimizer in self._optimizers
            for gradient in local_gradients(source_of(optimizer).filled())
        ]
        ratio = (scale.double() / self._scale.double()).float()
        found = torch.zeros_like(self._scale)
        with torch.no_grad():
            flags = unscale(gradients, ratio, found)
        return merged(flags, self._scale.device)

    def send(self) -> None:
        """Let the scaler's next message say whose loss overflowed."""
        self._scaler.send_flags([(found > 0).float() for found in self._found])

    def update(self, found_inf: Tensor) -> None:
        """Move each scale by its own flag, which all ranks agree on.

        Args:
            found_inf: 0-d float32, whether any gradient overflowed in the end.
        """
        agreed = self._scaler.agreed_flags()
        anyone = torch.stack([flag.to(found_inf.device) for flag in agreed]).max()
        for loss_id in set(self._order):
            # What nobody was blamed for came with the last backward pass.
            late = found_inf * (anyone == 0) if loss_id == self._order[-1] else 0.0
            flag = torch.clamp(agreed[loss_id].to(found_inf.device) + late, max=1.0)
            waits = (torch.maximum(anyone, found_inf) > 0) & (flag == 0)
            before = self._states[loss_id]
            after = self._schedule.next_state(before, flag.to(before.scale.device))
            for name in ("scale", "growth_tracker", "hysteresis_tracker"):
                current, new = getattr(before, name), getattr(after, name)
                current.copy_(torch.where(waits.to(current.device), current, new))
        self._begin()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return for each loss torch's five keys."""
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
        for state, saved in zip(self._states, read, strict=True):
            assert saved.scale is not None
            assert saved.tracker is not None
            state.scale.fill_(saved.scale)
            state.growth_tracker.fill_(saved.tracker)
        self._schedule = read[0].schedule
