"""Which steps were taken and which skipped, and the learning rate that follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from launch.config import Config
from launch.state import Progress

__all__ = ["Due", "StepCount", "due", "learning_rate"]


def learning_rate(config: Config, taken: int) -> float:
    """Return the learning rate after so many taken steps, as a part of the peak.

    Linear warmup, then a cosine down to ``final_lr``. Skipped steps do not count.
    """
    if taken < config.warmup:
        return (taken + 1) / config.warmup
    done = min(1.0, (taken - config.warmup) / max(1, config.steps - config.warmup))
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * done))


class StepCount:
    """Counts skipped steps, and gives the learning rate, which waits while steps are skipped.

    Whether a step was taken is known on the device. The host waits for it only where it is asked
    to, or where the learning rate must be a number on the host.

    Args:
        config: The run's settings.
        progress: Kept up to date, but for steps whose outcome nobody has waited for.
        device: Where the model is.
        scales: Whether there is a scaler, which may skip steps.
        fused: Whether the optimizer takes a learning rate that lies on the device.
    """

    def __init__(
        self,
        config: Config,
        progress: Progress,
        device: torch.device,
        *,
        scales: bool,
        fused: bool,
    ) -> None:
        self._config = config
        self._progress = progress
        self._scales = scales
        self._rates: Tensor | None = None
        # On the CPU there is nothing to wait for.
        if scales and fused and device.type != "cpu":
            rates = [self._rate(taken) for taken in range(config.steps + 1)]
            self._rates = torch.tensor(rates, dtype=torch.float32).to(device)
            self._taken = torch.tensor([progress.taken]).to(device)

    def learning_rate(self) -> float | Tensor:
        """Return the learning rate of the next step: a number, or 0-d float32 on the device."""
        if self._rates is None:
            return self._rate(self._progress.taken)
        return self._rates.index_select(0, self._taken).squeeze(0)

    def count(self, taken: Tensor, *, wait: bool) -> bool | None:
        """Count a step that ``progress.step`` counts already.

        Args:
            taken: 0-d bool, whether it was taken.
            wait: Whether the outcome must be known on the host, and ``progress`` up to date.

        Returns:
            Whether it was taken; None where that is not known on the host yet.
        """
        if not self._scales:
            return True
        if self._rates is None:
            stepped = bool(taken)
            self._progress.skipped += not stepped
            return stepped
        self._taken += taken
        if not wait:
            return None
        both = torch.cat([self._taken, taken.long().reshape(1)]).tolist()  # waits once
        self._progress.skipped = self._progress.step - both[0]
        return bool(both[1])

    def _rate(self, taken: int) -> float:
        return self._config.lr * learning_rate(self._config, taken)


@dataclass(frozen=True)
class Due:
    """What is to be done after a step.

    Attributes:
        record: Whether to write a record; so it is wherever anything else is due.
        validation: Whether to validate.
        checkpoint: Whether to write a checkpoint.
        last: Whether it was the run's last step.
    """

    record: bool
    validation: bool
    checkpoint: bool
    last: bool


def due(config: Config, step: int) -> Due:
    """Return what is to be done after a step."""
    last = step == config.steps
    validation = last or step % config.evaluate_every == 0
    checkpoint = last or step % config.checkpoint_every == 0
    record = validation or checkpoint or step % config.log_every == 0
    return Due(record, validation, checkpoint, last)
