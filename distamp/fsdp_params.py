"""The shards of parameters that FSDP2 has gathered."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from distamp.errors import GradientError

__all__ = ["sharded_params"]

# Only this file reads these private names of torch. torch 2.11 to 2.15 have them, but a state of
# torch 2.11 has one parameter group, and later versions have a list. If torch renames one of them,
# `sharded_params` raises, because a gathered parameter has no gradient.
_REGISTRY_MODULE = "torch.distributed._composable_state"
_REGISTRY = "_module_state_mapping"
_STATE_CLASS = "FSDPState"
_PARAM_GROUPS = "_fsdp_param_groups"
_PARAM_GROUP_OF_TORCH_2_11 = "_fsdp_param_group"
_GATHERED = ("_unsharded_param", "_sharded_post_forward_param")


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
    shards = {id(gathered): shard for gathered, shard in _gathered_params()}
    sharded: list[Tensor] = []
    for param in params:
        if _may_be_gathered(param):
            param = shards.get(id(param), param)
        sharded.append(param)
    return sharded


def _may_be_gathered(param: Tensor) -> bool:
    return param.requires_grad and param.grad is None


def _gathered_params() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter that any FSDP2 module of this process has gathered, and its shard."""
    composable_state = sys.modules.get(_REGISTRY_MODULE)
    if composable_state is None:  # FSDP2 was never imported
        return
    state_refs = list(_torch_attribute(composable_state, _REGISTRY).values())
    for state_ref in state_refs:
        for group in _param_groups(state_ref()):
            for fsdp_param in _torch_attribute(group, "fsdp_params"):
                shard = _torch_attribute(fsdp_param, "sharded_param")
                for name in _GATHERED:
                    gathered = _gathered_param(fsdp_param, name)
                    if gathered is not None:
                        yield gathered, shard


def _param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of a state; none if another composable API owns the state."""
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
            f"torch {torch.__version__} has no {name} in {holder!r:.80}. distamp needs it to find "
            "the shards of parameters that FSDP2 has gathered. Pass the optimizer instead of "
            "model.parameters(), or run no forward pass between the backward pass and this call."
        ) from None
