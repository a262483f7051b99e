"""Which parameter overflowed, on which rank, and by how much."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distamp.gradients import local_gradients, local_of
from distamp.optimizers import describe, parameter_names, parameters_of
from distamp.sources import source_of

__all__ = [
    "Overflow",
    "OverflowReport",
    "Skip",
    "find_overflows",
    "gradients_by_name",
    "log_skip",
    "log_spike",
    "names_of",
]


@dataclass(frozen=True)
class Overflow:
    """One parameter whose gradient held inf or NaN on one rank.

    Args:
        name: The parameter's name, or the optimizer's group and index where names are not known.
        rank: The rank, numbered as in the default group.
        infs: Elements that are inf or -inf in this rank's part of the gradient.
        nans: Elements that are NaN.
        elements: All elements of this rank's part.
        largest_finite: The largest magnitude among the finite elements, as it lies in ``.grad``:
            unscaled, but still scaled where a fused optimizer had the step. 0.0 if none is finite.
    """

    name: str
    rank: int
    infs: int
    nans: int
    elements: int
    largest_finite: float


@dataclass(frozen=True)
class OverflowReport:
    """Every overflow of one skipped step, the same value on every rank.

    Args:
        scale: The loss scale of the gradients: after ``update()``, that of the skipped step.
        overflows: By rank and then in the order of the parameters.
    """

    scale: float
    overflows: tuple[Overflow, ...]

    def __str__(self) -> str:
        width = max((len(o.name) for o in self.overflows), default=9)
        head = f"{'parameter':<{width}}  rank        inf        nan   elements  largest finite"
        rows = [
            f"{o.name:<{width}}  {o.rank:>4}  {o.infs:>9}  {o.nans:>9}  {o.elements:>9}  "
            f"{o.largest_finite:>14.4g}"
            for o in self.overflows
        ]
        return "\n".join([f"overflow at loss scale {self.scale:g}", head, *rows])


def names_of(named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """Return the name of each tensor, which is held: torch swaps none that has a weak reference.

    Raises:
        TypeError: ``named`` is no pairs, as ``model.named_parameters()`` gives them.
    """
    try:
        return {parameter: name for name, parameter in named or ()}
    except (TypeError, ValueError):
        raise TypeError(
            "named_parameters must be pairs of name and parameter, as model.named_parameters() "
            f"gives them, not {type(named).__name__}"
        ) from None


@torch.no_grad()
def find_overflows(named: Iterable[tuple[str, Tensor]], rank: int) -> Iterator[Overflow]:
    """Yield this rank's overflows among the gradients of ``named`` tensors."""
    for name, tensor in named:
        for gradient in local_gradients([tensor]):
            finite = gradient.isfinite()
            if finite.all():
                continue
            kept = gradient[finite]
            yield Overflow(
                name=name,
                rank=rank,
                infs=int(gradient.isinf().sum()),
                nans=int(gradient.isnan().sum()),
                elements=gradient.numel(),
                largest_finite=float(kept.abs().max()) if kept.numel() else 0.0,
            )


def gradients_by_name(
    optimizers: Sequence[Any], names: Mapping[Tensor, str], model: torch.nn.Module | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that may hold a gradient, under the name of the model's parameter.

    Args:
        optimizers: Whose parameters count where there is no model.
        names: Go before those of an optimizer.
        model: Its parameters count, and its names.
    """
    stepped = {id(p): s for o in optimizers for p, s in source_of(o).stepped() if p is not s}
    behind = {id(s): p for o in optimizers for p, s in source_of(o).stepped()}
    named: list[tuple[str, Tensor]]
    if model is not None:
        named = list(model.named_parameters())
    else:
        pairs = ((n, p) for o in optimizers for n, p in _named_by(o))
        models = ((name, behind.get(id(p), p)) for name, p in pairs)
        named = [(names.get(p, name), p) for name, p in models]
    for name, parameter in named:
        yield name, parameter
        if id(parameter) in stepped:
            yield name, stepped[id(parameter)]


def _named_by(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    yield from zip(parameter_names(optimizer), parameters_of(optimizer), strict=True)


class Skip(NamedTuple):
    """A step that was skipped.

    Args:
        logger: Who says so.
        step: Its number.
        at: At which loss scale, as text; empty without one.
        ranks: Those that overflowed, where they are known.
        as_it_was: Whether the gradients still are as they were, to find the parameter.
    """

    logger: str
    step: int
    at: str
    ranks: Sequence[int] | None
    as_it_was: bool


def log_skip(optimizer: Any, skip: Skip, names: dict[Tensor, str]) -> None:
    """Say at INFO that a step of ``optimizer`` was skipped, and why.

    Args:
        optimizer: Which was not stepped.
        skip: What is known of it.
        names: Of parameters and buffers; a buffer that is named as not finite is taken out.
    """
    log, ranks = logging.getLogger(skip.logger), skip.ranks
    if not log.isEnabledFor(logging.INFO):
        return
    named = gradients_by_name([optimizer], names) if skip.as_it_was else ()
    first = next((f", first in {overflow.name}" for overflow in find_overflows(named, 0)), "")
    some = "s" if ranks and len(ranks) > 1 else ""
    where = f" on rank{some} {', '.join(map(str, ranks))}" if ranks else ""
    spoilt = ", ".join(_spoilt(names))
    log.info(
        "step %d of %s was skipped: inf or NaN in the gradients%s%s%s%s",
        skip.step,
        describe(optimizer),
        where,
        first,
        skip.at,
        f"; the forward pass left inf or NaN in {spoilt}, which a skip does not undo"
        * bool(spoilt),
    )


def log_spike(logger: str, optimizer: Any, step: int) -> None:
    """Say at INFO that a step was skipped for its norm."""
    text = "step %d of %s was skipped: spike, the norm of the gradients lies above skip_above"
    logging.getLogger(logger).info(text, step, describe(optimizer))


@torch.no_grad()
def _spoilt(names: dict[Tensor, str]) -> list[str]:
    """Return the names of buffers that are not finite, and take them out: each is told once."""
    buffers = [
        t for t in names if not t.requires_grad and t.grad is None and t.dtype.is_floating_point
    ]
    return [names.pop(each) for each in buffers if not local_of(each).isfinite().all()]
