"""What an asymmetric program should do, found without a scaler, in Python floats."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tests.scaler.asymmetric_programs import WORLD, Event, Setting
from tests.scaler.reference import ScaleRule

__all__ = ["INIT_SCALE", "Expected", "gradient_of", "initial_values", "size_of"]

INIT_SCALE = 2.0**10
TIED = 3
TIED_VALUE = 0.5


def size_of(setting: Setting, optimizer: int, rank: int) -> int:
    """Elements of an optimizer's own parameter on a rank."""
    return optimizer + 2 + (0 if setting.structure == "replicas" else rank)


def initial_values(setting: Setting, optimizer: int) -> list[float]:
    """The value of each parameter of an optimizer; the tied one comes last here."""
    tied = setting.structure == "tied" and optimizer == 0
    return [1.0 + optimizer] + [TIED_VALUE] * tied


def gradient_of(number: int, optimizer: int) -> float:
    """A power of two, so that a float16 holds every value that comes of it."""
    return 2.0 ** -(3 + (number + optimizer) % 3)


@dataclass
class Expected:
    """Values, scale and counts as they should be on every rank.

    Args:
        setting: Of the program.
        values: For each optimizer, of each parameter.
        rule: torch's rule for the scale.
        counts: For each optimizer, steps taken and skipped.
        norms: Of the iteration.
        stepped: For each optimizer whether this iteration's step was taken; None without one.
    """

    setting: Setting
    values: list[list[float]] = field(default_factory=list)
    rule: ScaleRule = field(default_factory=lambda: ScaleRule(INIT_SCALE))
    counts: list[list[int]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    stepped: list[bool | None] = field(default_factory=list)

    @classmethod
    def of(cls, setting: Setting) -> Expected:
        bounds = (2.0**-24, 2.0**24 if setting.bounded else 2.0**127)
        made = cls(
            setting,
            rule=ScaleRule(INIT_SCALE, growth_interval=setting.growth_interval, bounds=bounds),
        )
        for optimizer in range(setting.optimizers):
            made.add(initial_values(setting, optimizer))
        return made

    def add(self, values: list[float]) -> None:
        """One more optimizer from now on."""
        self.values.append(list(values))
        self.counts.append([0, 0])

    def advance(self, number: int, event: Event) -> None:
        """One iteration that ends without an error."""
        count = len(self.values)
        chosen = event.optimizer % count
        self.norms = []
        self.stepped = [None] * count
        if event.what in ("out of memory", "optimizer raises"):
            return
        overflow = event.what == "inf"
        moving = list(range(count))
        if event.what == "some":
            moving = moving[: 1 + event.optimizer % (count - 1)]
        if event.what == "between":
            self._step(0, number, overflow=event.flavour % 2 == 0)
            self.rule.update(event.flavour % 2 == 0)
            moving = moving[1:]
        for optimizer in moving:
            here = overflow and optimizer == chosen
            if event.how.startswith("clip") and event.what in ("plain", "between", "inf"):
                self.norms.append(math.nan if here else self._norm(optimizer, number))
            self._step(optimizer, number, overflow=here)
        self.rule.update(overflow)
        if event.what == "overlap":
            self.values[chosen][0] -= gradient_of(number, chosen)

    def born(self, number: int, event: Event) -> None:
        """What is there afterwards, for the next iteration."""
        if event.what == "replace":
            self.add([1.0])

    def _step(self, optimizer: int, number: int, *, overflow: bool) -> None:
        self.stepped[optimizer] = not overflow
        self.counts[optimizer][overflow] += 1
        if overflow:
            return
        gradient = gradient_of(number, optimizer)
        self.values[optimizer] = [value - gradient for value in self.values[optimizer]]

    def _norm(self, optimizer: int, number: int) -> float:
        elements = TIED * (len(self.values[optimizer]) - 1)
        if optimizer >= self.setting.optimizers:
            elements += 1  # it came later, alike on every rank
        elif self.setting.structure == "replicas":
            elements += size_of(self.setting, optimizer, 0)
        else:
            elements += sum(size_of(self.setting, optimizer, r) for r in range(WORLD))
        return math.sqrt(elements) * gradient_of(number, optimizer)
