"""The norm of the whole model, of which every rank may hold a part."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distamp.errors import CallOrderError, ConfigError, GradientError
from distamp.fsdp_params import sharded_params
from distamp.gradients import (
    are_dense,
    combined,
    flag_of,
    is_dtensor,
    local_gradients,
    multiply,
    power_of,
    square_of,
    summed,
    without_grad,
)
from distamp.optimizers import unwrapped
from distamp.sources import source_of

__all__ = [
    "Chosen",
    "Declared",
    "Share",
    "choose",
    "choose_all_unscaled",
    "choose_unscaled",
    "clip_",
    "differing",
    "is_optimizer",
    "local_square",
    "local_sums",
    "norm_of_power",
    "positive",
    "share_of_power",
    "total",
]

#: Takes a parameter of the model.
Declared: TypeAlias = "Callable[[Tensor], bool | ProcessGroup | DeviceMesh | None]"

_NEAR = 1e-5
# What every rank has a part of, what each has a copy of, and what is taken for a part although
# several ranks may hold it, and nothing says so.
_PART, _REPLICA, _UNSURE = range(3)
# By which Megatron and FSDP1 mark a parameter.
_MARKS = frozenset(("shared", "tensor_model_parallel", "_fsdp_flattened"))
_attributes = operator.attrgetter("__dict__")


class Share(NamedTuple):
    """What one optimizer steps on this rank.

    Args:
        pairs: A parameter of the model, and whose gradient is measured in its place.
        part: Whether a wrapper gives each rank another share of the parameters.
    """

    pairs: Sequence[tuple[Tensor, Tensor]]
    part: bool = False


class Chosen(NamedTuple):
    """What a call clips.

    Args:
        owners: The optimizers whose gradients they are.
        shares: What the norm is of.
        multiplied: Whose gradients are clipped: those, and what other ranks step.
    """

    owners: list[Any]
    shares: list[Share]
    multiplied: list[Tensor]


def choose(given: Any, optimizers: Iterable[Any], scaled: bool) -> Chosen:
    """Return what is clipped by an optimizer, or parameters of ``optimizers``.

    Raises:
        TypeError: Something given is neither.
        CallOrderError: Gradients may be scaled, and belong to none of ``optimizers``.
        GradientError: FSDP1 has gathered the parameters, which have no gradients then.
    """
    is_one = is_optimizer(given)
    optimizers = list(optimizers)
    wanted = {} if is_one else {id(p): p for p in _parameters(given)}
    left = {key for key, parameter in wanted.items() if parameter.grad is not None}
    owners: list[Any] = []
    shares: list[Share] = []
    multiplied = dict(wanted)
    for optimizer in [given] if is_one else optimizers:
        source = source_of(optimizer)
        pairs = source.stepped()
        held = {id(p): p for p in itertools.chain(source.parameters(), *pairs)}
        if not is_one:
            if wanted.keys().isdisjoint(held):
                continue
            left -= held.keys()
            pairs = [pair for pair in pairs if not wanted.keys().isdisjoint(map(id, pair))]
            held = {id(stepped): stepped for _, stepped in pairs}
        owners.append(optimizer)
        shares.append(Share(pairs, source.part))
        multiplied |= held
    if wanted and all(parameter.grad is None for parameter in wanted.values()):
        _refuse_summoned(list(wanted.values()), optimizers)
    if left and scaled:
        raise CallOrderError(
            f"{len(left)} of {len(wanted)} parameters have gradients and belong to no optimizer "
            "this scaler has seen yet, so it does not know whether those are still scaled. Give "
            "clip_grad_norm_ the optimizer, or call register_optimizers(optimizer) first"
        )
    if left:  # in the order given, for a norm of DTensors may be a collective
        shares.append(Share([(p, p) for key, p in wanted.items() if key in left]))
    return Chosen(owners, shares, list(multiplied.values()))


def _refuse_summoned(params: Sequence[Tensor], optimizers: Iterable[Any]) -> None:
    """Refuse parameters of FSDP1's ``summon_full_params``, which have no gradients.

    Args:
        params: Parameters of which none has a gradient.
        optimizers: Those that a guard or scaler has seen.

    Raises:
        GradientError: The gradients are those of flat parameters, which an optimizer holds.
    """
    held = [p for optimizer in optimizers for p in source_of(optimizer).parameters()]
    if set(map(id, held)).isdisjoint(map(id, params)) and any(
        getattr(p, "_is_flat_param", False) and p.grad is not None for p in held
    ):
        raise GradientError(
            f"None of the {len(params)} parameters has a gradient, and the optimizer holds flat "
            "parameters of FSDP1 that have some. Call clip_grad_norm_ outside of "
            "summon_full_params(), or pass the optimizer."
        )


def choose_unscaled(given: Any) -> Chosen:
    """Return what is clipped by an optimizer or parameters whose gradients nobody scales."""
    if is_optimizer(given):
        source = source_of(given)
        waiting = [p for p, stepped in source.stepped() if p is not stepped and p.grad is not None]
        if waiting:  # of masters, from which optimizer.step() then takes them
            source.unscale(flag_of(True, "cpu"), flag_of(False, "cpu"), True)
    return choose(given, [], scaled=False)


def choose_all_unscaled(optimizers: Iterable[Any]) -> Chosen:
    """Return what is clipped by several optimizers whose gradients nobody scales.

    A tensor that two of them step counts once.
    """
    all_or_none = Chosen([], [], [])
    counted: set[int] = set()
    multiplied: dict[int, Tensor] = {}
    for optimizer in optimizers:
        chosen = choose_unscaled(optimizer)
        all_or_none.owners.extend(chosen.owners)
        for share in chosen.shares:
            pairs = [pair for pair in share.pairs if id(pair[1]) not in counted]
            counted.update(id(stepped) for _, stepped in pairs)
            all_or_none.shares.append(Share(pairs, share.part))
        multiplied |= {id(tensor): tensor for tensor in chosen.multiplied}
    all_or_none.multiplied.extend(multiplied.values())
    return all_or_none


def is_optimizer(given: Any) -> bool:
    """Return whether this is an optimizer, perhaps wrapped, and not parameters."""
    return not isinstance(given, Tensor) and hasattr(unwrapped(given), "param_groups")


def _parameters(given: Any) -> list[Tensor]:
    """Return the parameters whose gradients are clipped: shards for those that are gathered."""
    parameters = [given] if isinstance(given, Tensor) else list(given)
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise TypeError(
                "clip_grad_norm_ takes an optimizer or Tensors, such as model.parameters(), not "
                f"{type(parameter).__name__}s"
            )
    for parameter in parameters:
        if not (parameter.is_leaf or parameter.retains_grad):
            raise GradientError(
                f"A tensor of shape {tuple(parameter.shape)} is the result of an operation, so it "
                "has no gradient. FSDP1 puts such tensors in the place of parameters under "
                "SHARD_GRAD_OP, in a forward pass that no backward pass follows. Call "
                "clip_grad_norm_ before such a forward pass, or run it under torch.no_grad()."
            )
    return sharded_params(parameters)


def positive(name: str, value: Any, or_zero: bool = False) -> float:
    """Return an argument as a float; torch's function takes ``"inf"`` and tensors too.

    Raises:
        ConfigError: It is no number above 0, or 0 where that is allowed.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (number > 0 or (or_zero and number == 0)):
        raise ConfigError(f"{name} must be {'>=' if or_zero else '>'} 0, not {value!r}")
    return number


# -- this rank's part ------------------------------------------------------------------------------


def local_sums(
    shares: Iterable[Share],
    norm_type: float,
    device: torch.device,
    size: int = 1,
    is_replicated_fn: Declared | None = None,
    shard_group_fn: Declared | None = None,
) -> Tensor:
    """Return what this rank's gradients add to the power of the norm.

    Args:
        shares: What is measured.
        norm_type: The order of the norm.
        device: Of the result.
        size: Ranks that hold the model.
        is_replicated_fn: Says of a parameter that every rank holds the same.
        shard_group_fn: Says over which ranks a parameter is cut.

    Returns:
        float64 of shape (3,): what is a part of the model, what is taken for a replica, and what
        is taken for a part although several ranks may hold it, and nothing says so.

    Raises:
        ConfigError: A parameter is declared both.
    """
    powers: dict[int, list[Tensor]] = {}
    for (kind, weight), tensors in _alike(shares, size, is_replicated_fn, shard_group_fn).items():
        power = power_of(tensors, norm_type, device)
        if math.isinf(norm_type):
            weight = float(weight > 0)
        powers.setdefault(kind, []).append(power if weight == 1.0 else power * weight)
    kinds = (_PART, _REPLICA, _UNSURE)
    return torch.stack([combined(powers.get(kind, []), norm_type, device) for kind in kinds])


def local_square(
    shares: Iterable[Share],
    device: torch.device,
    size: int = 1,
    is_replicated_fn: Declared | None = None,
    shard_group_fn: Declared | None = None,
) -> tuple[float | Tensor, int]:
    """Return what this rank adds to the square of the norm, and of how many gradients that is.

    The first is to be summed over ranks: a number on the host, else 0-d float64. One, so it cannot
    tell that what it counts as replicas differs between ranks, or that what it counts as parts is
    held by several; `local_sums` can.
    """
    squares: list[float | Tensor] = []
    alike = _alike(shares, size, is_replicated_fn, shard_group_fn)
    for (kind, weight), tensors in alike.items():
        square = square_of(tensors, device)
        share = weight / size if kind == _REPLICA else weight
        squares.append(square if share == 1.0 else square * share)
    square = functools.reduce(operator.add, squares or [square_of([], device)])
    return square, sum(map(len, alike.values()))


@without_grad
def _alike(
    shares: Iterable[Share],
    size: int,
    is_replicated_fn: Declared | None,
    shard_group_fn: Declared | None,
) -> dict[tuple[int, float], list[Tensor]]:
    """Return the gradients by as which kind they count, and by how much."""
    alike: dict[tuple[int, float], list[Tensor]] = {}
    placed: dict[Any, tuple[int, float]] = {}
    for share in shares:
        gradients = [gradient for _, p in share.pairs if (gradient := p.grad) is not None]
        if is_replicated_fn is None and shard_group_fn is None and _are_plain(share, gradients):
            alike.setdefault((_PART if share.part else _REPLICA, 1.0), []).extend(gradients)
            continue
        for parameter, stepped in share.pairs:
            if (gradient := stepped.grad) is None:
                continue
            key = _counted(
                parameter, gradient, share.part, size, is_replicated_fn, shard_group_fn, placed
            )
            alike.setdefault(key, []).append(summed(gradient))
    return alike


def _are_plain(share: Share, gradients: list[Tensor]) -> bool:
    """Return whether nothing in a share needs a look at each; asked of all at once, in C."""
    marks = map(_attributes, map(operator.itemgetter(0), share.pairs))
    return are_dense(gradients) and _MARKS.isdisjoint(itertools.chain.from_iterable(marks))


def _counted(
    parameter: Tensor,
    gradient: Tensor,
    part: bool,
    size: int,
    is_replicated_fn: Declared | None,
    shard_group_fn: Declared | None,
    placed: dict[Any, tuple[int, float]],
) -> tuple[int, float]:
    """Return as which kind a gradient counts, and by how much.

    Args:
        parameter: The model's.
        gradient: Its own, or of what is stepped in its place. Where it is a DTensor it may be
            whole on ranks that hold a shard of the parameter, as after a row-wise embedding.
        part: Whether each rank has another share.
        size: Ranks that hold the model.
        is_replicated_fn: As declared.
        shard_group_fn: As declared.
        placed: As which kind the placements seen in this call count, and by how much.
    """
    is_replica = is_replicated_fn is not None and bool(is_replicated_fn(parameter))
    cut = None if shard_group_fn is None else shard_group_fn(parameter)
    if is_replica and cut:
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} is declared both is_replicated_fn= and "
            "shard_group_fn=; declare it replicated if every rank has the same values, else sharded"
        )
    if is_replica:
        return _PART, 1.0 / size
    if getattr(parameter, "shared", None) is True:
        return _PART, 0.0
    kind, share = _REPLICA, 1.0
    if is_dtensor(gradient):
        key = id(gradient.device_mesh), gradient.placements
        if key not in placed:  # of whose mesh some ranks hold the same
            mesh, kinds = gradient.device_mesh, enumerate(gradient.placements)
            copies = [mesh.size(i) for i, p in kinds if p.is_replicate() or p.is_partial()]
            placed[key] = (
                _PART if mesh.size() >= size else _UNSURE,
                1.0 / float(math.prod(copies)),
            )
        kind, share = placed[key]
    if cut and isinstance(cut, (ProcessGroup, DeviceMesh)):  # a mesh is asked in Python
        return _PART, share * cut.size() / size
    if cut:
        return _PART, share
    if kind != _REPLICA:
        return kind, share
    if part or getattr(parameter, "tensor_model_parallel", None) is True:
        return _PART, 1.0
    if getattr(parameter, "_fsdp_flattened", False):
        return (_PART if size == 1 else _UNSURE), 1.0
    return _REPLICA, 1.0


# -- the whole -------------------------------------------------------------------------------------


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


def share_of_power(sums: Tensor, size: int) -> Tensor:
    """Return the share of this rank in the power of the norm, 0-d float64, which ranks add up.

    Args:
        sums: What `local_sums` returned on this rank, of a norm that is not of order inf.
        size: Ranks that hold the model.
    """
    parts, replicas, unsure = sums.unbind()
    return parts + unsure + replicas / size


def norm_of_power(power: float | Tensor, norm_type: float, device: torch.device) -> Tensor:
    """Return the norm as 0-d float32 on a device, from the sum of `share_of_power`."""
    if not isinstance(power, Tensor):
        power = torch.full((), power, dtype=torch.float64, device=device)
    return power.pow(1.0 / norm_type).float()


def differing(sums: Sequence[Sequence[float]], norm_type: float) -> str | None:
    """Return what has to be declared, where the ranks' sums contradict what was assumed.

    Nothing is said where a value is not finite.

    Args:
        sums: What `local_sums` is on every rank, as the host read it.
        norm_type: The order of the norm.
    """
    if not all(math.isfinite(value) for each in sums for value in each):
        return None
    root = 1.0 if math.isinf(norm_type) else 1.0 / norm_type
    replicas = [each[_REPLICA] ** root for each in sums]
    least, most = min(replicas), max(replicas)
    if most - least > _NEAR * most:
        return (
            f"The norms of the gradients differ between ranks, from {least:g} to {most:g}. Plain "
            "tensors count as replicas, whose gradients are equal on all ranks. If each rank holds "
            "other parameters (experts, stages), pass shard_group_fn=function, which returns True "
            "for such a parameter, or the group over which it is cut. If the gradients should be "
            "equal, some were not reduced: the parameter was frozen when the model was wrapped, or "
            "the backward pass went around the wrapper. If only rounding makes them differ, pass "
            "is_replicated_fn=lambda p: True."
        )
    unsure = [each[_UNSURE] for each in sums]
    twice = [sum(abs(a - b) <= _NEAR * a for b in unsure) > 1 for a in unsure]
    if min(unsure) > 0 and all(twice):
        return (
            "Several ranks have gradients of the same norm, and the norm of the model would count "
            "them several times. FSDP shards, and DTensors on a part of the ranks, count as parts "
            "of one model. They may be replicas: parameters outside the plan of tensor parallel, "
            "shards of HYBRID_SHARD or NO_SHARD, or a mesh beside data parallel. Then pass the "
            "group or mesh over which a parameter is cut, as in shard_group_fn=lambda p: "
            "getattr(p, 'device_mesh', None), or pass is_replicated_fn=lambda p: True."
        )
    return None


@without_grad
def clip_(clipped: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients so that ``norm`` becomes at most ``max_norm``, as torch's clip does.

    Where the host knows that nothing is to be clipped, nothing is multiplied. A norm that is not
    finite changes nothing: the step will be skipped, and what overflowed stays to be reported.
    """
    coefficient = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
    coefficient = torch.where(norm.isfinite(), coefficient, 1.0)
    if not norm.is_cpu or coefficient.item() < 1.0:
        multiply(local_gradients(clipped), coefficient)
