"""The shards of parameters that FSDP2 has gathered."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from distamp.errors import GradientError
from distamp.fsdp_unit import FSDPUnit

__all__ = ["sharded_params"]


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
