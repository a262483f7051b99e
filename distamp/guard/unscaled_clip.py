"""Clip gradients that nobody scales, without a guard or scaler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from distamp.clipping import (
    Chosen,
    Declared,
    choose_unscaled,
    clip_,
    differing,
    local_sums,
    positive,
    total,
)
from distamp.errors import ReplicaMismatchError
from distamp.gradients import local_of
from distamp.groups import GroupLike, gather_sums
from distamp.guard.by_norm import declared_text
from distamp.guard.ranks import Problem, Ranks

__all__ = ["clip_grad_norm_", "measure_unscaled"]


def clip_grad_norm_(
    parameters: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: GroupLike = None,
    is_replicated_fn: Declared | None = None,
    shard_group_fn: Declared | None = None,
) -> Tensor:
    """Clip gradients that nobody scales by the norm of the whole model, in any layout.

    Collective: every rank of `process_group` must call this.

    Like ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, with the same arguments. Each
    rank gives what it holds: a DTensor counts by its placements, FSDP1's shards, the shares of
    ZeroRedundancyOptimizer and OSS and Megatron's ``tensor_model_parallel`` are parts, and any
    other tensor is a replica, unless it is declared. It reads the ranks' norms on the host, to see
    that replicas are alike. The methods of `distamp.DistGradScaler` do not wait for that on a
    device, and unscale first.

    It sends two messages, and it belongs to no guard or scaler. So the ranks compare the call and
    its arguments, and it neither reads nor changes a guard's counters.

    Args:
        parameters: An optimizer, or parameters with gradients of any shapes.
        max_norm: The largest norm after clipping; >= 0.
        norm_type: The order of the norm; > 0, inf for the largest magnitude.
        error_if_nonfinite: Raise where the norm is inf or NaN, on every rank, as torch does. Else
            such gradients stay as they are.
        foreach: Without effect; for calls written for torch's function.
        process_group: The ranks that have a part of the model; None for the default group.
        is_replicated_fn: Takes a parameter; returns whether every rank has the same values, even if
            rounding makes their gradients differ.
        shard_group_fn: Takes a parameter; returns whether every rank has a different part, or the
            group or mesh over which it is cut.

    Returns:
        The norm before clipping: 0-d float32, the same on every rank.

    Raises:
        ConfigError: A number is out of range, or a parameter is declared both, on this rank or
            another.
        TypeError: ``parameters`` has something else than Tensors, on this rank or another.
        ReplicaMismatchError: A tensor that counts as a replica differs between ranks.
        RankMismatchError: A rank makes another call, or has other arguments.
        RuntimeError: The norm is not finite, under ``error_if_nonfinite``.
    """

    def choose_checked() -> Chosen:
        positive("max_norm", max_norm, or_zero=True)
        return choose_unscaled(parameters)

    chosen, norm = measure_unscaled(
        "distamp.clip_grad_norm_()",
        f"max_norm={_number_text(max_norm)}\nnorm_type={_number_text(norm_type)}\n"
        f"error_if_nonfinite={bool(error_if_nonfinite)}",
        choose_checked,
        norm_type,
        process_group,
        is_replicated_fn,
        shard_group_fn,
    )
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and leave the gradients as they are, "
            "set `error_if_nonfinite=False`"
        )
    clip_(chosen.multiplied, norm, float(max_norm))
    return norm


def _number_text(value: object) -> str:
    """Return the same text for equal numbers on every rank: 1, 1.0 or a tensor on any device."""
    try:
        return str(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return repr(value)


def measure_unscaled(
    call: str,
    arguments: str,
    choose_gradients: Callable[[], Chosen],
    norm_type: float,
    process_group: GroupLike,
    is_replicated_fn: Declared | None,
    shard_group_fn: Declared | None,
) -> tuple[Chosen, Tensor]:
    """Return the chosen gradients and their norm, 0-d float32 and the same on every rank.

    Collective: every rank of `process_group` must call this.

    Args:
        call: The call, which the ranks compare.
        arguments: Its arguments, which they compare too, each as a line ``name=value``.
        choose_gradients: Called once; every rank raises the error that it raises on one of them.
        norm_type: As in `clip_grad_norm_`, unchecked.
        process_group: As in `clip_grad_norm_`.
        is_replicated_fn: As in `clip_grad_norm_`.
        shard_group_fn: As in `clip_grad_norm_`.
    """
    ranks = Ranks(process_group)
    size = 1 if ranks.process_group is None else ranks.size
    chosen = Chosen([], [], [])
    device = torch.device("cpu")
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    problem: Problem | None = None
    try:
        norm_type = positive("norm_type", norm_type)
        chosen = choose_gradients()
        if chosen.multiplied:
            device = local_of(chosen.multiplied[0]).device
        sums = local_sums(chosen.shares, norm_type, device, size, is_replicated_fn, shard_group_fn)
    except Exception as raised:
        if size == 1:
            raise
        problem = Problem(raised, looked=True)
    arguments += declared_text(is_replicated_fn, shard_group_fn)
    group = ranks.announce(call, arguments, device, problem)
    everyone = sums.view(1, 3)
    if group is not None:
        # The gather is not the message that all calls send, so it comes after that one.
        everyone = gather_sums(group, sums)
        why = differing(everyone.tolist(), norm_type)
        if why is not None:
            raise ReplicaMismatchError(why)
    return chosen, total(everyone, norm_type)
