"""Reports about gradients with inf or NaN: which parameter, on which rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distamp.fsdp_params import sharded_params
from distamp.grads import local_grads
from distamp.optim_utils import param_names, params_of, view_of

__all__ = [
    "GradOverflow",
    "NonFiniteReport",
    "find_overflows",
    "first_bad_name",
    "named_grad_tensors",
    "tensor_names",
]


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
