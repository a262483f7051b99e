"""Draw asymmetric programs at random, the same for the same seed."""

from __future__ import annotations

import random

from tests.scaler.asymmetric_programs import (
    ENDING,
    EVENTS,
    HOWS,
    WORLD,
    Event,
    Program,
    Setting,
    allowed,
)

__all__ = ["draw_programs"]


def _setting(draw: random.Random) -> Setting:
    return Setting(
        optimizers=draw.randint(1, 3),
        structure=draw.choice(["replicas", "stages", "tied"]),
        kind=draw.choice(["SGD", "SGD foreach", "SGD fused"]),
        wrapper=draw.choice([None] * 6 + ["Lightning", "Accelerate"]),
        masters=draw.random() < 0.4,
        growth_interval=draw.choice([1, 2, 2000]),
        bounded=draw.random() < 0.3,
    )


def _event(draw: random.Random, what: str) -> Event:
    return Event(
        what=what,
        rank=draw.randrange(WORLD),
        optimizer=draw.randrange(3),
        flavour=draw.randrange(24),
        how=draw.choice(HOWS),
    )


def _program(draw: random.Random) -> Program:
    setting = _setting(draw)
    going_on = [what for what in EVENTS if what not in ENDING and allowed(setting, Event(what))]
    events = [_event(draw, draw.choice(going_on)) for _ in range(draw.randint(1, 4))]
    if draw.random() < 0.4:
        events.append(_event(draw, draw.choice(ENDING)))
    return Program(setting, tuple(events))


def draw_programs(count: int, seed: int) -> list[Program]:
    """So many programs."""
    draw = random.Random(seed)
    return [_program(draw) for _ in range(count)]
