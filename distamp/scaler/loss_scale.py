"""Loss scales as values: the rules that update a scale, the same on CPU and GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from distamp.errors import ConfigError

__all__ = ["DynamicLossScale", "HysteresisLossScale", "LossScale", "ScaleState", "StaticLossScale"]

MIN_SCALE = 2.0**-24
MAX_SCALE = 2.0**127


class ScaleState(NamedTuple):
    """State of a loss scale that goes from one iteration to the next.

    Args:
        scale: 0-d float32, the loss scale.
        growth_tracker: 0-d int32, clean iterations since the last growth or overflow.
        hysteresis_tracker: 0-d int32, overflows still forgiven before the scale backs off.
    """

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_tracker: Tensor

    @classmethod
    def initial(
        cls, scale: float, growth_tracker: int, hysteresis: int, device: torch.device
    ) -> Self:
        """Build the tensors on ``device``."""
        return cls(
            torch.full((), scale, dtype=torch.float32, device=device),
            torch.full((), growth_tracker, dtype=torch.int32, device=device),
            torch.full((), hysteresis, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class LossScale:
    """Settings that every loss scale has, and the rule that moves it.

    Args:
        growth_factor: Multiplies the scale after ``growth_interval`` clean iterations; > 1.
        backoff_factor: Multiplies the scale after an overflow; between 0 and 1, exclusive.
        growth_interval: Clean iterations in a row before the scale grows; >= 1.
        min_scale: The scale never falls below this; > 0.
        max_scale: The scale never rises above this; finite.

    Raises:
        ConfigError: A setting is outside its range.
    """

    kind: ClassVar[str] = ""

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE

    def __post_init__(self) -> None:
        for name in ("growth_factor", "backoff_factor", "min_scale", "max_scale"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        interval: object = self.growth_interval
        if isinstance(interval, bool) or not isinstance(interval, Integral):
            raise ConfigError(f"growth_interval must be an integer >= 1, not {interval!r}")
        if not 1 <= int(interval) < 2**63:
            raise ConfigError(
                f"growth_interval must be an integer >= 1 and < 2**63, not {interval}"
            )
        object.__setattr__(self, "growth_interval", int(interval))
        if not self.growth_factor > 1.0:
            raise ConfigError(f"The growth factor must be > 1.0, not {self.growth_factor}")
        if not 0.0 < self.backoff_factor < 1.0:
            raise ConfigError(
                f"The backoff factor must be < 1.0 and > 0.0, not {self.backoff_factor}"
            )
        if not 0.0 < self.min_scale <= self.max_scale <= torch.finfo(torch.float32).max:
            raise ConfigError(
                "min_scale and max_scale must satisfy 0 < min_scale <= max_scale <= 3.4e38, "
                f"not {self.min_scale} and {self.max_scale}"
            )

    @property
    def initial_hysteresis(self) -> int:
        """Overflows that are forgiven before the first back-off, plus one."""
        return 1

    def next_state(self, state: ScaleState, found_inf: Tensor) -> ScaleState:
        """Return the state of the next iteration.

        Args:
            state: The state that this iteration's gradients were scaled with; left as it is.
            found_inf: 0-d float32, 0.0 for a clean iteration and 1.0 for an overflow.
        """
        raise NotImplementedError

    def update_(self, state: ScaleState, found_inf: Tensor) -> ScaleState:
        """Write the state of the next iteration into ``state``'s own tensors, and return it.

        Captured graphs and optimizers may hold these very tensors.
        """
        next_state = self.next_state(state, found_inf)
        for tensor, next_tensor in zip(state, next_state, strict=True):
            if next_tensor is not tensor:
                tensor.copy_(next_tensor)
        return state

    def checked_scale(self, scale: object, name: str = "init_scale") -> float:
        """Return ``scale`` as a float if it is a number within the bounds, else raise."""
        value = _number(name, scale)
        if not self.min_scale <= value <= self.max_scale:
            raise ConfigError(
                f"{name} must be between min_scale={self.min_scale} and "
                f"max_scale={self.max_scale}, not {value}"
            )
        return value

    def replace(self, **settings: Any) -> Self:
        """Return a copy with some settings changed, validated as a whole."""
        return replace(self, **settings)

    def non_torch_settings(self) -> dict[str, Any]:
        """Return the settings that torch's five ``state_dict`` keys cannot hold."""
        torch_names = ("growth_factor", "backoff_factor", "growth_interval")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in torch_names}
        return {"kind": self.kind, **values}


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """torch.amp.GradScaler's rule, kept within ``[min_scale, max_scale]``.

    An overflow multiplies the scale by ``backoff_factor``; exactly the ``growth_interval``-th clean
    iteration in a row multiplies it by ``growth_factor`` (Micikevicius et al., 2018, section 3.2).
    """

    kind: ClassVar[str] = "dynamic"

    def next_state(self, state: ScaleState, found_inf: Tensor) -> ScaleState:
        """See `LossScale.next_state`; torch's own kernel computes it."""
        scale, tracker = state.scale.clone(), state.growth_tracker.clone()
        moved = ScaleState(scale, tracker, state.hysteresis_tracker)
        return self.update_(moved, found_inf)

    def update_(self, state: ScaleState, found_inf: Tensor) -> ScaleState:
        """See `LossScale.update_`; torch's own kernel works in place."""
        torch._amp_update_scale_(
            state.scale,
            state.growth_tracker,
            found_inf,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        # Where reading the scale costs no wait, reading it is quicker than to clamp it.
        scale = state.scale
        if not scale.is_cpu or not self.min_scale <= scale.item() <= self.max_scale:
            scale.clamp_(self.min_scale, self.max_scale)
        return state


@dataclass(frozen=True)
class HysteresisLossScale(LossScale):
    """A dynamic loss scale that forgives overflows before it backs off.

    Args:
        hysteresis: The scale backs off on this overflow and every later one, until the credit is
            given back. 1 is torch's rule.
        consecutive: When the credit is given back: after any clean iteration (DeepSpeed's
            ``consecutive_hysteresis``), or, if False, when the scale grows (Megatron-LM's rule and
            DeepSpeed's default).
    """

    kind: ClassVar[str] = "hysteresis"

    hysteresis: int = 2
    consecutive: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        value = self.hysteresis
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise ConfigError(f"hysteresis must be an integer >= 1 and < 2**31, not {value!r}")
        if not isinstance(self.consecutive, bool):
            raise ConfigError(f"consecutive must be True or False, not {self.consecutive!r:.80}")

    @property
    def initial_hysteresis(self) -> int:
        """The full credit."""
        return self.hysteresis

    def next_state(self, state: ScaleState, found_inf: Tensor) -> ScaleState:
        """See `LossScale.next_state`."""
        is_overflow = found_inf > 0
        scale, tracker = state.scale.clone(), state.growth_tracker.clone()
        torch._amp_update_scale_(
            scale,
            tracker,
            found_inf,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        credit = (state.hysteresis_tracker - is_overflow.to(torch.int32)).clamp_(min=0)
        scale = torch.where(is_overflow & (credit > 0), state.scale, scale)
        is_restored = ~is_overflow
        if not self.consecutive:
            is_restored = is_restored & (tracker == 0)
        credit = credit.masked_fill(is_restored, self.hysteresis)
        return ScaleState(scale.clamp_(self.min_scale, self.max_scale), tracker, credit)


@dataclass(frozen=True)
class StaticLossScale(LossScale):
    """The scale never moves; overflowing steps are still skipped (Apex's ``loss_scale=128.0``)."""

    kind: ClassVar[str] = "static"

    def next_state(self, state: ScaleState, found_inf: Tensor) -> ScaleState:
        """See `LossScale.next_state`."""
        return state


LOSS_SCALES: dict[str, type[LossScale]] = {
    loss_scale.kind: loss_scale
    for loss_scale in (DynamicLossScale, HysteresisLossScale, StaticLossScale)
}


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, not {value!r}")
    return float(value)
