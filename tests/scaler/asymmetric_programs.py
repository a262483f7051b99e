"""The alphabet of asymmetric programs: what one rank, one thread or one iteration does differently.

A program is a setting and a list of events; each event is one iteration of training with something
in it. Where `programs` spreads one model in every layout and gives all ranks the same calls, these
hold a few parameters whose values can be computed exactly, and their ranks do not do the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["ENDING", "EVENTS", "HOWS", "WORLD", "Event", "Program", "Seen", "Setting", "allowed"]

WORLD = 2
HOWS = ("step", "unscale", "clip", "clip parameters", "step_all")

# What is right about each is in `asymmetric_reference`; what each does, in `asymmetric_runner`.
EVENTS = (
    "plain",
    "inf",  # one rank's gradient overflows
    "log",  # one rank alone calls unscale_ before everybody steps
    "out of memory",  # one rank's local pass raises; all go on after update()
    "optimizer raises",  # after the message, on every rank
    "replace",  # a parameter makes way for another, whose address a third one gets
    "born",  # an optimizer that lives for this iteration
    "overlap",  # one over some parameters of another, on fresh gradients
    "probe",  # one rank makes an optimizer, or trains by itself with a disabled scaler
    "some",  # step_all of some optimizers
    "thread",  # another trainer of this process has an iteration in the middle of this one
    "regroup",  # the group is destroyed and made anew
    "restart",  # and one rank is replaced
    "between",  # update() between the steps of two optimizers
    "thrown away",  # gradients that are zeroed without a step
    # These end a program: every rank raises.
    "mistake",
    "late everywhere",  # gradients after unscale_
)
ENDING = ("mistake", "late everywhere")


@dataclass(frozen=True)
class Event:
    """One iteration.

    Args:
        what: One of `EVENTS`.
        rank: Which rank differs, where one does.
        optimizer: Which optimizer it is about; taken modulo how many there are.
        flavour: Picks one of several ways.
        how: How a step is made: one of `HOWS`.
    """

    what: str = "plain"
    rank: int = 0
    optimizer: int = 0
    flavour: int = 0
    how: str = "step"


@dataclass(frozen=True)
class Setting:
    """What stays the same in a program.

    Args:
        optimizers: How many there are from the beginning.
        structure: ``"replicas"``; ``"stages"``: each rank holds parameters of its own;
            ``"tied"``: and one beside them that all ranks hold.
        kind: ``"SGD"``, ``"SGD foreach"`` or ``"SGD fused"``.
        wrapper: What the scaler is asked about, and through which it is stepped: None for the
            optimizer itself, ``"Lightning"`` or ``"Accelerate"``.
        masters: float16 parameters with fp32 masters.
        growth_interval: Of the scaler.
        bounded: Whether the scaler has a ``max_scale`` of its own.
    """

    optimizers: int = 1
    structure: str = "replicas"
    kind: str = "SGD"
    wrapper: str | None = None
    masters: bool = False
    growth_interval: int = 2000
    bounded: bool = False


@dataclass(frozen=True)
class Program:
    setting: Setting = Setting()
    events: tuple[Event, ...] = ()


@dataclass
class Seen:
    """One iteration as one rank saw it.

    Args:
        values: For each optimizer, the value of each of its parameters; elements are alike.
        scale: The loss scale afterwards.
        tracker: Clean iterations since the scale moved.
        norms: Every norm that was returned.
        answers: For each optimizer that was stepped: whether it was, and how often it was and was
            not so far; a text if the question raised.
        error: The error of this iteration.
        wrong: What the event itself found wrong.
        restarted: Whether this rank has a new scaler, which counts anew.
    """

    values: list[list[float]] = field(default_factory=list)
    scale: float = 0.0
    tracker: int = 0
    norms: list[float] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    error: tuple[str, str] | None = None
    wrong: list[str] = field(default_factory=list)
    restarted: bool = False


def allowed(setting: Setting, event: Event) -> bool:
    """Whether the event means something under this setting."""
    if setting.masters and event.what in ("replace", "overlap"):
        return False  # a second master is refused, and so are masters behind slots
    return event.what not in ("between", "some") or setting.optimizers > 1
