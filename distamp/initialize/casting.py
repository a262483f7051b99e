"""A model in float16 or bfloat16: its parameters cast, its inputs cast in, its outputs cast out."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from distamp.errors import SettingError
from distamp.initialize.wrappers import outermost_wrapper
from distamp.precision import Precision

__all__ = ["cast_as", "cast_model"]

_M = TypeVar("_M", bound=nn.Module)


def cast_model(
    model: _M,
    opt_level: str | Precision,
    *,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
) -> _M:
    """Cast a model in place to what its level asks for, before anything is wrapped around it.

    As ``model.half()``, but batch norms of every kind stay in float32 where the level says so, and
    calls of the model cast floating inputs in and floating outputs out. A level whose model is
    float32 leaves it as it is, so the call can stand in a script for every level. Parameters keep
    their identity: an optimizer made before holds them still.

    `initialize` does it by itself for a model without wrapper, or in DataParallel. Any other
    wrapper lays parameters out anew, so there the order is: ``cast_model``, wrapper, optimizer,
    ``initialize``.

    Args:
        model: A module that no wrapper holds.
        opt_level: A name in ``distamp.precision.LEVELS``, or a `Precision`.
        keep_batchnorm_fp32: In place of the level's own.
        master_weights: In place of the level's own.

    Returns:
        ``model`` itself.

    Raises:
        SettingError: The model is wrapped or sharded already, or was cast to another dtype before.

    Source: Apex's documentation of O2, and Micikevicius et al., 2018, section 3.1. Apex casts batch
    norms without affine parameters; here their statistics stay in float32 too.
    """
    precision = Precision.of(
        opt_level, keep_batchnorm_fp32=keep_batchnorm_fp32, master_weights=master_weights
    )
    wrapper = outermost_wrapper(model)
    if wrapper is not None and precision.casts_model:
        raise SettingError(
            f"cast_model was given a model inside {wrapper}, which has laid its parameters out in "
            "their present dtype; the order is cast_model(model, level), then the wrapper, then "
            "the optimizer, then initialize"
        )
    before = cast_as(model)
    if before is not None and _layout(before) != _layout(precision):
        raise SettingError(
            f"the model was already cast for {before.level} (parameters {before.param}) and cannot "
            f"be cast for {precision.level}, because rounding lost precision; build the model again"
        )
    if not precision.casts_model or before is not None:
        return model
    for module in model.modules():
        kept = precision.keep_batchnorm_fp32 and isinstance(module, _BatchNorm)
        _cast_own_tensors(module, torch.float32 if kept else precision.param)
    model.register_forward_pre_hook(_CastInputs(precision), with_kwargs=True, prepend=True)
    model.register_forward_hook(_CastOutputs(precision))
    return model


def cast_as(model: nn.Module) -> Precision | None:
    """Return what `cast_model` cast this very module to; None if it did not."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, _CastInputs):
            return hook.precision
    return None


def _layout(precision: Precision) -> tuple[torch.dtype, bool | None]:
    return precision.param, precision.keep_batchnorm_fp32


def _cast_own_tensors(module: nn.Module, dtype: torch.dtype) -> None:
    # torch's own walk, so that modules that override it (recurrent ones, say) have their say.
    module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(one, value)


# Classes, so that a cast model can be copied and pickled.


class _CastInputs:
    def __init__(self, precision: Precision) -> None:
        self.precision = precision

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self.precision.param
        return _cast(args, dtype), _cast(kwargs, dtype)


class _CastOutputs:
    def __init__(self, precision: Precision) -> None:
        self.precision = precision

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        dtype = self.precision.output
        return output if dtype is None else _cast(output, dtype)
