"""Which parameter overflowed, on which rank, and by how much."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distamp.error_text import ranks_text
from distamp.fsdp_params import sharded_params
from distamp.gradients import local_gradients, local_of
from distamp.optimizers import describe, parameter_names, parameters_of
from distamp.sources import source_of

__all__ = [
    "NonFiniteReport",
    "Overflow",
    "Skip",
    "find_overflows",
    "first_bad_name",
    "gradients_by_name",
    "log_skip",
    "log_spike",
    "names_of",
]


#: The number of different names that a log line has at most.
_MOST_NAMES = 4


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
class NonFiniteReport:
    """Every overflow of one skipped step, the same value on every rank.

    Args:
        scale: The loss scale of the gradients: after ``update()``, that of the skipped step.
        overflows: By rank and then in the order of the parameters.
        is_scaled: Whether there is a loss scale; False for a `StepGuard`, whose ``scale`` is 1.
    """

    scale: float
    overflows: tuple[Overflow, ...]
    is_scaled: bool = True

    def __str__(self) -> str:
        width = max((len(o.name) for o in self.overflows), default=9)
        head = f"{'parameter':<{width}}  rank        inf        nan   elements  largest finite"
        rows = [
            f"{o.name:<{width}}  {o.rank:>4}  {o.infs:>9}  {o.nans:>9}  {o.elements:>9}  "
            f"{o.largest_finite:>14.4g}"
            for o in self.overflows
        ]
        title = "inf or NaN in the gradients"
        if self.is_scaled:
            title += f" at loss scale {self.scale:g}"
        return "\n".join([title, head, *rows])


def names_of(named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """Return the name of each tensor, which is held: torch swaps none that has a weak reference.

    Raises:
        TypeError: ``named`` is no pairs, as ``model.named_parameters()`` gives them.
    """
    try:
        pairs = [(name, tensor) for name, tensor in named or ()]
        tensors = sharded_params(tensor for _, tensor in pairs)
        return {tensor: name for tensor, (name, _) in zip(tensors, pairs, strict=True)}
    except (AttributeError, TypeError, ValueError):
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
        in_model = dict(model.named_parameters())
        named = list(zip(in_model, sharded_params(in_model.values()), strict=True))
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


def first_bad_name(optimizer: Any, names: Mapping[Tensor, str]) -> str:
    """Return the name of the first parameter whose gradient on this rank has inf or NaN.

    An error in the search is returned in the place of a name, because the other ranks wait for it.

    Args:
        optimizer: Holds the gradients.
        names: Names of parameters. Without them the text is empty.
    """
    if not names:
        return ""
    try:
        found = find_overflows(gradients_by_name([optimizer], names), 0)
        return next((overflow.name for overflow in found), "")
    except Exception as error:
        return f"a parameter that cannot be named ({type(error).__name__}: {error!s:.80})"


class Skip(NamedTuple):
    """A step that was skipped.

    Args:
        logger: Who says so.
        step: Its number.
        at: At which loss scale, as text; empty without one.
        ranks: Those that overflowed, where they are known.
        as_it_was: Whether the gradients still are as they were, to find the parameter.
        bad_names: For each of ``ranks`` the name of its first bad parameter; an empty text where it
            is not known. Empty where the ranks sent no names.
    """

    logger: str
    step: int
    at: str
    ranks: Sequence[int] | None
    as_it_was: bool
    bad_names: Sequence[str] = ()

    @property
    def first_bad(self) -> str:
        """The names that the ranks sent, as text; ranks with the same name once."""
        ranks_by_name: dict[str, list[int]] = {}
        for rank, name in zip(self.ranks or (), self.bad_names, strict=False):
            if name:
                ranks_by_name.setdefault(name, []).append(rank)
        if len(ranks_by_name) == 1:
            return f", first in {next(iter(ranks_by_name))}"
        parts = [
            f"{name} ({ranks_text(ranks)})"
            for name, ranks in itertools.islice(ranks_by_name.items(), _MOST_NAMES)
        ]
        more = len(ranks_by_name) - len(parts)
        parts += [f"{more} other{'' if more == 1 else 's'}"] * (more > 0)
        return f", first in {', '.join(parts)}" if parts else ""


def log_skip(optimizer: Any, skip: Skip, names: dict[Tensor, str]) -> None:
    """Log at INFO that a step of ``optimizer`` was skipped, and why.

    Args:
        optimizer: Which was not stepped.
        skip: What is known of it.
        names: Of parameters and buffers; a buffer that is named as not finite is taken out.
    """
    log, ranks = logging.getLogger(skip.logger), skip.ranks
    if not log.isEnabledFor(logging.INFO):
        return
    first = skip.first_bad
    if not first and skip.as_it_was:
        named = gradients_by_name([optimizer], names)
        first = next((f", first in {overflow.name}" for overflow in find_overflows(named, 0)), "")
    where = f" on {ranks_text(ranks)}" if ranks else ""
    sentences = [
        f"Skipped step {skip.step} of {describe(optimizer)}{skip.at}: inf or NaN in the gradients"
        f"{where}{first}."
    ]
    spoilt = ", ".join(_spoilt(names))
    if spoilt:
        sentences.append(
            f"The forward pass left inf or NaN in {spoilt}, which a skip does not undo."
        )
    if not names and not any(group.get("param_names") for group in optimizer.param_groups):
        sentences.append("Pass named_parameters= for names.")
    log.info("%s", " ".join(sentences))


def log_spike(logger: str, optimizer: Any, step: int, norm: float, limit: float) -> None:
    """Log at INFO that a step was skipped because its norm lay above the limit."""
    text = "Skipped step %d of %s: gradient norm %g exceeds skip_norm_above=%g."
    logging.getLogger(logger).info(text, step, describe(optimizer), norm, limit)


@torch.no_grad()
def _spoilt(names: dict[Tensor, str]) -> list[str]:
    """Return the names of buffers that are not finite, and take them out: each is told once."""
    buffers = [
        t for t in names if not t.requires_grad and t.grad is None and t.dtype.is_floating_point
    ]
    return [names.pop(each) for each in buffers if not local_of(each).isfinite().all()]
