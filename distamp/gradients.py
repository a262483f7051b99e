"""From parameters to local gradient tensors, whatever the layout: unscale, carry over, measure.

The only place that knows layouts: dense and sparse gradients, DTensor, flat shards, empty shards,
several devices and dtypes. Everything after it sees plain local tensors.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor

from distamp import host

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "are_dense",
    "carry_over",
    "combined",
    "flag_of",
    "is_dtensor",
    "local_gradients",
    "local_of",
    "multiply",
    "power_of",
    "refuse_fp16",
    "square_of",
    "summed",
    "unscale",
    "unscale_alike",
    "without_grad",
]

# So many gradients of one dimension, of at most so many bytes, are measured as one on the host.
MANY, SMALL = 64, 1 << 13

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_grad(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function as under ``torch.no_grad()``, whose calls a small model's check would feel."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(recording)

    return call


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether this is a DTensor; does not import what defines it, for then none is."""
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part; under no_grad the very tensor that a DTensor holds."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def flag_of(value: bool, device: torch.device | str) -> Tensor:
    """Return a 0-d float32 flag, whatever torch's default dtype and device are."""
    return torch.full((), float(value), dtype=torch.float32, device=device)


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the local, dense storage of every gradient there is.

    Of a ``Partial`` DTensor, as the norms of sequence parallel have, it is this rank's summand.
    """
    gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
    return gradients if are_dense(gradients) else _behind_wrappers(parameters)


def are_dense(gradients: list[Tensor]) -> bool:
    """Return whether all are plain and dense, as in most models; both are asked at once, in C."""
    return set(map(type, gradients)) <= {Tensor} and not any(map(_is_sparse, gradients))


_is_sparse = operator.attrgetter("is_sparse")
_values = operator.methodcaller("_values")


@without_grad  # without a graph, what a DTensor holds is the local tensor itself, not a view of it
def _behind_wrappers(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [_dense(p, local_of(p.grad)) for p in parameters if p.grad is not None]


def _dense(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return what a sparse gradient holds; any other is itself returned."""
    if gradient.is_sparse:
        if gradient.dtype is torch.float16 and not gradient.is_coalesced():
            # Rows that come twice may add up beyond 65504, so the sums are what is checked; in
            # float32, because float16 cannot be coalesced on every device.
            gradient = parameter.grad = gradient.float().coalesce().half()
        gradient = _values(gradient)
    return gradient


def refuse_fp16(dtypes: Iterable[torch.dtype]) -> None:
    """Refuse to unscale float16 gradients in place, where they underflow.

    Raises:
        ValueError: A gradient is float16 (torch's own sentence, and what to do).
    """
    if torch.float16 in dtypes:
        raise ValueError(
            "Attempting to unscale FP16 gradients. They underflow in place. Keep parameters in "
            "float32 under autocast; or make the scaler with fp16_grads='master' and "
            "MasterParameters(optimizer); or fp16_grads='inplace', as ShardedGradScaler does"
        )


def unscale(
    gradients: list[Tensor], inv_scale: Tensor, found_inf: Tensor, *, allow_fp16: bool = True
) -> dict[torch.device, Tensor]:
    """Multiply every gradient by ``inv_scale`` in place and look for inf and NaN in the same pass.

    Args:
        gradients: Local dense tensors, of any devices and dtypes.
        inv_scale: 0-d float32.
        found_inf: 0-d float32 flag, set to 1.0 where its own device holds an overflow.
        allow_fp16: Whether float16 gradients are welcome; see `refuse_fp16`.

    Returns:
        One 0-d flag for each device that holds gradients, ``found_inf`` itself on its own device.
    """
    groups = _grouped(gradients)
    if not allow_fp16:
        refuse_fp16(map(operator.itemgetter(1), groups))
    flags: dict[torch.device, Tensor] = {}
    for (group,), _ in groups.values():
        unscale_alike(group, inv_scale, found_inf, flags)
    return flags


def unscale_alike(
    gradients: list[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    flags: dict[torch.device, Tensor],
) -> None:
    """Do for gradients of one device and dtype what `unscale` does; ``flags`` takes their flag."""
    device = gradients[0].device
    same = device == found_inf.device
    if device not in flags:
        flags[device] = found_inf if same else flag_of(False, device)
    scale = inv_scale if same else host.moved(inv_scale, device)
    if gradients[0].is_complex():  # of which torch's kernel knows nothing
        plain = (g.conj() if g.is_conj() else g for g in gradients)
        gradients = list(map(torch.view_as_real, plain))
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, flags[device], scale)


def _grouped(gradients: list[Tensor]) -> dict[Any, Any]:
    """Return them by device and dtype, in torch's own wrapping of lists."""
    as_lists: Any = [gradients]
    groups: dict[Any, Any] = {}
    if gradients:
        groups = torch._C._group_tensors_by_device_and_dtype(as_lists, False)
    return groups


@without_grad
def carry_over(parameters: Iterable[Tensor], ratio: Tensor) -> None:
    """Multiply gradients by the new scale over the one that they were made with, each once.

    Args:
        parameters: Those with gradients that wait for their step; some may come twice.
        ratio: 0-d float32. Read on the host only where gradients lie there and it does not.
    """
    found = (gradient for p in parameters if (gradient := p.grad) is not None)
    gradients = {id(gradient): local_of(gradient) for gradient in found}
    multiply([_values(g) if g.is_sparse else g for g in gradients.values()], ratio)


def multiply(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply local dense gradients of any devices and dtypes in place by a 0-d factor."""
    for (device, _), ((group,), _) in _grouped(gradients).items():
        torch._foreach_mul_(group, host.moved(factor, device))


@without_grad
def power_of(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of ``|x| ** norm_type`` over all elements, or the largest for inf.

    Three kernels for each device and dtype of theirs, and one that adds them.

    Args:
        gradients: Local dense tensors, of any devices and dtypes.
        norm_type: The order of the norm; > 0.
        device: Of the result.

    Returns:
        0-d float64; 0 without gradients.
    """
    if math.isinf(norm_type):  # of no element there is no largest
        gradients = [gradient for gradient in gradients if gradient.numel()]
    powers: list[Tensor] = []
    for norms in _norms(gradients, norm_type):
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type, dtype=torch.float64)
        powers.append(host.moved(norm if math.isinf(norm_type) else norm.pow(norm_type), device))
    return combined(powers, norm_type, device)


def square_of(gradients: list[Tensor], device: torch.device) -> float | Tensor:
    """Return `power_of` for a norm of 2: a number on the host, where kernels take longer."""
    if not host.is_host(device):
        return power_of(gradients, 2.0, device)
    norm = math.hypot(*map(Tensor.item, itertools.chain(*_norms(gradients, 2.0))))
    return norm * norm


def _norms(gradients: list[Tensor], norm_type: float) -> Iterator[tuple[Tensor, ...]]:
    """Yield for each device and dtype the norms of its gradients, 0-d."""
    for (device, dtype), ((group,), _) in _grouped(gradients).items():
        some = _joined(group) if host.is_host(device) else group
        # float16 squares overflow from 256 on.
        yield torch._foreach_norm(some, norm_type, torch.float32 if dtype.itemsize < 4 else None)


def _joined(gradients: list[Tensor]) -> list[Tensor]:
    """Return many biases and the like as one: a call for each takes longer than its elements."""
    small = [each for each in gradients if each.nbytes <= SMALL and each.dim() == 1]
    if len(small) < MANY:
        return gradients
    rest = [each for each in gradients if each.nbytes > SMALL or each.dim() != 1]
    return [torch.cat(small), *rest]


def combined(powers: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return what several of `power_of` come to: their sum, or the largest for inf; 0 of none."""
    if len(powers) == 1:
        return powers[0]
    if not powers:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(powers).amax() if math.isinf(norm_type) else torch.stack(powers).sum()


def summed(gradient: Tensor) -> Tensor:
    """Return this rank's part of a gradient as its norm sees it: sums, where it is summands.

    Called under no_grad. Rows of a sparse one that come twice are added up, in float32 where they
    are float16; a ``Partial`` DTensor is reduced over its mesh, which all ranks of that do
    together.
    """
    if is_dtensor(gradient):
        if any(placement.is_partial() for placement in gradient.placements):
            from torch.distributed.tensor import Replicate

            kept = [Replicate() if p.is_partial() else p for p in gradient.placements]
            gradient = gradient.redistribute(placements=kept)
        gradient = gradient.to_local()
    if gradient.is_sparse:
        half = gradient.dtype is torch.float16
        gradient = _values((gradient.float() if half else gradient).coalesce())
    return gradient
