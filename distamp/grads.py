"""Gradients of every layout as plain local tensors: read, unscale, multiply, and measure them.

This file alone handles the layouts: dense and sparse gradients, DTensor, flat and empty shards,
several devices and dtypes. Its functions return plain local tensors, on which the other files work.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeGuard, TypeVar, cast

import torch
from torch import Tensor

from distamp import device_utils
from distamp.fsdp_params import check_reduction_finished

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "LocalGrads",
    "all_plain",
    "check_no_fp16",
    "combine_powers",
    "dtensor_class",
    "found_inf_tensor",
    "is_dtensor",
    "local_grads",
    "multiply_",
    "no_grad_fast",
    "norm_power",
    "reduced_local_grad",
    "rescale_grads_",
    "to_local",
    "unscale_",
    "unscale_group_",
]

#: On the host gradients of one dimension, each of at most this many bytes, are concatenated before
#: their norm is computed, this many at a time, so that the copy stays in the processor's cache.
_SMALL_BYTES, _SMALL_AT_ONCE = 1 << 14, 32

_P = ParamSpec("_P")
_R = TypeVar("_R")

_is_sparse = operator.attrgetter("is_sparse")
_sparse_values = operator.methodcaller("_values")


def no_grad_fast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function under no_grad, without the cost of the context object of ``torch.no_grad``."""

    @functools.wraps(function)
    def call_without_grad(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        grad_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(grad_enabled)

    return call_without_grad


# -- layouts ---------------------------------------------------------------------------------------


def dtensor_class() -> Any:
    """Return the class DTensor for ``isinstance``; no import of its module, which takes long.

    No DTensor exists before that module is imported, so the result is an empty tuple then.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` is a DTensor."""
    tensor_type = type(tensor)
    if tensor_type is Tensor or tensor_type is torch.nn.Parameter:
        return False
    return isinstance(tensor, dtensor_class())


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part; under no_grad this is the very tensor that a DTensor holds."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


class LocalGrads(NamedTuple):
    """The gradients of some parameters as this rank holds them.

    Args:
        params: The parameters that have a gradient.
        grads: The ``.grad`` of each parameter.
        values: The local dense storage of each gradient. For a ``Partial`` DTensor, as norms have
            under sequence parallel, this is the summand of this rank.
        are_plain: Whether each gradient is a plain dense tensor, and so equal to its values.
    """

    params: list[Tensor]
    grads: list[Tensor]
    values: list[Tensor]
    are_plain: bool


def local_grads(params: Iterable[Tensor]) -> LocalGrads:
    """Return the local dense storage of each gradient that ``params`` have.

    Raises:
        CallOrderError: FSDP2 has not finished the reduction of a gradient.
    """
    params = list(params)
    with_grad = [param for param in params if param.grad is not None]
    grads: list[Any] = [param.grad for param in with_grad]
    are_plain = all_plain(grads)
    if not are_plain or len(grads) < len(params):
        check_reduction_finished(params)
    if are_plain:
        return LocalGrads(with_grad, grads, grads, are_plain=True)
    values = _local_values(with_grad, grads)
    return LocalGrads(with_grad, grads, values, are_plain=False)


def all_plain(grads: Sequence[Any]) -> bool:
    """Return whether all gradients are plain dense tensors; the loops run in C."""
    return set(map(type, grads)) <= {Tensor} and not any(map(_is_sparse, grads))


@no_grad_fast  # With a graph, `DTensor.to_local` returns a view instead of the tensor it holds.
def _local_values(params: list[Tensor], grads: list[Any]) -> list[Tensor]:
    """Return local dense values; ``grads`` receives the coalesced form of float16 gradients."""
    dtensor_type = dtensor_class()
    values: list[Tensor] = []
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        local = grad.to_local() if isinstance(grad, dtensor_type) else grad
        if local.is_sparse:
            if local.dtype is torch.float16 and not local.is_coalesced():
                # Equal rows may add up beyond 65504, so the sums are checked. float16 cannot be
                # coalesced on every device.
                local = local.float().coalesce().half()
                grads[index] = param.grad = local
            local = _sparse_values(local)
        values.append(local)
    return values


def reduced_local_grad(grad: Tensor) -> Tensor:
    """Return this rank's part of a gradient with sums in the place of summands, for its norm.

    Call it under no_grad. Equal rows of a sparse gradient are added up, in float32 if they are
    float16. A ``Partial`` DTensor is reduced over its mesh.

    Collective: for a ``Partial`` DTensor every rank of its mesh must call this.
    """
    if is_dtensor(grad):
        if any(placement.is_partial() for placement in grad.placements):
            from torch.distributed.tensor import Replicate

            placements = [
                Replicate() if placement.is_partial() else placement
                for placement in grad.placements
            ]
            grad = grad.redistribute(placements=placements)
        grad = grad.to_local()
    if grad.is_sparse:
        is_half = grad.dtype is torch.float16
        grad = _sparse_values((grad.float() if is_half else grad).coalesce())
    return grad


# -- unscale and multiply --------------------------------------------------------------------------


def found_inf_tensor(value: bool, device: torch.device | str) -> Tensor:
    """Return a found-inf flag as 0-d float32, independent of torch's default dtype and device."""
    return torch.full((), float(value), dtype=torch.float32, device=device)


def check_no_fp16(dtypes: Iterable[torch.dtype]) -> None:
    """Refuse to unscale float16 gradients in place, because they underflow.

    Raises:
        ValueError: A gradient is float16. The text begins with torch's own sentence.
    """
    if torch.float16 in dtypes:
        raise ValueError(
            "Attempting to unscale FP16 gradients. They underflow in place. Keep parameters in "
            "float32 under autocast, or make the scaler with fp16_grads='master' and call "
            "MasterParameters(optimizer), or pass fp16_grads='inplace', as ShardedGradScaler does."
        )


def unscale_(
    values: list[Tensor], inv_scale: Tensor, found_inf: Tensor, *, allow_fp16: bool = True
) -> dict[torch.device, Tensor]:
    """Multiply gradients by ``inv_scale`` in place and check them for inf and NaN in one pass.

    Call it under no_grad.

    Args:
        values: Local dense gradients, of any devices and dtypes.
        inv_scale: 0-d float32.
        found_inf: 0-d float32 flag, set to 1.0 if a gradient on the same device is not finite.
        allow_fp16: Whether float16 gradients are allowed; see `check_no_fp16`.

    Returns:
        A 0-d flag for each device that holds gradients: ``found_inf`` itself on its device.

    Raises:
        ValueError: A gradient is float16 although ``allow_fp16`` is False.
    """
    groups = _group_by_device_and_dtype(values)
    if not allow_fp16:
        check_no_fp16(map(operator.itemgetter(1), groups))
    found_inf_per_device: dict[torch.device, Tensor] = {}
    for (group,), _ in groups.values():
        unscale_group_(group, inv_scale, found_inf, found_inf_per_device)
    return found_inf_per_device


def unscale_group_(
    values: list[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    found_inf_per_device: dict[torch.device, Tensor],
) -> None:
    """Unscale gradients of one device and dtype; add their flag to ``found_inf_per_device``."""
    device = values[0].device
    is_same_device = device == found_inf.device
    if device not in found_inf_per_device:
        flag = found_inf if is_same_device else found_inf_tensor(False, device)
        found_inf_per_device[device] = flag
    if not is_same_device:
        inv_scale = device_utils.to_device(inv_scale, device)
    if values[0].is_complex():
        # torch's kernel supports no complex dtype.
        values = [torch.view_as_real(v.conj() if v.is_conj() else v) for v in values]
    torch._amp_foreach_non_finite_check_and_unscale_(
        values, found_inf_per_device[device], inv_scale
    )


def _group_by_device_and_dtype(values: list[Tensor]) -> dict[Any, Any]:
    """Return the tensors by (device, dtype), as torch's function returns them: in nested lists."""
    groups: dict[Any, Any] = {}
    if values:
        nested: Any = [values]
        groups = torch._C._group_tensors_by_device_and_dtype(nested, False)
    return groups


@no_grad_fast
def rescale_grads_(params: Iterable[Tensor], ratio: Tensor) -> None:
    """Multiply gradients by new scale / old scale, each gradient once.

    Args:
        params: Parameters. Some may occur twice or have no gradient.
        ratio: 0-d float32. It moves to the host only if gradients are there.
    """
    grads = {id(param.grad): param.grad for param in params if param.grad is not None}
    local = map(to_local, grads.values())
    multiply_([_sparse_values(grad) if grad.is_sparse else grad for grad in local], ratio)


@no_grad_fast
def multiply_(values: list[Tensor], factor: Tensor) -> None:
    """Multiply local dense gradients of any devices and dtypes in place by a 0-d factor."""
    for (device, _), ((group,), _) in _group_by_device_and_dtype(values).items():
        same_device = factor.device == device
        torch._foreach_mul_(
            group, factor if same_device else device_utils.to_device(factor, device)
        )


# -- norms -----------------------------------------------------------------------------------------


def norm_power(values: list[Tensor], norm_type: float, device: torch.device) -> float | Tensor:
    """Return the sum of ``|x| ** norm_type`` over all elements, or the largest ``|x|`` for inf.

    Call it under no_grad. A device runs three kernels for each device and dtype of the gradients,
    and one that adds up.

    Args:
        values: Local dense gradients, of any devices and dtypes.
        norm_type: The order of the norm; > 0.
        device: The device of the result.

    Returns:
        A number if ``device`` is the host, because kernels take longer there, else 0-d float64.
    """
    is_on_host = device.type == "cpu"
    is_inf = math.isinf(norm_type)
    if is_inf:
        # A tensor without elements has no largest element.
        values = [value for value in values if value.numel()]
    norms: list[Tensor] = []
    powers: list[Tensor] = []
    for (group_device, dtype), ((group,), _) in _group_by_device_and_dtype(values).items():
        # Squares of float16 overflow from 256 on.
        norm_dtype = torch.float32 if dtype.itemsize < 4 else None
        if group_device.type == "cpu" and len(group) > _SMALL_AT_ONCE:
            group_norms = _norms_on_host(group, norm_type, norm_dtype)
        else:
            group_norms = list(torch._foreach_norm(group, norm_type, norm_dtype))
        if is_on_host and norm_type == 2.0:
            norms += group_norms
            continue
        stacked = torch.stack(group_norms)
        norm = torch.linalg.vector_norm(stacked, norm_type, dtype=torch.float64)
        power = norm if is_inf else norm.pow(norm_type)
        powers.append(device_utils.to_device(power, device))
    if norms:
        total_norm = math.hypot(*map(Tensor.item, norms))
        return total_norm * total_norm
    if not powers:
        return 0.0 if is_on_host else torch.zeros((), dtype=torch.float64, device=device)
    total = powers[0] if len(powers) == 1 else combine_powers(powers, norm_type)
    return total.item() if is_on_host and isinstance(total, Tensor) else total


def _norms_on_host(
    values: list[Tensor], norm_type: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """Return norms that combine to the norm of the values; small vectors are measured together.

    The call of a kernel for each small vector would take longer than its elements.
    """
    small: list[Tensor] = []
    large: list[Tensor] = []
    for value in values:
        is_small = value.nbytes <= _SMALL_BYTES and value.dim() == 1
        (small if is_small else large).append(value)
    norms: list[Tensor] = []
    for start in range(0, len(small), _SMALL_AT_ONCE):
        joined = torch.cat(small[start : start + _SMALL_AT_ONCE])
        norms.append(torch.linalg.vector_norm(joined, norm_type, dtype=dtype))
    if large:
        norms += torch._foreach_norm(large, norm_type, dtype)
    return norms


def combine_powers(powers: Sequence[float] | Sequence[Tensor], norm_type: float) -> float | Tensor:
    """Combine results of `norm_power`: add them up, or return the largest for order inf.

    Args:
        powers: Two or more numbers, or 0-d float64.
        norm_type: The order of the norm.
    """
    is_inf = math.isinf(norm_type)
    if isinstance(powers[0], Tensor):
        stacked = torch.stack(cast("list[Tensor]", powers))
        return stacked.amax() if is_inf else stacked.sum()
    numbers = cast("list[float]", powers)
    if is_inf and not any(map(math.isnan, numbers)):
        return max(numbers)
    return sum(numbers)  # NaN if a power is NaN.
