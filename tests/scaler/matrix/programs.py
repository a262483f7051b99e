"""Programs of training steps with faults, and what one rank saw of them."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """A value that appears on one rank.

    Args:
        rank: where.
        value: ``"inf"``, ``"-inf"`` or ``"nan"`` in that rank's own gradients after the backward
            pass, where no reduction spreads it; ``"loss"``, a loss of inf before the pass; or
            ``"sum"``: every rank's gradients are finite, and their sum in float16 is not.
        optimizer: whose gradients.
        where: picks the gradient and the element.
    """

    rank: int
    value: str
    optimizer: int = 0
    where: int = 0


@dataclass(frozen=True)
class Iteration:
    """One optimizer step, as every rank makes it.

    Args:
        order: ``"step"``; ``"unscale"``: unscale_, step; ``"clip"``: unscale_, clip, step;
            ``"grouped"``: unscale_ and step of all optimizers with one message each, where the
            scaler has that.
        micro: backward passes before the step.
        faults: what goes wrong.
        reverse: the optimizers in reverse order.
        then: ``""``, or what follows: ``"reload"`` (state_dict, load_state_dict), ``"repickle"``,
            ``"new scale"`` (update(new_scale)), ``"interval"`` (set_growth_interval).
    """

    order: str = "step"
    micro: int = 1
    faults: tuple[Fault, ...] = ()
    reverse: bool = False
    then: str = ""


@dataclass(frozen=True)
class Program:
    """Iterations on one layout with one kind of optimizer.

    Args:
        layout: one of `ALL_LAYOUTS`.
        kind: one of `KINDS`.
        iterations: what every rank does.
        optimizers: 1 for all parameters, or 2 for the layout's two parts.
        init_scale: of the scaler.
        growth_interval: of the scaler.
        astray: what one rank does differently in the last iteration, and which rank: ``"swap"``
            (the optimizers in the other order), ``"scale"`` (another scale, loaded), ``"call"``
            (unscale_ where the others step).
    """

    layout: str
    kind: str
    iterations: tuple[Iteration, ...]
    optimizers: int = 1
    init_scale: float = 2.0**16
    growth_interval: int = 2
    astray: tuple[str, int] | None = None


@dataclass
class Outcome:
    """One iteration, as one rank saw it."""

    domain: int
    scale: float = 0.0
    expected_scale: float = 0.0
    # For each optimizer: what the gradients of all ranks demand; whether this rank's parameters
    # moved (None where it has no gradient to move them); what the scaler says, if it can.
    expected_skips: list[bool] = field(default_factory=list)
    moved: list[bool | None] = field(default_factory=list)
    said_stepped: list[bool] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    digests: dict[str, int] = field(default_factory=dict)
    deviation: float = 0.0
    error: tuple[str, str] | None = None
    unchanged_by_error: bool = True
