"""A loss scale that is set before an overflow happens, from how large gradients have been."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from distamp.errors import SettingError
from distamp.scaler.schedule import ScaleState, Schedule

__all__ = ["HeadroomSchedule"]

# Logarithms to base 2 are kept as the bits of a float32, read as an integer: the logarithm in units
# of 2**-23, linear between powers of two. All of the rule is integer arithmetic on them, so ranks
# with different devices come to the same scale, bit for bit.
_ONE = 1 << 23
_LONGEST_RUN = 2**31


@dataclass(frozen=True)
class HeadroomSchedule(Schedule):
    """A schedule that follows the magnitude of gradients, and seldom overflows to learn more.

    ``torch.amp.GradScaler`` doubles the scale until it overflows, once per ``growth_interval``.
    This schedule keeps the scale below the overflows that it saw, by a margin that it learns:

    - The scale moves against the level of the unscaled gradients, by half of its change, without
      overflow or waiting. The level is a running mean of the logarithm of the largest magnitude of
      all ranks. By half, because the largest may be of a gradient that was never float16.
    - Until the first overflow the scale also grows by ``growth_factor`` per ``growth_interval``.
    - An overflow multiplies the scale by ``backoff_factor``. A quarter of this (of its logarithm)
      is added to the margin; half, if fewer than two growth intervals have passed since the
      previous overflow. The rest is a debt, which clean iterations pay back at ``growth_factor``
      per ``growth_interval``. After the first of several overflows in a row, all is debt.
    - Probing is slow at first and then faster: the scale regains the margin of one overflow in
      ``patience * growth_interval`` clean iterations. If gradients do not change, this is about
      how often it overflows.

    It does not matter where an overflow begins, in the gradients of activations or of parameters.

    Args:
        patience: About how many growth intervals between two overflows; torch's rule: one.
        level_memory: Iterations over which the level is averaged.

    Raises:
        SettingError: A setting is outside its range.
    """

    kind: ClassVar[str] = "headroom"
    watches_largest: ClassVar[bool] = True

    patience: int = 14
    level_memory: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("patience", "level_memory"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise SettingError(f"{name} must be an integer >= 1 and < 2**31, not {value!r}")

    @property
    def initial_memory(self) -> tuple[int, ...]:
        """Level, iterations it knows, debt, clean iterations in a row, whether one overflowed."""
        return (0, 0, 0, 0, 0)

    def next_state(
        self, state: ScaleState, found_inf: Tensor, largest: Tensor | None = None
    ) -> ScaleState:
        """See `Schedule.next_state`; without ``largest`` the level stays where it is."""
        assert state.memory is not None
        _, _, debt, run, learned = state.memory.unbind()
        found = found_inf > 0
        scale = _log(state.scale)
        level, known, rise = self._level(state, found, largest)

        paid = (debt - self._growth).clamp_(min=0)
        probe = (2 * self._charge * run).div_(self._probe_interval**2, rounding_mode="floor")
        climb = torch.where(learned > 0, probe.clamp_(max=self._growth), self._growth)
        after_clean = scale - rise + (debt - paid) + climb.masked_fill(debt > 0, 0)
        moved = torch.where(found, scale - self._backoff, after_clean)
        moved.clamp_(_log_of(self.min_scale), _log_of(self.max_scale))

        soon = (learned > 0) & (run < 2 * self.growth_interval)
        charged = (self._charge * (1 + soon.to(torch.int64))).masked_fill(run == 0, 0)
        # A scale that min_scale stopped adds no debt.
        after_overflow = debt + (scale - moved - charged).clamp_(min=0)
        after_run = (run + 1).clamp_(max=_LONGEST_RUN).masked_fill(found, 0)
        memory = (
            level,
            known,
            torch.where(found, after_overflow, paid),
            after_run,
            learned | found,
        )
        tracker = (state.growth_tracker + 1).remainder(self.growth_interval).masked_fill(found, 0)
        return ScaleState(_exp(moved), tracker, state.hysteresis_tracker, torch.stack(memory))

    def _level(
        self, state: ScaleState, found: Tensor, largest: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the level, how many iterations it knows, and what its rise takes off the scale."""
        assert state.memory is not None
        level, known = state.memory[:2].unbind()
        if largest is None:
            return level, known, torch.zeros_like(level)
        seen = ~found & (largest > 0) & largest.isfinite()
        size = _log(largest) - _log(state.scale)
        count = known + seen
        step = (size - level).div(count.clamp(1, self.level_memory), rounding_mode="floor")
        step = step.masked_fill(~seen, 0)
        rise = step.div(2, rounding_mode="floor").masked_fill(known == 0, 0)
        return level + step, count, rise

    @property
    def _growth(self) -> int:
        return max(1, round(math.log2(self.growth_factor) * _ONE / self.growth_interval))

    @property
    def _backoff(self) -> int:
        return round(-math.log2(self.backoff_factor) * _ONE)

    @property
    def _charge(self) -> int:
        return self._backoff // 4

    @property
    def _probe_interval(self) -> int:
        return self.patience * self.growth_interval


def _log(value: Tensor) -> Tensor:
    return value.view(torch.int32).to(torch.int64)


def _log_of(value: float) -> int:
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)


def _exp(log: Tensor) -> Tensor:
    return log.to(torch.int32).view(torch.float32)
