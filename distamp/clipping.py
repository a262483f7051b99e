"""The norm of the whole model, of which every rank may hold a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distamp.errors import SettingError, StageError
from distamp.gradients import flag_of, is_dtensor, local_gradients, multiply, norms_of
from distamp.optimizers import unwrapped
from distamp.sources import source_of

__all__ = [
    "Chosen",
    "Declared",
    "choose",
    "choose_unscaled",
    "clip_",
    "differing",
    "local_sums",
    "positive",
    "total",
]

#: Takes a parameter of the model.
Declared: TypeAlias = "Callable[[Tensor], bool | ProcessGroup | DeviceMesh | None]"

_NEAR = 1e-5


class Clipped(NamedTuple):
    """One tensor to clip.

    Args:
        parameter: The model's.
        stepped: Whose gradient is measured and clipped.
        part: Whether a wrapper gives each rank another share of the parameters.
    """

    parameter: Tensor
    stepped: Tensor
    part: bool


class Chosen(NamedTuple):
    """What a call clips.

    Args:
        owners: The optimizers whose gradients they are.
        measured: What the norm is of.
        multiplied: Whose gradients are clipped: those, and what other ranks step.
    """

    owners: list[Any]
    measured: list[Clipped]
    multiplied: list[Tensor]


def choose(given: Any, optimizers: Iterable[Any]) -> Chosen:
    """Return what is clipped by an optimizer, or parameters of ``optimizers``.

    Raises:
        TypeError: Something given is neither.
        StageError: Parameters belong to none of ``optimizers``.
    """
    parameters = _parameters(given)
    wanted: set[int] | None = None
    if isinstance(given, Tensor) or not hasattr(unwrapped(given), "param_groups"):
        wanted = {id(p) for p in parameters}
    else:
        optimizers = [given]
    owners: list[Any] = []
    measured: list[Clipped] = []
    left = set(wanted or ())
    for optimizer in optimizers:
        source = source_of(optimizer)
        pairs, filled = source.stepped(), source.parameters()
        held = {id(p) for p in filled} | {id(p) for _, p in pairs}
        if wanted is not None and not held & wanted:
            continue
        owners.append(optimizer)
        left -= held
        part = len(pairs) < len(filled)
        measured += [
            Clipped(parameter, stepped, part)
            for parameter, stepped in pairs
            if wanted is None or {id(parameter), id(stepped)} & wanted
        ]
    if left:
        raise StageError(
            f"{len(left)} of {len(parameters)} parameters belong to no optimizer this scaler has "
            "seen yet, so it does not know whether their gradients are still scaled. Give "
            "clip_grad_norm_ the optimizer, or call add_optimizer(optimizer) first"
        )
    multiplied = {id(p): p for p in (*parameters, *(each.stepped for each in measured))}
    return Chosen(owners, measured, list(multiplied.values()))


def _parameters(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    if hasattr(unwrapped(given), "param_groups"):
        return source_of(given).parameters()
    parameters = list(given)
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise TypeError(
                "clip_grad_norm_ takes an optimizer or Tensors, such as model.parameters(), not "
                f"{type(parameter).__name__}s"
            )
    return parameters


def choose_unscaled(given: Any) -> Chosen:
    """Return what is clipped by an optimizer or parameters whose gradients nobody scales."""
    parameters = _parameters(given)
    if isinstance(given, Tensor) or not hasattr(unwrapped(given), "param_groups"):
        return Chosen([], [Clipped(p, p, False) for p in parameters], parameters)
    source = source_of(given)
    pairs = source.stepped()
    if source.casts and pairs:  # optimizer.step() then takes them from the masters
        one = flag_of(True, pairs[0][1].device)
        source.unscale(one, torch.zeros_like(one), True)
    part = len(pairs) < len(source.parameters())
    return Chosen([], [Clipped(*pair, part) for pair in pairs], [stepped for _, stepped in pairs])


def positive(name: str, value: Any) -> float:
    """Return an argument as a float; torch's function takes ``"inf"`` and tensors too.

    Raises:
        SettingError: It is no number above 0.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not number > 0:
        raise SettingError(f"{name} must be > 0, not {value!r}")
    return number


def local_sums(
    clipped: Sequence[Clipped],
    norm_type: float,
    device: torch.device,
    size: int = 1,
    replicated: Declared | None = None,
    sharded: Declared | None = None,
) -> Tensor:
    """Return what this rank's gradients add to the power of the norm.

    Args:
        clipped: What is measured.
        norm_type: The order of the norm.
        device: Of the result.
        size: Ranks that hold the model.
        replicated: Says of a parameter that every rank holds the same.
        sharded: Says over which ranks a parameter is cut.

    Returns:
        float64 of shape (3,): what is a part of the model, what is taken for a replica, and what
        is taken for a part although several ranks may hold it, and nothing says so.

    Raises:
        SettingError: A parameter is declared both.
        GradientError: A gradient is ``Partial``.
    """
    parts: list[Tensor] = []
    replicas: list[Tensor] = []
    unsure: list[Tensor] = []
    norms = norms_of([each.stepped for each in clipped], norm_type, device)
    for each, norm in zip(clipped, norms, strict=True):
        weight, sure = _weight(each, size, replicated, sharded)
        power = norm if math.isinf(norm_type) else norm.pow(norm_type)
        if weight is None:
            replicas.append(power)
            continue
        if math.isinf(norm_type):
            weight = float(weight > 0)
        (parts if sure or size == 1 else unsure).append(power * weight)
    return torch.stack([_added(each, norm_type, device) for each in (parts, replicas, unsure)])


def _added(values: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    if not values:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack(values)
    return stacked.max() if math.isinf(norm_type) else stacked.sum()


def _weight(
    each: Clipped, size: int, replicated: Declared | None, sharded: Declared | None
) -> tuple[float | None, bool]:
    """Return what a part of it counts, None for a replica; and whether that is sure."""
    parameter = each.parameter
    is_replica = replicated is not None and bool(replicated(parameter))
    cut = None if sharded is None else sharded(parameter)
    if is_replica and cut:
        raise SettingError(
            f"a parameter of shape {tuple(parameter.shape)} is declared both replicated= and "
            "sharded=; declare it replicated if every rank has the same values, else sharded"
        )
    if is_replica:
        return 1.0 / size, True
    if getattr(parameter, "shared", None) is True:
        return 0.0, True
    placed = _share(each.stepped) if is_dtensor(each.stepped) else 1.0
    if isinstance(cut, (ProcessGroup, DeviceMesh)):
        return placed * cut.size() / size, True
    if cut:
        return placed, True
    if is_dtensor(each.stepped):
        return placed, each.stepped.device_mesh.size() >= size
    if each.part or getattr(parameter, "tensor_model_parallel", None) is True:
        return 1.0, True
    if getattr(parameter, "_fsdp_flattened", False):
        return 1.0, False
    return None, True


def _share(parameter: Tensor) -> float:
    """Return what the local part of a DTensor counts, of whose mesh some ranks hold the same."""
    if not is_dtensor(parameter):
        return 1.0
    mesh = parameter.device_mesh
    replicas = [mesh.size(i) for i, p in enumerate(parameter.placements) if p.is_replicate()]
    return 1.0 / math.prod(replicas)


def total(sums: Tensor, norm_type: float) -> Tensor:
    """Return the norm of the whole model as 0-d float32, from what `local_sums` is on every rank.

    Args:
        sums: float64 of shape (ranks, 3).
        norm_type: The order of the norm.
    """
    if math.isinf(norm_type):
        return sums.max().float()
    parts, replicas, unsure = sums.unbind(1)
    return (parts.sum() + unsure.sum() + replicas.mean()).pow(1.0 / norm_type).float()


def differing(sums: Tensor, norm_type: float) -> str | None:
    """Return what has to be declared, where the ranks' sums contradict what was assumed.

    Nothing is said where a value is not finite.
    """
    if not bool(sums.isfinite().all()):
        return None
    _, replicas, unsure = sums.unbind(1)
    least, most = (replicas.min(), replicas.max())
    if not math.isinf(norm_type):
        least, most = least.pow(1.0 / norm_type), most.pow(1.0 / norm_type)
    if float(most - least) > _NEAR * float(most):
        return (
            "clip_grad_norm_ counts plain tensors as replicas, and the norms of their gradients "
            f"differ between ranks, from {float(least):g} to {float(most):g}. If each rank holds "
            "other parameters or parts (experts, stages), declare those: sharded=lambda p: p is "
            "such a part, or the group over which it is cut; "
            "if they are replicas whose gradients differ, replicated=lambda p: True"
        )
    apart = (unsure - unsure.unsqueeze(1)).abs() <= _NEAR * unsure
    if bool(unsure.min() > 0) and bool((apart.sum(1) > 1).all()):
        return (
            "clip_grad_norm_ counts shards of FSDP, or DTensors on a part of the ranks, as parts "
            "of one model, and those of several ranks are the same. If they are replicas (as what "
            "the plan of tensor parallel leaves out, between the groups of HYBRID_SHARD, under "
            "NO_SHARD, or beside data parallel), declare over which ranks a parameter is cut: "
            "sharded=lambda p: getattr(p, 'device_mesh', None), or group_or_mesh; or "
            "replicated=lambda p: True"
        )
    return None


@torch.no_grad()
def clip_(clipped: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients so that ``norm`` becomes at most ``max_norm``, as torch's clip does.

    A norm that is not finite changes nothing: the step will be skipped, and what overflowed stays
    to be reported.
    """
    coefficient = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
    multiply(local_gradients(clipped), torch.where(norm.isfinite(), coefficient, 1.0))
