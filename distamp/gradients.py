"""From parameters to local gradient tensors, whatever the layout; unscale and check them.

The only place that knows layouts: dense and sparse gradients, DTensor, flat shards, empty shards,
several devices and dtypes. Everything after it sees plain local tensors.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from distamp import host
from distamp.errors import GradientError
from distamp.optimizers import parameter_names

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "check_finite",
    "flag_of",
    "is_dtensor",
    "largest_magnitude",
    "local_gradients",
    "local_of",
    "local_part",
    "merged",
    "refuse_fp16",
    "refuse_impossible",
    "summed_values",
    "unscale",
]


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


def refuse_impossible(parameters: list[Tensor]) -> None:
    """Refuse wrappers that cannot train on this machine at all, before anything is stepped.

    Raises:
        TypeError: Something is not a tensor.
        ValueError: fairscale's FullyShardedDataParallel without CUDA, whose streams it needs.
    """
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"expected param to be torch.Tensor, got {type(parameter).__name__}")
        if _is_fairscale_flat(parameter) and not torch.cuda.is_available():
            raise ValueError(
                "fairscale's FullyShardedDataParallel needs CUDA streams and there is no CUDA "
                "device; on CPU use torch's fully_shard or fairscale's ShardedDataParallel"
            )


def _is_fairscale_flat(parameter: Tensor) -> bool:
    kind = type(parameter)
    return kind.__name__ == "FlatParameter" and kind.__module__.startswith("fairscale.")


def local_gradients(
    parameters: Iterable[Tensor], owner: torch.optim.Optimizer | None = None
) -> list[Tensor]:
    """Return the local, dense storage of every gradient there is.

    Args:
        parameters: The parameters of one optimizer.
        owner: Names the parameters in errors.

    Raises:
        GradientError: A DTensor gradient is ``Partial``: its local value is only a summand.
    """
    gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
    # Both questions are asked of all at once, in C; most models are dense and plain throughout.
    if set(map(type, gradients)) - {Tensor} or any(map(_is_sparse, gradients)):
        return _behind_wrappers(parameters, owner)
    return gradients


_is_sparse = operator.attrgetter("is_sparse")


def refuse_fp16(dtypes: Iterable[torch.dtype]) -> None:
    """Refuse to unscale float16 gradients in place, where they underflow.

    Raises:
        ValueError: A gradient is float16 (torch's own text).
    """
    if torch.float16 in dtypes:
        raise ValueError("Attempting to unscale FP16 gradients.")


def _behind_wrappers(
    parameters: Iterable[Tensor], owner: torch.optim.Optimizer | None
) -> list[Tensor]:
    gradients: list[Tensor] = []
    for index, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is None:
            continue
        if type(gradient) is not Tensor:
            gradient = local_part(gradient, owner, index)
        if gradient.is_sparse:
            if gradient.dtype is torch.float16:
                gradient = parameter.grad = _coalesced_fp16(gradient)
            gradient = gradient._values()
        gradients.append(gradient)
    return gradients


def local_part(gradient: Tensor, owner: torch.optim.Optimizer | None, index: int) -> Tensor:
    """Return this rank's part of a gradient, the ``index``-th of its owner.

    Raises:
        GradientError: It is a ``Partial`` DTensor.
    """
    if not is_dtensor(gradient):
        return gradient
    if any(placement.is_partial() for placement in gradient.placements):
        name = list(parameter_names(owner))[index] if owner is not None else f"number {index}"
        raise GradientError(
            f"the gradient of {name} is a DTensor with placements {gradient.placements}: a Partial "
            "gradient is one summand and says nothing about the sum. Reduce it first, for example "
            "parameter.grad = parameter.grad.redistribute(placements=parameter.placements)"
        )
    with torch.no_grad():  # without a graph, to_local is the local tensor itself, not a view of it
        return gradient.to_local()


def unscale(
    gradients: list[Tensor], inv_scale: Tensor, found_inf: Tensor, *, allow_fp16: bool = True
) -> list[Tensor]:
    """Multiply every gradient by ``inv_scale`` in place and look for inf and NaN in the same pass.

    Args:
        gradients: Local dense tensors, of any devices and dtypes.
        inv_scale: 0-d float32.
        found_inf: 0-d float32 flag, set to 1.0 where its own device holds an overflow.
        allow_fp16: Whether float16 gradients are welcome; see `refuse_fp16`.

    Returns:
        One 0-d flag for each device that holds gradients; ``found_inf`` itself if there is none.
    """
    groups = _grouped(gradients)
    if not allow_fp16:
        refuse_fp16([dtype for _, dtype, _ in groups])
    if len(groups) == 1 and groups[0][0] == found_inf.device:
        torch._amp_foreach_non_finite_check_and_unscale_(groups[0][2], found_inf, inv_scale)
        return [found_inf]
    flags: dict[torch.device, Tensor] = {}
    scales: dict[torch.device, Tensor] = {}
    for device, _, group in groups:
        if device not in flags:
            same = device == found_inf.device
            flags[device] = found_inf if same else flag_of(False, device)
            scales[device] = inv_scale if same else host.moved(inv_scale, device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, flags[device], scales[device])
    return list(flags.values()) or [found_inf]


def check_finite(gradients: list[Tensor], found_inf: Tensor) -> list[Tensor]:
    """Look for inf and NaN and change nothing; one read of the gradients, no write.

    Args:
        gradients: Local dense tensors, of any devices and dtypes.
        found_inf: 0-d float32 flag, set to 1.0 where its own device holds an overflow.

    Returns:
        One 0-d flag for each device that holds gradients; ``found_inf`` itself if there is none.
    """
    flags: dict[torch.device, Tensor] = {}
    for device, _, group in _grouped(gradients):
        if device not in flags:
            same = device == found_inf.device
            flags[device] = found_inf if same else flag_of(False, device)
        flag = flags[device]
        if host.is_host(device):
            # The 2-norm runs at memory speed here and the inf-norm seven times slower. A norm that
            # is not finite may be squares overflowing, so then the exact pass decides.
            if not torch.stack(torch._foreach_norm(group, 2)).isfinite().all():
                one = flag_of(True, device)
                torch._amp_foreach_non_finite_check_and_unscale_(group, flag, one)
        else:
            largest = torch.stack(torch._foreach_norm(_nonempty(group), float("inf")))
            torch.maximum(flag, (~largest.isfinite()).any().to(flag.dtype), out=flag)
    return list(flags.values()) or [found_inf]


def largest_magnitude(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return the largest magnitude as 0-d float32 on ``device``; inf if something is inf or NaN.

    One read of the gradients. On the host the minimum and the maximum are taken, because
    ``torch._foreach_norm`` with ord inf is five times slower there.
    """
    largest = flag_of(False, device)
    for there, _, group in _grouped(gradients):
        group = _nonempty(group)
        if host.is_host(there):
            ends = [end for gradient in group for end in torch.aminmax(gradient)]
            found = torch.stack(ends).abs_().max().float()
        else:
            found = torch.stack(torch._foreach_norm(group, float("inf"))).max().float()
        largest = torch.maximum(largest, host.moved(found, device))
    return largest.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def flag_of(value: bool, device: torch.device | str) -> Tensor:
    """Return a 0-d float32 flag, whatever torch's default dtype and device are."""
    return torch.full((), float(value), dtype=torch.float32, device=device)


def merged(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return one 0-d flag on ``device`` for the flags of several devices."""
    first, *others = flags
    total = first if first.device == device else host.moved(first, device)
    for flag in others:
        total = torch.maximum(total, host.moved(flag, device))
    return total if total.dim() == 0 else total.max()


def _nonempty(group: list[Tensor]) -> list[Tensor]:
    return [g for g in group if g.numel()] or [torch.zeros_like(group[0].new_empty(1))]


def _grouped(gradients: list[Tensor]) -> list[tuple[torch.device, torch.dtype, list[Tensor]]]:
    if not gradients:
        return []
    as_lists: Any = [gradients]
    groups: dict[Any, Any] = torch._C._group_tensors_by_device_and_dtype(as_lists, False)
    return [(device, dtype, tensors) for (device, dtype), ((tensors,), _) in groups.items()]


def summed_values(gradient: Tensor) -> Tensor:
    """Return the values of a sparse gradient, those of one index summed; float32 for float16."""
    if not gradient.is_coalesced() and gradient.dtype is torch.float16:
        gradient = gradient.float()
    return gradient.coalesce()._values()


def _coalesced_fp16(gradient: Tensor) -> Tensor:
    # Duplicate indices may sum beyond 65504, so the sums are what must be checked; they are taken
    # in float32 because float16 cannot be coalesced on every device.
    if gradient.is_coalesced():
        return gradient
    return gradient.float().coalesce().half()
