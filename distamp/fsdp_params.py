"""The shards of parameters that FSDP2 has gathered, and reductions that are not finished."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from distamp.errors import CallOrderError, GradientError
from distamp.fsdp_unit import FSDPUnit

__all__ = ["check_reduction_finished", "sharded_params"]


def check_reduction_finished(params: Iterable[Tensor]) -> None:
    """Refuse parameters of FSDP2 with gradients from an unfinished reduction.

    Since torch 2.15 a user may finalize backward passes. Before ``finalize_backward`` a rank has
    only local gradients of the whole parameters, or another stream is still reducing them.

    Args:
        params: Sharded parameters, or parameters of other layouts.

    Raises:
        CallOrderError: The backward pass of a parameter was not finalized.
    """
    unreduced: set[int] = set()
    for unit in FSDPUnit.units_awaiting_finalization():
        unreduced.update(map(id, unit.shards()))
    if not unreduced:
        return
    count = sum(id(param) in unreduced for param in params)
    if count:
        raise CallOrderError(
            f"FSDP2 has not finished the reduction of gradients of {count} parameters, because the "
            "model finalizes backward passes manually (set_manual_backward_finalization). Call "
            "finalize_backward() of the root module after the last backward pass and before the "
            "gradients are unscaled, clipped or stepped. After finalize_backward(async_op=True), "
            "also call wait() on its result."
        )


def sharded_params(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters, with the shard of each parameter that FSDP2 has gathered.

    Between a forward pass and its backward pass, ``model.parameters()`` of a model under FSDP2
    yields gathered parameters. If ``reshard_after_forward`` is a number, these are shards over a
    smaller mesh. The optimizer has the sharded parameters, and these have the gradients. A
    parameter that has a gradient is returned unchanged.

    Args:
        params: Parameters of any layout.

    Raises:
        GradientError: This torch does not have the private names that lead to the shards.
    """
    params = list(params)
    if not any(map(_may_be_gathered, params)):
        return params
    shards: dict[int, Tensor] = {}
    try:
        for unit in FSDPUnit.all_units():
            for gathered, shard in unit.gathered_params():
                shards[id(gathered)] = shard
    except RuntimeError as error:
        # A gathered parameter has no gradient, so its norm would be 0.
        raise GradientError(
            f"{error} distamp needs the shards of parameters that FSDP2 has gathered. Pass the "
            "optimizer instead of model.parameters(), or run no forward pass between the backward "
            "pass and this call."
        ) from None
    sharded: list[Tensor] = []
    for param in params:
        if _may_be_gathered(param):
            param = shards.get(id(param), param)
        sharded.append(param)
    return sharded


def _may_be_gathered(param: Tensor) -> bool:
    return param.requires_grad and param.grad is None
