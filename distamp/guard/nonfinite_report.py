"""Reports and log lines about gradients with inf or NaN: which parameter, on which rank."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distamp.error_text import count_text, ranks_text
from distamp.fsdp_params import sharded_params
from distamp.grads import local_grads, to_local
from distamp.optim_utils import describe_optimizer, param_names, params_of, view_of

__all__ = [
    "GradOverflow",
    "NonFiniteReport",
    "SkipRecord",
    "find_overflows",
    "first_bad_name",
    "log_norm_skip",
    "log_skip",
    "named_grad_tensors",
    "tensor_names",
]

#: The number of different parameter names that a log line has at most.
_MAX_NAMES = 4


@dataclass(frozen=True)
class GradOverflow:
    """A parameter with inf or NaN in its gradient on one rank.

    Args:
        name: The parameter's name, or the optimizer's group and index if names are not known.
        rank: The rank in the default group.
        infs: Elements that are inf or -inf in this rank's part of the gradient.
        nans: Elements that are NaN.
        elements: All elements of this rank's part.
        largest_finite: The largest magnitude among the finite elements of ``.grad``: unscaled, but
            still scaled if a fused optimizer had the step. 0.0 if no element is finite.
    """

    name: str
    rank: int
    infs: int
    nans: int
    elements: int
    largest_finite: float


@dataclass(frozen=True)
class NonFiniteReport:
    """Every gradient with inf or NaN of one skipped step, the same value on every rank.

    Args:
        scale: The loss scale of the gradients: after ``update()``, that of the skipped step.
        overflows: The gradients, by rank and then in the order of the parameters.
        is_scaled: Whether there is a loss scale; False for a `StepGuard`, where ``scale`` is 1.
    """

    scale: float
    overflows: tuple[GradOverflow, ...]
    is_scaled: bool = True

    def __str__(self) -> str:
        width = len("parameter")
        for overflow in self.overflows:
            width = max(width, len(overflow.name))
        title = "inf or NaN in the gradients"
        if self.is_scaled:
            title += f" at loss scale {self.scale:g}"
        lines = [
            title,
            f"{'parameter':<{width}}  rank        inf        nan   elements  largest finite",
        ]
        for overflow in self.overflows:
            lines.append(
                f"{overflow.name:<{width}}  {overflow.rank:>4}  {overflow.infs:>9}  "
                f"{overflow.nans:>9}  {overflow.elements:>9}  {overflow.largest_finite:>14.4g}"
            )
        return "\n".join(lines)


# -- names -----------------------------------------------------------------------------------------


def tensor_names(named_tensors: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """Return the name of each tensor, as ``model.named_parameters()`` gives them.

    The tensors are held, because torch refuses to swap a tensor that has a weak reference.

    Raises:
        TypeError: ``named_tensors`` has no pairs of a name and a tensor.
    """
    names: list[str] = []
    tensors: list[Tensor] = []
    try:
        for name, tensor in named_tensors or ():
            names.append(name)
            tensors.append(tensor)
        return dict(zip(sharded_params(tensors), names, strict=True))
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            "named_parameters must be pairs of name and parameter, as model.named_parameters() "
            f"gives them, not {type(named_tensors).__name__}"
        ) from None


def named_grad_tensors(
    optimizers: Sequence[Any], names: Mapping[Tensor, str], model: torch.nn.Module | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that may have a gradient, under the name of the model's parameter.

    Args:
        optimizers: Their parameters count if there is no model.
        names: Names that replace the optimizer's.
        model: Its parameters count, with its names.
    """
    masters: dict[int, Tensor] = {}
    model_params: dict[int, Tensor] = {}
    for optimizer in optimizers:
        for param, stepped in view_of(optimizer).param_pairs():
            model_params[id(stepped)] = param
            if param is not stepped:
                masters[id(param)] = stepped
    named_params: list[tuple[str, Tensor]] = []
    if model is not None:
        in_model = dict(model.named_parameters())
        named_params += zip(in_model, sharded_params(in_model.values()), strict=True)
    else:
        for optimizer in optimizers:
            for name, stepped in zip(param_names(optimizer), params_of(optimizer), strict=True):
                param = model_params.get(id(stepped), stepped)
                named_params.append((names.get(param, name), param))
    for name, param in named_params:
        yield name, param
        if id(param) in masters:
            yield name, masters[id(param)]


# -- reports ---------------------------------------------------------------------------------------


@torch.no_grad()
def find_overflows(
    named_tensors: Iterable[tuple[str, Tensor]], rank: int
) -> Iterator[GradOverflow]:
    """Yield the gradients of named tensors that have inf or NaN on this rank."""
    for name, tensor in named_tensors:
        for grad in local_grads([tensor]).values:
            is_finite = grad.isfinite()
            if is_finite.all():
                continue
            infs = grad.isinf().sum()
            nans = grad.isnan().sum()
            finite = grad[is_finite]
            largest_finite = float(finite.abs().max()) if finite.numel() else 0.0
            yield GradOverflow(name, rank, int(infs), int(nans), grad.numel(), largest_finite)


def first_bad_name(optimizer: Any, names: Mapping[Tensor, str]) -> str:
    """Return the name of the first parameter with inf or NaN in its gradient on this rank.

    An error of the search is returned in the place of a name, because other ranks wait for it.

    Args:
        optimizer: The optimizer that has the parameters.
        names: Names of parameters. Without them the text is empty.
    """
    if not names:
        return ""
    try:
        overflows = find_overflows(named_grad_tensors([optimizer], names), 0)
        return next((overflow.name for overflow in overflows), "")
    except Exception as error:
        return f"a parameter that cannot be named ({type(error).__name__}: {error!s:.80})"


# -- log lines -------------------------------------------------------------------------------------


class SkipRecord(NamedTuple):
    """A step that was skipped, as its log line describes it.

    Args:
        logger: The name of the logger.
        step: The number of the step.
        scale_text: The loss scale as text; empty without a scale.
        overflow_ranks: The ranks that found inf or NaN, if they are known.
        grads_unchanged: Whether the gradients are unchanged since the skipped step, so that a
            search finds the parameter.
        bad_names: For each of ``overflow_ranks`` the name of its first bad parameter; an empty text
            if it is not known. Empty if the ranks sent no names.
    """

    logger: str
    step: int
    scale_text: str
    overflow_ranks: Sequence[int] | None
    grads_unchanged: bool
    bad_names: Sequence[str] = ()

    def bad_names_text(self) -> str:
        """Return the names that the ranks sent, with all ranks that have a name."""
        ranks_by_name: dict[str, list[int]] = {}
        for rank, name in zip(self.overflow_ranks or (), self.bad_names, strict=False):
            if name:
                ranks_by_name.setdefault(name, []).append(rank)
        if not ranks_by_name:
            return ""
        if len(ranks_by_name) == 1:
            return f", first in {next(iter(ranks_by_name))}"
        parts = [
            f"{name} ({ranks_text(ranks)})"
            for name, ranks in itertools.islice(ranks_by_name.items(), _MAX_NAMES)
        ]
        num_left = len(ranks_by_name) - len(parts)
        if num_left:
            parts.append(count_text(num_left, "other"))
        return f", first in {', '.join(parts)}"


def log_skip(optimizer: Any, record: SkipRecord, names: dict[Tensor, str]) -> None:
    """Log at INFO that a step of ``optimizer`` was skipped, and why.

    Args:
        optimizer: The optimizer that was not stepped.
        record: The skip.
        names: Names of parameters and buffers. A buffer that the line names as not finite is
            removed.
    """
    logger = logging.getLogger(record.logger)
    if not logger.isEnabledFor(logging.INFO):
        return
    first = record.bad_names_text()
    if not first and record.grads_unchanged:
        overflow = next(find_overflows(named_grad_tensors([optimizer], names), 0), None)
        if overflow is not None:
            first = f", first in {overflow.name}"
    ranks = record.overflow_ranks
    on_ranks = f" on {ranks_text(ranks)}" if ranks else ""
    sentences = [
        f"Skipped step {record.step} of {describe_optimizer(optimizer)}{record.scale_text}: inf or "
        f"NaN in the gradients{on_ranks}{first}."
    ]
    buffers = ", ".join(_pop_nonfinite_buffers(names))
    if buffers:
        sentences.append(
            f"The forward pass left inf or NaN in {buffers}, which a skip does not undo."
        )
    if not names and not any(group.get("param_names") for group in optimizer.param_groups):
        sentences.append("Pass named_parameters= for names.")
    logger.info("%s", " ".join(sentences))


def log_norm_skip(logger: str, optimizer: Any, step: int, norm: float, limit: float) -> None:
    """Log at INFO that a step was skipped because its norm exceeded the limit."""
    text = "Skipped step %d of %s: gradient norm %g exceeds skip_norm_above=%g."
    logging.getLogger(logger).info(text, step, describe_optimizer(optimizer), norm, limit)


@torch.no_grad()
def _pop_nonfinite_buffers(names: dict[Tensor, str]) -> list[str]:
    """Remove buffers that are not finite from ``names``, so that each is logged once."""
    buffers: list[Tensor] = []
    for tensor in names:
        is_buffer = not tensor.requires_grad and tensor.grad is None
        if is_buffer and tensor.dtype.is_floating_point:
            buffers.append(tensor)
    return [names.pop(tensor) for tensor in buffers if not to_local(tensor).isfinite().all()]
