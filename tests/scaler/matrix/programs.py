"""Training programs with faults, and the outcome of each iteration on one rank."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """A gradient that is not finite on one rank.

    Args:
        rank: The rank that has the fault.
        value: The kind of fault. ``"inf"``, ``"-inf"`` and ``"nan"`` are written into the rank's
            gradients after the backward pass, so that no reduction spreads them. ``"loss"`` makes
            the rank's loss inf before the backward pass. ``"sum"`` enlarges the losses so that the
            gradients of every rank are finite, and their sum in float16 is not.
        optimizer: The number of the optimizer that steps the bad gradient.
        position: A number that selects the gradient and the element.
    """

    rank: int
    value: str
    optimizer: int = 0
    position: int = 0

    @property
    def is_written_into_gradients(self) -> bool:
        return self.value not in ("loss", "sum")


@dataclass(frozen=True)
class Iteration:
    """One optimizer step, as every rank makes it.

    Args:
        order: The calls of the step. ``"step"`` is step alone; ``"unscale"`` is unscale_, then
            step; ``"clip"`` is unscale_, a clip, then step; ``"grouped"`` unscales and steps all
            optimizers with one message, if the scaler has such a call.
        micro: The number of backward passes before the step.
        faults: The faults of the iteration.
        reverse: Whether the optimizers step in reverse order.
        change: A change of the scaler's state: ``"reload"`` loads its own state_dict,
            ``"repickle"`` unpickles a pickle of it, ``"new scale"`` passes a scale to update, and
            ``"interval"`` sets the growth interval. An empty text is no change.
    """

    order: str = "step"
    micro: int = 1
    faults: tuple[Fault, ...] = ()
    reverse: bool = False
    change: str = ""


@dataclass(frozen=True)
class Program:
    """Iterations in one layout with one kind of optimizer.

    Args:
        layout: A key of `ALL_LAYOUTS`.
        kind: A key of `KINDS`.
        iterations: The iterations that every rank makes.
        optimizers: 1 for all parameters, or 2 for the layout's two parts.
        init_scale: As of the scaler.
        growth_interval: As of the scaler.
        astray: The deviation of one rank in the last iteration, and the number of that rank.
            ``"swap"`` reverses the order of the optimizers, ``"scale"`` loads another scale, and
            ``"call"`` calls unscale_ when the other ranks step.
    """

    layout: str
    kind: str
    iterations: tuple[Iteration, ...]
    optimizers: int = 1
    init_scale: float = 2.0**16
    growth_interval: int = 2
    astray: tuple[str, int] | None = None

    @property
    def deviation(self) -> str | None:
        """The deviation of one rank: ``"swap"``, ``"scale"``, ``"call"`` or None."""
        return None if self.astray is None else self.astray[0]

    @property
    def deviating_rank(self) -> int | None:
        return None if self.astray is None else self.astray[1]

    @property
    def deviation_must_raise(self) -> bool:
        """Whether the deviation makes the ranks differ.

        ``"call"`` does not, because unscale_ sends the same message as step.
        """
        return self.deviation in ("swap", "scale")


@dataclass
class Outcome:
    """One iteration, as one rank saw it.

    Attributes:
        domain: The number of the rank's domain. Ranks of one domain train one model.
        scale: The loss scale after the iteration.
        expected_scale: The loss scale of the reference.
        expected_skips: For each optimizer, whether the gradients of any rank demand a skip.
        moved: For each optimizer, whether this rank's parameters changed. None if the rank has no
            gradient that could change them.
        said_stepped: For each optimizer the answer of step_was_taken, if the scaler has it.
        norms: Each measured norm, with the norm of the reference.
        digests: A checksum of each full parameter, by name.
        deviation: The distance between the parameters and the reference.
        error: The name and text of the error that the step raised.
        unchanged_by_error: Whether the parameters are the same after the error.
    """

    domain: int
    scale: float = 0.0
    expected_scale: float = 0.0
    expected_skips: list[bool] = field(default_factory=list)
    moved: list[bool | None] = field(default_factory=list)
    said_stepped: list[bool] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    digests: dict[str, int] = field(default_factory=dict)
    deviation: float = 0.0
    error: tuple[str, str] | None = None
    unchanged_by_error: bool = True
