"""The shards that belong to parameters which FSDP2 has gathered."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from distamp.errors import GradientError

__all__ = ["sharded_params"]

# Private names of torch stand in this file alone. torch 2.11 to 2.15 have them, but torch 2.11 has
# one parameter group in a state, and later versions have a list. If torch renames one of them,
# `sharded_params` raises, because a gathered parameter has no gradient to be looked at.
_REGISTRY_MODULE = "torch.distributed._composable_state"
_REGISTRY = "_module_state_mapping"
_STATE_CLASS = "FSDPState"
_PARAM_GROUPS = "_fsdp_param_groups"
_PARAM_GROUP_OF_TORCH_2_11 = "_fsdp_param_group"
_GATHERED = ("_unsharded_param", "_sharded_post_forward_param")


def sharded_params(params: Iterable[Tensor]) -> list[Tensor]:
    """Return parameters with the shards in the place of those that FSDP2 has gathered.

    Between a forward pass and its backward pass ``model.parameters()`` of a model under FSDP2
    yields gathered parameters: whole ones, or shards over a smaller mesh where
    ``reshard_after_forward`` is a number. The optimizer holds the shards, and so do the gradients.
    A parameter that has a gradient is returned unchanged.

    Args:
        params: Parameters of any layout.

    Raises:
        GradientError: This torch does not have the names by which the shards are found.
    """
    params = list(params)
    if not any(map(_may_be_gathered, params)):
        return params
    shards = {id(gathered): shard for gathered, shard in _gathered_params()}
    return [shards.get(id(param), param) if _may_be_gathered(param) else param for param in params]


def _may_be_gathered(param: Tensor) -> bool:
    return param.requires_grad and param.grad is None


def _gathered_params() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter that any FSDP2 module of this process has gathered, and its shard."""
    composable_state = sys.modules.get(_REGISTRY_MODULE)
    if composable_state is None:  # FSDP2 was never imported
        return
    for reference in list(_torch_attribute(composable_state, _REGISTRY).values()):
        for group in _param_groups(reference()):
            for fsdp_param in _torch_attribute(group, "fsdp_params"):
                shard = _torch_attribute(fsdp_param, "sharded_param")
                for name in _GATHERED:
                    gathered = _gathered_param(fsdp_param, name)
                    if gathered is not None:
                        yield gathered, shard


def _param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of one state; none of another composable API than FSDP2."""
    if all(base.__name__ != _STATE_CLASS for base in type(state).__mro__):
        return []
    if not hasattr(state, _PARAM_GROUPS):
        group = _torch_attribute(state, _PARAM_GROUP_OF_TORCH_2_11)
        return [] if group is None else [group]
    return list(getattr(state, _PARAM_GROUPS))


def _gathered_param(fsdp_param: Any, name: str) -> Tensor | None:
    """Return a gathered parameter, which exists only once torch has gathered it."""
    if name not in type(fsdp_param).__annotations__:
        return _torch_attribute(fsdp_param, name)  # type: ignore[no-any-return]
    return getattr(fsdp_param, name, None)


def _torch_attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name)
    except AttributeError:
        raise GradientError(
            f"torch {torch.__version__} has no {name} in {holder!r:.80}, by which distamp finds "
            "the shards of parameters that FSDP2 has gathered. Pass the optimizer instead of "
            "model.parameters(), or run no forward pass between the backward pass and this call."
        ) from None
