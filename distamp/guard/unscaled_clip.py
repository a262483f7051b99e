"""The function `distamp.clip_grad_norm_`: a clip without a guard or scaler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from distamp.clip_grad import (
    ClipTargets,
    LayoutFn,
    check_positive,
    clip_grads_with_norm_,
    layout_text,
    local_norm,
    replica_mismatch,
    select_unscaled,
    total_norm_of_ranks,
)
from distamp.errors import ReplicaMismatchError
from distamp.grads import to_local
from distamp.guard.rank_sync import RankSync
from distamp.process_group import GroupLike, all_gather_rows

__all__ = ["clip_grad_norm_", "measure_unscaled"]


def clip_grad_norm_(
    parameters: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: GroupLike = None,
    is_replicated_fn: LayoutFn | None = None,
    shard_group_fn: LayoutFn | None = None,
) -> Tensor:
    """Clip gradients that nobody scales by the norm of the whole model, in any layout.

    Collective: every rank of `process_group` must call this.

    Like ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, with the same arguments. Each
    rank passes its part: a DTensor counts by its placements, FSDP1's shards, the shares of
    ZeroRedundancyOptimizer and OSS and Megatron's ``tensor_model_parallel`` are parts, a tensor
    that spmd_types annotates is a part over the axes on which it varies, and any other tensor is a
    replica, unless it is declared. It reads the ranks' norms on the host, to see
    that replicas are equal. The methods of `distamp.DistGradScaler` do not wait for that on a
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

    def select_checked() -> ClipTargets:
        check_positive("max_norm", max_norm, or_zero=True)
        return select_unscaled(parameters)

    targets, norm = measure_unscaled(
        "distamp.clip_grad_norm_()",
        f"max_norm={_number_text(max_norm)}\nnorm_type={_number_text(norm_type)}\n"
        f"error_if_nonfinite={bool(error_if_nonfinite)}",
        select_checked,
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
    clip_grads_with_norm_(targets, norm, float(max_norm))
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
    select_targets: Callable[[], ClipTargets],
    norm_type: float,
    process_group: GroupLike,
    is_replicated_fn: LayoutFn | None,
    shard_group_fn: LayoutFn | None,
) -> tuple[ClipTargets, Tensor]:
    """Return the gradients of a clip and their norm, 0-d float32 and the same on every rank.

    Collective: every rank of `process_group` must call this.

    Args:
        call: The call, which the ranks compare.
        arguments: The arguments of the call, which the ranks compare too, each as a line
            ``name=value``.
        select_targets: Returns the gradients. Every rank raises the error that it raises on one
            rank.
        norm_type: As in `clip_grad_norm_`, unchecked.
        process_group: As in `clip_grad_norm_`.
        is_replicated_fn: As in `clip_grad_norm_`.
        shard_group_fn: As in `clip_grad_norm_`.
    """
    sync = RankSync(process_group)
    ranks = 1 if sync.process_group is None else sync.size
    targets = ClipTargets([], [], [])
    device = torch.device("cpu")
    powers = torch.zeros(3, dtype=torch.float64, device=device)
    error: Exception | None = None
    try:
        norm_type = check_positive("norm_type", norm_type)
        targets = select_targets()
        if targets.clipped:
            device = to_local(targets.clipped[0]).device
        shares = targets.local_grads()
        norm = local_norm(shares, norm_type, device, ranks, is_replicated_fn, shard_group_fn)
        powers = norm.stack(device)
    except Exception as raised:
        if ranks == 1:
            raise
        error = raised
    arguments += layout_text(is_replicated_fn, shard_group_fn)
    group = sync.announce(call, arguments, device, error)
    if group is None:
        return targets, total_norm_of_ranks(powers.view(1, 3), norm_type)
    # The gather is not the message that all calls send, so it comes after that message.
    powers_by_rank = all_gather_rows(group, powers)
    mismatch = replica_mismatch(powers_by_rank.tolist(), norm_type)
    if mismatch is not None:
        raise ReplicaMismatchError(mismatch)
    return targets, total_norm_of_ranks(powers_by_rank, norm_type)
