"""Norms of gradients that may be sharded over ranks, and the clip and the skip by a norm."""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distamp import device_utils
from distamp.errors import CallOrderError, ConfigError, GradientError
from distamp.fsdp_params import sharded_params
from distamp.grads import (
    LocalGrads,
    combine_powers,
    found_inf_tensor,
    local_grads,
    multiply_,
    no_grad_fast,
    norm_power,
    reduced_local_grad,
)
from distamp.optim_utils import OptimizerView, unwrap_optimizer, view_of

__all__ = [
    "ClipTargets",
    "GradShare",
    "LayoutFn",
    "LocalNorm",
    "NormLimits",
    "StepDecision",
    "any_found_inf",
    "as_found_inf_tensor",
    "check_positive",
    "clip_grads_with_norm_",
    "is_optimizer",
    "layout_text",
    "local_norm",
    "nan_if_found_inf",
    "replica_mismatch",
    "select_targets",
    "select_unscaled",
    "select_unscaled_optimizers",
    "total_norm",
    "total_norm_of_ranks",
]

#: Takes a parameter of the model, and returns whether it is replicated or sharded, or the group or
#: mesh over which it is sharded.
LayoutFn: TypeAlias = "Callable[[Tensor], bool | ProcessGroup | DeviceMesh | None]"

#: Replicas are equal if their norms differ by at most this, relative to the larger norm.
_REPLICA_RTOL = 1e-5
#: torch's clip adds this to the norm before it divides.
_EPSILON = 1e-6
#: How a gradient counts: as a part of the model, as a copy that each rank has, and as a part of
#: which several ranks may have the same copy.
_SHARD, _REPLICA, _AMBIGUOUS = range(3)
#: The attribute in which spmd_types keeps the annotation of a tensor.
_SPMD_ATTR = "_local_type"
#: Attributes by which Megatron, FSDP1 and spmd_types mark a parameter.
_LAYOUT_ATTRS = frozenset(("shared", "tensor_model_parallel", "_fsdp_flattened", _SPMD_ATTR))
_attributes = operator.attrgetter("__dict__")


def check_positive(name: str, value: Any, or_zero: bool = False) -> float:
    """Return an argument as a float; torch's function takes ``"inf"`` and tensors too.

    Raises:
        ConfigError: The value is no number above 0, or 0 if that is allowed.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (number > 0 or (or_zero and number == 0)):
        raise ConfigError(f"{name} must be {'>=' if or_zero else '>'} 0, not {value!r}")
    return number


# -- limits and decisions --------------------------------------------------------------------------


class StepDecision(NamedTuple):
    """The decision of all ranks on a step; on a device its values are tensors.

    Only this class holds values that are numbers if the host knows them and else 0-d float32
    tensors on the device of the loss scale.

    Args:
        found_inf: Whether a rank found inf or NaN.
        above_limit: Whether the norm exceeds ``skip_norm_above``.
        requested: Whether a rank requested the skip by ``skip_if``.
        clip_coef: The factor of the clip; at most 1, and 1 if the step is skipped. A tensor is
            float64, so that its inverse is rounded only once.
        total_norm: The norm before the clip; NaN if no norm was measured.
        norm_limit: The value of ``skip_norm_above``; inf without one.
    """

    found_inf: bool | Tensor = False
    above_limit: bool | Tensor = False
    requested: bool | Tensor = False
    clip_coef: float | Tensor = 1.0
    total_norm: float | Tensor = math.nan
    norm_limit: float | Tensor = math.inf

    def with_found_inf(self, flags: Iterable[Tensor], device: torch.device) -> StepDecision:
        """Return this decision with the flags of torch's per-optimizer state.

        Args:
            flags: 0-d float32; other code may have changed them. The host reads them if
                ``device`` is the host.
            device: The device of the loss scale.
        """
        return self._replace(found_inf=any_found_inf(flags, device))

    def with_request(self, requested: bool | Tensor) -> StepDecision:
        """Return this decision with a request to skip; nothing is clipped if the host knows it."""
        clip_coef = 1.0 if requested is True else self.clip_coef
        return self._replace(requested=requested, clip_coef=clip_coef)

    @property
    def skip(self) -> bool | Tensor:
        """The skip of the step, for any reason, without a wait for the device."""
        skip = self.found_inf
        for reason in (self.above_limit, self.requested):
            if not isinstance(reason, Tensor):
                skip = True if reason else skip
            elif not isinstance(skip, Tensor):
                skip = True if skip else reason
            else:
                skip = torch.maximum(skip.float(), reason)
        return skip

    def clip_coef_tensor(self, device: torch.device) -> Tensor:
        """Return ``clip_coef`` as 0-d float32, on ``device`` if the host knows it."""
        if isinstance(self.clip_coef, Tensor):
            return self.clip_coef.float()
        return torch.full((), self.clip_coef, dtype=torch.float32, device=device)

    def on_host(self, flags: Iterable[Tensor]) -> StepDecision:
        """Return the decision with the flags of torch's state, after a wait for the device."""
        requested = bool(self.requested)
        return StepDecision(
            found_inf=any(map(Tensor.item, flags)),
            above_limit=bool(self.above_limit),
            requested=requested,
            clip_coef=1.0 if requested else float(self.clip_coef),
            total_norm=float(self.total_norm),
            norm_limit=float(self.norm_limit),
        )


def any_found_inf(flags: Iterable[Tensor], device: torch.device) -> bool | Tensor:
    """Return whether a flag is set: a bool if ``device`` is the host, else 0-d float32, 0 or 1.

    Infinity's training loop adds flags up over ranks, so a flag may be larger than 1.
    """
    if device.type == "cpu":
        return any(map(Tensor.item, flags))
    on_device = [device_utils.to_device(flag, device) for flag in flags]
    largest = on_device[0] if len(on_device) == 1 else torch.stack(on_device).amax()
    return largest.reshape(()).clamp(max=1.0)


def nan_if_found_inf(power: float | Tensor, flags: Iterable[Tensor]) -> float | Tensor:
    """Return the power of a norm, NaN if a found-inf flag is set."""
    for flag in flags:
        if isinstance(power, Tensor):
            power = torch.where(device_utils.to_device(flag, power.device) > 0, math.nan, power)
        elif flag.item():
            power = math.nan
    return power


def as_found_inf_tensor(found_inf: bool | Tensor, device: torch.device | str) -> Tensor:
    """Return a flag as 0-d float32, exactly 0 or 1, on ``device`` if the host knows it."""
    if isinstance(found_inf, Tensor):
        return found_inf.float()
    return found_inf_tensor(found_inf, device)


def layout_text(is_replicated_fn: LayoutFn | None, shard_group_fn: LayoutFn | None) -> str:
    """Return a line for each layout function that was given, for the comparison of ranks."""
    text = ""
    if is_replicated_fn is not None:
        text += "\nis_replicated_fn=..."
    if shard_group_fn is not None:
        text += "\nshard_group_fn=..."
    return text


class NormLimits(NamedTuple):
    """Arguments of a step by the norm of all gradients that it is given.

    Args:
        max_norm: Gradients are multiplied so that the norm is at most this.
        skip_norm_above: The step is skipped if the norm is larger.
        is_replicated_fn: Returns whether every rank holds the same values of a parameter.
        shard_group_fn: Returns over which ranks a parameter is sharded.
    """

    max_norm: float | None = None
    skip_norm_above: float | Tensor | None = None
    is_replicated_fn: LayoutFn | None = None
    shard_group_fn: LayoutFn | None = None

    def given_names(self) -> list[str]:
        """Return the names of the arguments that were given."""
        names: list[str] = []
        for name, value in zip(self._fields, self, strict=True):
            if value is not None:
                names.append(name)
        return names

    def validated(self, read_limit: bool = False) -> NormLimits:
        """Return the same limits with numbers in their range.

        Args:
            read_limit: Whether the host must read a limit on a device, to send it to other ranks.

        Raises:
            ConfigError: A number is out of range.
        """
        max_norm, limit = self.max_norm, self.skip_norm_above
        if max_norm is not None:
            max_norm = check_positive("max_norm", max_norm, or_zero=True)
        if isinstance(limit, Tensor):
            if limit.numel() != 1:
                raise ConfigError(f"skip_norm_above must be one number, not of shape {limit.shape}")
            limit = limit.detach().reshape(())
            if read_limit or device_utils.is_cpu(limit.device):
                limit = limit.item()
        if limit is not None and not isinstance(limit, Tensor):
            limit = check_positive("skip_norm_above", limit)
        return self._replace(max_norm=max_norm, skip_norm_above=limit)

    @property
    def has_layout_fns(self) -> tuple[bool, bool]:
        """Flags for ``is_replicated_fn`` and ``shard_group_fn``: true if the function was given."""
        return self.is_replicated_fn is not None, self.shard_group_fn is not None

    def text(self) -> str:
        """Return the arguments as ranks compare them, without a limit that is on a device."""
        text = ""
        if self.is_replicated_fn is not None or self.shard_group_fn is not None:
            text = layout_text(self.is_replicated_fn, self.shard_group_fn)
        if self.max_norm is None and self.skip_norm_above is None:
            text += "\nall_or_none=True"
        if self.max_norm is not None:
            text += f"\nmax_norm={self.max_norm}"
        if isinstance(self.skip_norm_above, Tensor):
            text += "\nskip_norm_above=a tensor"
        elif self.skip_norm_above is not None:
            text += f"\nskip_norm_above={self.skip_norm_above}"
        return text

    def decide(self, norm_sq: float | Tensor) -> StepDecision:
        """Return the decision that follows from the squared norm, equal on all ranks."""
        if isinstance(norm_sq, Tensor):
            return self._decide_on_device(norm_sq)
        norm = math.sqrt(norm_sq) if norm_sq >= 0.0 else math.nan
        is_finite = math.isfinite(norm)
        limit = math.inf if self.skip_norm_above is None else float(self.skip_norm_above)
        is_above_limit = is_finite and norm > limit
        clip_coef = 1.0
        if self.max_norm is not None and is_finite and not is_above_limit:
            clip_coef = min(1.0, self.max_norm / (norm + _EPSILON))
        return StepDecision(
            found_inf=not is_finite,
            above_limit=is_above_limit,
            clip_coef=clip_coef,
            total_norm=norm,
            norm_limit=limit,
        )

    def _decide_on_device(self, norm_sq: Tensor) -> StepDecision:
        norm = norm_sq.sqrt()
        is_finite = norm.isfinite()
        clip_coef = torch.ones_like(norm)
        if self.max_norm is not None:
            ratio = (self.max_norm / (norm + _EPSILON)).clamp_(max=1.0)
            clip_coef = torch.where(is_finite, ratio, 1.0)
        above_limit: bool | Tensor = False
        limit: float | Tensor = math.inf
        if self.skip_norm_above is not None:
            limit = self.skip_norm_above
            if isinstance(limit, Tensor):
                limit = device_utils.to_device(limit, norm.device)
            is_above_limit = (norm > limit).logical_and_(is_finite)
            clip_coef = torch.where(is_above_limit, 1.0, clip_coef)
            above_limit = is_above_limit.float()
        found_inf = is_finite.logical_not().float()
        return StepDecision(
            found_inf=found_inf,
            above_limit=above_limit,
            clip_coef=clip_coef,
            total_norm=norm.float(),
            norm_limit=limit,
        )


# -- gradients of a call ---------------------------------------------------------------------------


class GradShare(NamedTuple):
    """The gradients that one optimizer steps on this rank.

    Args:
        grads: The gradients, each with the parameter of the model.
        is_zero_sharded: Whether a wrapper gives each rank another share of the parameters.
    """

    grads: LocalGrads
    is_zero_sharded: bool = False


class TargetShare(NamedTuple):
    """Parameters of one optimizer, for a measurement of their gradients.

    The gradients are read later, because masters receive gradients when they are unscaled.

    Args:
        view: The view of the optimizer; None for parameters without an optimizer.
        pairs: Parameters of the model with the tensors that are stepped; None for all parameters.
    """

    view: OptimizerView | None
    pairs: Sequence[tuple[Tensor, Tensor]] | None = None

    def local_grads(self) -> GradShare:
        """Return the gradients as they are now."""
        is_zero_sharded = self.view is not None and self.view.is_zero_sharded
        if self.view is not None and self.pairs is None:
            return GradShare(self.view.measured_grads(), is_zero_sharded)
        pairs = [pair for pair in self.pairs or () if pair[1].grad is not None]
        grads = local_grads(stepped for _, stepped in pairs)
        model_params = [param for param, _ in pairs]
        grads = LocalGrads(model_params, grads.grads, grads.values, grads.are_plain)
        return GradShare(grads, is_zero_sharded)


class ClipTargets(NamedTuple):
    """The gradients that a call clips.

    Args:
        optimizers: The optimizers that own the gradients.
        shares: For each optimizer the parameters to measure.
        clipped: The parameters to clip: the measured ones, and parameters that other ranks step.
    """

    optimizers: list[Any]
    shares: list[TargetShare]
    clipped: list[Tensor]

    def local_grads(self) -> list[GradShare]:
        """Return the gradients that are measured, as they are now."""
        return [share.local_grads() for share in self.shares]

    def multiply_grads_(self, factor: Tensor) -> None:
        """Multiply the gradients of ``clipped`` in place."""
        if len(self.shares) == 1:
            share = self.shares[0]
            if share.view is not None and share.pairs is None:
                share.view.multiply_grads_(factor)
                return
        multiply_(local_grads(self.clipped).values, factor)


def is_optimizer(target: Any) -> bool:
    """Return whether ``target`` is an optimizer, perhaps wrapped, and no parameters."""
    return not isinstance(target, Tensor) and hasattr(unwrap_optimizer(target), "param_groups")


def select_targets(
    target: Any, optimizers: Iterable[Any], is_scaled: bool, view: OptimizerView | None = None
) -> ClipTargets:
    """Return the gradients that a clip of an optimizer, or of parameters, is about.

    Args:
        target: An optimizer or parameters.
        optimizers: The optimizers to which parameters may belong.
        is_scaled: Whether gradients of an unknown optimizer may be scaled.
        view: The view of ``target`` if that is an optimizer and the caller has its view.

    Raises:
        TypeError: ``target`` is neither.
        CallOrderError: Gradients may be scaled, and belong to no optimizer of ``optimizers``.
        GradientError: FSDP1 has gathered the parameters, which have no gradients then.
    """
    if is_optimizer(target):
        view = view_of(target) if view is None else view
        clipped = {id(param): param for param in view.model_params()}
        clipped |= {id(param): param for pair in view.param_pairs() for param in pair}
        return ClipTargets([target], [TargetShare(view)], list(clipped.values()))
    return _select_params(_check_params(target), list(optimizers), is_scaled)


def _select_params(params: list[Tensor], optimizers: list[Any], is_scaled: bool) -> ClipTargets:
    clipped = {id(param): param for param in params}
    requested = frozenset(clipped)
    without_owner = {key for key, param in clipped.items() if param.grad is not None}
    targets = ClipTargets([], [], [])
    for optimizer in optimizers:
        view = view_of(optimizer)
        pairs = view.param_pairs()
        owned = {id(param) for param in itertools.chain(view.model_params(), *pairs)}
        if requested.isdisjoint(owned):
            continue
        without_owner -= owned
        # A parameter of the model and its master both stand for the pair.
        pairs = [pair for pair in pairs if not requested.isdisjoint(map(id, pair))]
        clipped |= {id(stepped): stepped for _, stepped in pairs}
        targets.optimizers.append(optimizer)
        targets.shares.append(TargetShare(view, pairs))
    if params and all(param.grad is None for param in params):
        _check_not_summoned(params, optimizers)
    if without_owner and is_scaled:
        raise CallOrderError(
            f"{len(without_owner)} of {len(requested)} parameters have gradients and belong to no "
            "optimizer that this scaler has seen. The gradients may still be scaled. Pass the "
            "optimizer to clip_grad_norm_, or call register_optimizers(optimizer) first."
        )
    if without_owner:
        # The order is that of the arguments, because a norm of DTensors may be a collective.
        pairs = [(param, param) for key, param in clipped.items() if key in without_owner]
        targets.shares.append(TargetShare(None, pairs))
    targets.clipped.extend(clipped.values())
    return targets


def _check_not_summoned(params: Sequence[Tensor], optimizers: Iterable[Any]) -> None:
    """Refuse parameters of FSDP1's ``summon_full_params``, which have no gradients.

    Args:
        params: Parameters without gradients.
        optimizers: The optimizers that a guard or scaler has seen.

    Raises:
        GradientError: An optimizer holds flat parameters, which have the gradients.
    """
    owned = [param for optimizer in optimizers for param in view_of(optimizer).model_params()]
    if not set(map(id, owned)).isdisjoint(map(id, params)):
        return
    if any(getattr(param, "_is_flat_param", False) and param.grad is not None for param in owned):
        raise GradientError(
            f"None of the {len(params)} parameters has a gradient, and the optimizer holds flat "
            "parameters of FSDP1 that have some. Call clip_grad_norm_ outside of "
            "summon_full_params(), or pass the optimizer."
        )


def select_unscaled(target: Any) -> ClipTargets:
    """Return the gradients that a clip is about, of an optimizer or parameters without a scaler."""
    if is_optimizer(target):
        view = view_of(target)
        pairs = view.param_pairs()
        if any(param is not stepped and param.grad is not None for param, stepped in pairs):
            # Gradients of masters, from which `optimizer.step` takes them then.
            view.unscale(found_inf_tensor(True, "cpu"), found_inf_tensor(False, "cpu"), True)
    return select_targets(target, [], is_scaled=False)


def select_unscaled_optimizers(optimizers: Iterable[Any]) -> ClipTargets:
    """Return the gradients of several optimizers without a scaler.

    A tensor that two optimizers step is measured once.
    """
    targets = ClipTargets([], [], [])
    measured: set[int] = set()
    clipped: dict[int, Tensor] = {}
    for optimizer in optimizers:
        view = view_of(optimizer)
        selected = select_unscaled(optimizer)
        pairs = [pair for pair in view.param_pairs() if id(pair[1]) not in measured]
        measured.update(id(stepped) for _, stepped in pairs)
        targets.optimizers.append(optimizer)
        targets.shares.append(TargetShare(view, pairs))
        clipped |= {id(tensor): tensor for tensor in selected.clipped}
    targets.clipped.extend(clipped.values())
    return targets


def _check_params(target: Any) -> list[Tensor]:
    """Return the parameters to clip: the shards of parameters that are gathered.

    Raises:
        TypeError: Something in ``target`` is no tensor.
        GradientError: A tensor is the result of an operation.
    """
    params = [target] if isinstance(target, Tensor) else list(target)
    for param in params:
        if not isinstance(param, Tensor):
            raise TypeError(
                "clip_grad_norm_ takes an optimizer or Tensors, such as model.parameters(), not "
                f"{type(param).__name__}s"
            )
    for param in params:
        if not (param.is_leaf or param.retains_grad):
            raise GradientError(
                f"A tensor of shape {tuple(param.shape)} is the result of an operation, so it "
                "has no gradient. FSDP1 puts such tensors in the place of parameters under "
                "SHARD_GRAD_OP, in a forward pass that no backward pass follows. Call "
                "clip_grad_norm_ before such a forward pass, or run it under torch.no_grad()."
            )
    return sharded_params(params)


# -- the norm on this rank -------------------------------------------------------------------------


class LocalNorm(NamedTuple):
    """The powers that this rank's gradients add to the power of the norm.

    Each is a number on the host, else 0-d float64 on the device of the loss scale.

    Args:
        shards: The power of gradients that are a part of the model.
        replicas: The power of gradients that each rank has a copy of.
        ambiguous: The power of gradients that count as a part of the model, although several ranks
            may have a copy.
        num_grads: The number of gradients.
    """

    shards: float | Tensor = 0.0
    replicas: float | Tensor = 0.0
    ambiguous: float | Tensor = 0.0
    num_grads: int = 0

    def share(self, ranks: int) -> float | Tensor:
        """Return the summand of this rank in the power of the norm over ``ranks`` ranks."""
        total: float | Tensor = self.replicas if ranks == 1 else self.replicas / ranks
        for power in (self.shards, self.ambiguous):
            # A kernel that adds 0.0 to a tensor takes longer than this check.
            if isinstance(power, Tensor) or power:
                has_total = isinstance(total, Tensor) or total
                total = total + power if has_total else power
        return total

    def unscaled(self, scale: Tensor) -> LocalNorm:
        """Return the norm of order 2 of gradients that were multiplied by ``scale``."""
        is_on_device = any(isinstance(power, Tensor) for power in self[:3])
        factor = scale.double() if is_on_device else scale.item()
        squared = factor * factor
        powers: list[float | Tensor] = []
        for power in self[:3]:
            powers.append(power / squared if isinstance(power, Tensor) or power else power)
        return LocalNorm(powers[0], powers[1], powers[2], self.num_grads)

    def plus(self, other: LocalNorm) -> LocalNorm:
        """Return the norm of both sets of gradients, which is not of order inf."""
        powers: list[float | Tensor] = []
        for power, other_power in zip(self[:3], other[:3], strict=True):
            if not isinstance(power, Tensor) and not power:
                powers.append(other_power)
            elif not isinstance(other_power, Tensor) and not other_power:
                powers.append(power)
            else:
                powers.append(power + other_power)
        return LocalNorm(powers[0], powers[1], powers[2], self.num_grads + other.num_grads)

    def stack(self, device: torch.device) -> Tensor:
        """Return the three powers as float64 of shape (3,), which ranks gather."""
        row = torch.zeros(3, dtype=torch.float64, device=device)
        for index, power in enumerate(self[:3]):
            row[index] = power
        return row


@no_grad_fast
def local_norm(
    shares: Iterable[GradShare],
    norm_type: float,
    device: torch.device,
    ranks: int = 1,
    is_replicated_fn: LayoutFn | None = None,
    shard_group_fn: LayoutFn | None = None,
) -> LocalNorm:
    """Return the powers that this rank's gradients add to the power of a norm.

    Args:
        shares: The gradients that are measured.
        norm_type: The order of the norm; > 0.
        device: The device of the result.
        ranks: The number of ranks that hold the model.
        is_replicated_fn: Returns whether every rank holds the same values of a parameter.
        shard_group_fn: Returns over which ranks a parameter is sharded.

    Raises:
        ConfigError: A parameter is declared both.
    """
    values: dict[tuple[int, float], list[Tensor]] = {}
    placement_weights: dict[Any, tuple[int, float, bool]] = {}
    num_grads = 0
    for share in shares:
        num_grads += len(share.grads.params)
        has_layout_fn = is_replicated_fn is not None or shard_group_fn is not None
        if not has_layout_fn and share.grads.are_plain and not _has_layout_attr(share.grads):
            kind = _SHARD if share.is_zero_sharded else _REPLICA
            values.setdefault((kind, 1.0), []).extend(share.grads.values)
            continue
        for param, grad, value in zip(*share.grads[:3], strict=True):
            kind, weight, is_summand = _norm_weight(
                param,
                grad,
                share.is_zero_sharded,
                ranks,
                is_replicated_fn,
                shard_group_fn,
                placement_weights,
            )
            if is_summand or grad.is_sparse:
                value = reduced_local_grad(grad)
            values.setdefault((kind, weight), []).append(value)
    if not values:
        return LocalNorm(replicas=norm_power([], norm_type, device))
    powers: list[float | Tensor] = [0.0, 0.0, 0.0]
    is_inf = math.isinf(norm_type)
    has_power = [False, False, False]
    for (kind, weight), tensors in values.items():
        power = norm_power(tensors, norm_type, device)
        if is_inf:
            weight = float(weight > 0)
        power = power if weight == 1.0 else power * weight
        if has_power[kind]:
            power = combine_powers([powers[kind], power], norm_type)  # type: ignore[arg-type]
        powers[kind], has_power[kind] = power, True
    return LocalNorm(powers[0], powers[1], powers[2], num_grads)


def _has_layout_attr(grads: LocalGrads) -> bool:
    """Return whether a parameter has an attribute of `_LAYOUT_ATTRS`; the loops run in C."""
    attributes = map(_attributes, grads.params)
    return not _LAYOUT_ATTRS.isdisjoint(itertools.chain.from_iterable(attributes))


def _norm_weight(
    param: Tensor,
    grad: Any,
    is_zero_sharded: bool,
    ranks: int,
    is_replicated_fn: LayoutFn | None,
    shard_group_fn: LayoutFn | None,
    placement_weights: dict[Any, tuple[int, float, bool]],
) -> tuple[int, float, bool]:
    """Return how a gradient counts, the weight of its power, and whether it is a summand.

    Args:
        param: The parameter of the model.
        grad: Its gradient, or that of its master. A DTensor gradient may be whole on ranks that
            hold a shard of the parameter, as after a row-wise embedding.
        is_zero_sharded: Whether each rank steps another share.
        ranks: The number of ranks that hold the model.
        is_replicated_fn: As in `local_norm`.
        shard_group_fn: As in `local_norm`.
        placement_weights: Results for the placements that this call has met.
    """
    kind, weight, is_summand = _REPLICA, 1.0, False
    placements = getattr(grad, "placements", None)
    if placements is not None:
        key = id(grad.device_mesh), placements
        if key not in placement_weights:
            placement_weights[key] = _placement_weight(grad, ranks)
        kind, weight, is_summand = placement_weights[key]
    is_replicated = is_replicated_fn is not None and bool(is_replicated_fn(param))
    shard_group = None if shard_group_fn is None else shard_group_fn(param)
    if is_replicated and shard_group:
        raise ConfigError(
            f"A parameter of shape {tuple(param.shape)} is declared both is_replicated_fn= and "
            "shard_group_fn=. Declare it replicated if every rank has the same values, else "
            "sharded."
        )
    if is_replicated:
        return _SHARD, 1.0 / ranks, is_summand
    if getattr(param, "shared", None) is True:
        return _SHARD, 0.0, is_summand
    if shard_group:
        if isinstance(shard_group, (ProcessGroup, DeviceMesh)):
            weight *= shard_group.size() / ranks
        return _SHARD, weight, is_summand
    if kind != _REPLICA:
        return kind, weight, is_summand
    if is_zero_sharded or getattr(param, "tensor_model_parallel", None) is True:
        return _SHARD, 1.0, is_summand
    num_shards = _annotated_shards(param)
    if num_shards > 1:
        return _SHARD, num_shards / ranks, is_summand
    if getattr(param, "_fsdp_flattened", False):
        return (_SHARD if ranks == 1 else _AMBIGUOUS), 1.0, is_summand
    return _REPLICA, 1.0, is_summand


def _annotated_shards(param: Tensor) -> int:
    """Return the number of different parts of a parameter by its annotation of spmd_types.

    An annotation has a type for each axis of a mesh. A parameter of the type V (varying) has
    another part on each rank of the axis, and with another type it has copies.
    """
    spmd_types = sys.modules.get("spmd_types")
    if spmd_types is None or _SPMD_ATTR not in vars(param):
        return 1
    num_shards = 1
    for axis, spmd_type in spmd_types.get_local_type(param).items():
        if spmd_type is spmd_types.V:
            num_shards *= axis.size()
    return num_shards


def _placement_weight(grad: Any, ranks: int) -> tuple[int, float, bool]:
    """Return how a DTensor gradient counts: some ranks of its mesh hold the same values."""
    mesh = grad.device_mesh
    copies = 1
    is_summand = False
    for mesh_dim, placement in enumerate(grad.placements):
        is_summand = is_summand or placement.is_partial()
        if placement.is_replicate() or placement.is_partial():
            copies *= mesh.size(mesh_dim)
    kind = _SHARD if mesh.size() >= ranks else _AMBIGUOUS
    return kind, 1.0 / copies, is_summand


# -- the norm of all ranks -------------------------------------------------------------------------


def total_norm(power: float | Tensor, norm_type: float, device: torch.device) -> Tensor:
    """Return the norm as 0-d float32 on ``device``, from the sum of `LocalNorm.share`."""
    if not isinstance(power, Tensor):
        power = torch.full((), power, dtype=torch.float64, device=device)
    return power.pow(1.0 / norm_type).float()


def total_norm_of_ranks(powers_by_rank: Tensor, norm_type: float) -> Tensor:
    """Return the norm as 0-d float32, from the `LocalNorm.stack` of every rank.

    Args:
        powers_by_rank: float64 of shape (ranks, 3).
        norm_type: The order of the norm.
    """
    if math.isinf(norm_type):
        return powers_by_rank.max().float()
    shards, replicas, ambiguous = powers_by_rank.unbind(1)
    power = shards.sum() + ambiguous.sum() + replicas.mean()
    return power.pow(1.0 / norm_type).float()


def replica_mismatch(powers_by_rank: Sequence[Sequence[float]], norm_type: float) -> str | None:
    """Return an error message if the ranks' powers contradict the layout that was assumed.

    Args:
        powers_by_rank: The `LocalNorm.stack` of every rank, as the host read it. Powers that are
            not finite contradict nothing.
        norm_type: The order of the norm.
    """
    if not all(math.isfinite(power) for powers in powers_by_rank for power in powers):
        return None
    exponent = 1.0 if math.isinf(norm_type) else 1.0 / norm_type
    replica_norms = [powers[_REPLICA] ** exponent for powers in powers_by_rank]
    least, most = min(replica_norms), max(replica_norms)
    if most - least > _REPLICA_RTOL * most:
        return (
            f"The norms of the gradients differ between ranks, from {least:g} to {most:g}. Plain "
            "tensors count as replicas, whose gradients are equal on all ranks. If each rank holds "
            "other parameters (experts, stages), pass shard_group_fn=function, which returns True "
            "for such a parameter, or the group over which it is cut. If the gradients should be "
            "equal, some were not reduced: the parameter was frozen when the model was wrapped, or "
            "the backward pass went around the wrapper. If only rounding makes them differ, pass "
            "is_replicated_fn=lambda p: True."
        )
    ambiguous = [powers[_AMBIGUOUS] for powers in powers_by_rank]
    if min(ambiguous) > 0 and all(_has_equal(power, ambiguous) for power in ambiguous):
        return (
            "Several ranks have gradients of the same norm, and the norm of the model would count "
            "them several times. FSDP shards, and DTensors on a part of the ranks, count as parts "
            "of one model. They may be replicas: parameters outside the plan of tensor parallel, "
            "shards of HYBRID_SHARD or NO_SHARD, or a mesh beside data parallel. Then pass the "
            "group or mesh over which a parameter is cut, as in shard_group_fn=lambda p: "
            "getattr(p, 'device_mesh', None), or pass is_replicated_fn=lambda p: True."
        )
    return None


def _has_equal(power: float, powers: Sequence[float]) -> bool:
    """Return whether another entry of ``powers`` equals ``power``, which is one of them."""
    equal = [p for p in powers if abs(power - p) <= _REPLICA_RTOL * power]
    return len(equal) > 1


def clip_grads_with_norm_(targets: ClipTargets, norm: Tensor, max_norm: float) -> None:
    """Multiply gradients so that ``norm`` becomes at most ``max_norm``, as torch's function does.

    If the host knows that nothing is to be clipped, nothing is multiplied. A norm that is not
    finite changes nothing: the step will be skipped, and a report can read the gradients.

    Args:
        targets: The gradients.
        norm: 0-d float32.
        max_norm: The largest norm after the clip; >= 0.
    """
    clip_coef = (max_norm / (norm + _EPSILON)).clamp_(max=1.0)
    clip_coef = torch.where(norm.isfinite(), clip_coef, 1.0)
    if not norm.is_cpu or clip_coef.item() < 1.0:
        targets.multiply_grads_(clip_coef)
