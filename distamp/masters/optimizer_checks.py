"""Checks that refuse an optimizer or a parameter that cannot have fp32 masters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from distamp.errors import ConfigError
from distamp.optim_utils import params_of, view_of, zero_local_optimizer

__all__ = [
    "check_no_other_param_refs",
    "check_not_flat_param",
    "check_not_zero_optimizer",
    "check_split_dtype",
    "check_state_dtype",
    "check_supported",
    "is_half",
]

_HALF_DTYPES = (torch.float16, torch.bfloat16)


def is_half(value: object) -> bool:
    """Return whether ``value`` is a float16 or bfloat16 tensor."""
    return isinstance(value, Tensor) and value.dtype in _HALF_DTYPES


def check_supported(optimizer: torch.optim.Optimizer, split: bool, allow_empty: bool) -> None:
    """Refuse an optimizer that cannot have masters, before anything changes it.

    Args:
        optimizer: Any object that a user passed.
        split: Whether its masters would be split.
        allow_empty: Whether the optimizer may have no half-precision parameter.

    Raises:
        TypeError: ``optimizer`` is no optimizer.
        ValueError: It has masters already, or no half-precision parameter.
        ConfigError: Masters cannot replace its parameters, or it was loaded too early.
    """
    optimizer_name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"MasterParameters needs a torch.optim.Optimizer, not {optimizer_name}. Create one "
            "MasterParameters for each optimizer."
        )
    if view_of(optimizer).has_masters:
        raise ValueError(
            f"This {optimizer_name} has master parameters already. masters_of(optimizer) returns "
            "them."
        )
    check_not_zero_optimizer(optimizer)
    check_no_other_param_refs(optimizer)
    params = params_of(optimizer)
    for param in params:
        check_not_flat_param(param)
    if split:
        check_split_dtype(optimizer_name, params)
    if not allow_empty and not any(map(is_half, params)):
        raise ValueError(
            f"{optimizer_name} has no float16 or bfloat16 parameter, so no parameter needs a "
            "master. First cast the model (model.half()), then wrap it (DDP), then create the "
            "optimizer over the wrapped model's parameters, and then MasterParameters(optimizer)."
        )
    for param, state in optimizer.state.items():
        check_state_dtype(optimizer_name, param, state)


def check_not_zero_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that steps a share of the parameters on each rank (ZeRO, OSS).

    Raises:
        ConfigError: ``optimizer`` does so.
    """
    if zero_local_optimizer(optimizer) is not None:
        optimizer_name = type(optimizer).__name__
        raise ConfigError(
            f"{optimizer_name} steps a share of the parameters on each rank, and sends the stepped "
            "tensors to the other ranks. With masters it would send these, instead of the model's "
            "parameters. Use fp16, which needs no masters, or fully_shard instead of "
            f"{optimizer_name}, over a model that was cast, or over a float32 model with its own "
            "MixedPrecisionPolicy."
        )


def check_no_other_param_refs(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that refers to its parameters outside of its groups too, as LBFGS does.

    Raises:
        ConfigError: ``optimizer`` does so.
    """
    optimizer_name = type(optimizer).__name__
    params = params_of(optimizer)
    param_ids = set(map(id, params))
    for attribute, value in vars(optimizer).items():
        if attribute in ("param_groups", "state"):
            continue
        leaf_ids = map(id, tree_leaves(value))
        if not param_ids.isdisjoint(leaf_ids):
            raise ConfigError(
                f"{optimizer_name} holds its parameters in {attribute!r} as well as in "
                "its groups. Masters cannot replace them there, so a step would not change the "
                "model. Use fp16 or bf16, which need no masters. For LBFGS use fp32, and its own "
                "step(closure)."
            )


def check_not_flat_param(param: Tensor) -> None:
    """Refuse a half-precision parameter that FSDP1 has flattened.

    Raises:
        ConfigError: ``param`` is flat.
    """
    type_name = type(param).__name__
    is_flat = type_name == "FlatParameter" or hasattr(param, "_fsdp_flattened")
    if is_flat and is_half(param):
        shape = tuple(param.shape)
        raise ConfigError(
            f"A parameter of shape {shape} is flat (FullyShardedDataParallel), so its "
            "storage changes between passes. Leave the model in float32 and pass "
            "mixed_precision=MixedPrecision(param_dtype=torch.float16), so that FSDP's float32 "
            "parameters are the masters. Or use fully_shard, whose parameters stay in place."
        )


def check_split_dtype(optimizer_name: str, params: Iterable[Tensor]) -> None:
    """Refuse float16 parameters, because their masters cannot be split.

    Raises:
        ConfigError: A parameter is float16.
    """
    for param in params:
        if param.dtype is torch.float16:
            raise ConfigError(
                f"{optimizer_name} has float16 parameters, which cannot have split masters. A "
                "float32 value consists of a bfloat16 number and 16 more bits. Use bf16-O2, or "
                "whole masters (split=False)."
            )


def check_state_dtype(optimizer_name: str, param: Tensor, state: Mapping[str, Any]) -> None:
    """Refuse the state of a parameter that ``load_state_dict`` has rounded to half precision.

    Raises:
        ConfigError: A tensor of the state is in half precision, and has values of earlier steps.
    """
    rounded_keys = [key for key, value in state.items() if _is_used_half(value)]
    if rounded_keys:
        keys = ", ".join(rounded_keys)
        raise ConfigError(
            f"{optimizer_name} has its state ({keys}) in {param.dtype}, in "
            "which small second moments are zero. Its load_state_dict rounded the state to the "
            "dtype of the parameters. Create the masters (initialize, or MasterParameters) before "
            "you load the state, and set requires_grad=True on every parameter that is to be "
            "trained before that."
        )


def _is_used_half(value: Any) -> bool:
    """Return whether a state is in half precision and not constant, as Adagrad's is at first."""
    if not is_half(value) or value.numel() == 0:
        return False
    return bool(value.min() < value.max())
