"""cast_model: the parameters of a model in a level's dtype, with its inputs and outputs cast."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from distamp.errors import ConfigError
from distamp.levels.float8 import convert_linear_layers
from distamp.levels.fp32_modules import (
    ModulePrecisions,
    apply_module_precisions,
    direct_tensors,
    match_patterns,
    refuse_unmatched_patterns,
    set_fp32_modules,
)
from distamp.levels.wrappers import inspect_wrapper
from distamp.precision_level import LevelLike, PrecisionLevel
from distamp.process_group import GroupLike, resolve_process_group

__all__ = [
    "MASTER_LEVELS",
    "applied_level",
    "apply_level",
    "cast_model",
    "check_applied_level",
    "check_frozen",
    "resolve_level_argument",
]

_M = TypeVar("_M", bound=nn.Module)

#: The level that trains a model whose parameters are in this dtype, with fp32 masters.
MASTER_LEVELS = {torch.float16: "fp16-O2", torch.bfloat16: "bf16-O2"}

# The attribute of a cast model with its level. Copies and pickles keep it.
_LEVEL_ATTR = "_distamp_cast_as"


def cast_model(
    model: _M,
    level: LevelLike | None = None,
    *,
    opt_level: LevelLike | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | Literal["split"] | None = None,
    module_precision: Mapping[str, str] | None = None,
    process_group: GroupLike = None,
) -> _M:
    """Cast a model in place to the dtype of a level, before any wrapper is applied.

    As ``model.half()``, except that these stay in float32: batch norms of every kind if the level
    keeps them; modules that have the precision float32, by this call or `set_module_precision`; the
    modules that the owner of a transformers model declared (``_keep_in_fp32_modules``), and its
    tables of rotary embeddings. The model then casts its floating-point inputs and outputs at each
    call. At a level with float32 parameters the call only sets the precision of modules, so a
    script may contain the call for every level. Parameters keep their identity, so an optimizer
    that was made before still has them.

    `initialize` casts a model without a wrapper, or in DataParallel, itself. Other wrappers change
    the layout of parameters, so call ``cast_model`` first, then the wrapper, the optimizer and
    ``initialize``.

    Args:
        model: A module without a wrapper.
        level: A name in ``distamp.levels.LEVELS``, one of Apex's names, or a `PrecisionLevel`.
        opt_level: Apex's name of ``level``.
        keep_batchnorm_fp32: Replaces the level's value.
        master_weights: Replaces the level's value.
        module_precision: The precisions of single modules, by shell patterns over their names, as
            in ``{"*.norm": "fp32", "lm_head": "fp32:keep_output"}``; see
            `distamp.set_module_precision`. If several patterns match a module, the last counts.
            With several ranks a pattern may match no module here, because another rank may have the
            module. `initialize` compares all ranks.
        process_group: The ranks that have a part of the model, as `initialize` takes it.

    Returns:
        ``model`` itself.

    Raises:
        ConfigError: The model is wrapped or sharded already, or was cast to another dtype before;
            it has frozen parameters in a different half precision; or, in a single process, a
            pattern matches no module.
        TypeError: ``level`` is a dtype, or missing.

    Source: Apex's documentation of fp16-O2, and Micikevicius et al., 2018, section 3.1. Apex casts
    batch norms without affine parameters. Their statistics stay in float32 here.
    """
    example = "Pass the level that initialize gets, as in cast_model(model, 'bf16-O2')."
    level_argument = resolve_level_argument("cast_model", level, opt_level, example)
    _refuse_dtype(level_argument)
    level = PrecisionLevel.from_name(
        level_argument,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        module_precision=module_precision,
    )
    precisions, unmatched = match_patterns([model], level)
    group = resolve_process_group(process_group)
    if group is None or group.size() == 1:
        refuse_unmatched_patterns([unmatched])
    wrapper = inspect_wrapper(model).name
    if wrapper is not None and level.changes_model:
        raise ConfigError(
            f"cast_model was given a model inside {wrapper}, which has laid out its parameters in "
            "their present dtype. Call cast_model(model, level) first, then the wrapper, the "
            "optimizer and initialize."
        )
    check_applied_level(model, level)
    check_frozen(model, level)
    apply_level(model, level, precisions)
    return model


def resolve_level_argument(
    call: str, level: LevelLike | None, opt_level: LevelLike | None, example: str
) -> LevelLike:
    """Return the level that a call was passed under either of its two names.

    Raises:
        TypeError: None was passed, or both were.
    """
    if level is not None and opt_level is not None:
        raise TypeError(
            f"{call}() got level={level!r} and opt_level={opt_level!r}, which are two names of one "
            "argument. Pass level alone."
        )
    argument = opt_level if level is None else level
    if argument is None:
        raise TypeError(f"{call}() needs a level, because there is no default. {example}")
    return argument


def _refuse_dtype(level: LevelLike) -> None:
    """Refuse a dtype, which does not tell levels with and without float32 masters apart."""
    if isinstance(level, torch.dtype):
        with_masters = MASTER_LEVELS.get(level, "bf16-O2")
        without_masters = with_masters.replace("O2", "O3")
        raise TypeError(
            f"cast_model() takes the name of a level, not {level}. Pass {with_masters!r} to train "
            f"with float32 master weights, or {without_masters!r} to train without them."
        )


# -- a level is applied ----------------------------------------------------------------------------


def apply_level(model: nn.Module, level: PrecisionLevel, precisions: ModulePrecisions) -> None:
    """Set the precision of modules, and cast or convert the model unless that was done before."""
    apply_module_precisions(model, precisions, level.param)
    if applied_level(model) is not None or not level.changes_model:
        return
    if level.linear_recipe is not None:
        convert_linear_layers(model, level)
    else:
        _cast_parameters(model, level)
    setattr(model, _LEVEL_ATTR, level)


def _cast_parameters(model: nn.Module, level: PrecisionLevel) -> None:
    fp32_ids = set_fp32_modules(model, level)
    for tensor in direct_tensors(*model.modules()):
        if not tensor.is_floating_point():
            continue
        dtype = torch.float32 if id(tensor) in fp32_ids else level.param
        tensor.data = tensor.data.to(dtype)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    # The hooks are partials of functions of this module, so that a cast model can be pickled.
    cast_inputs = functools.partial(_cast_inputs, level.param)
    model.register_forward_pre_hook(cast_inputs, with_kwargs=True, prepend=True)
    if level.output is not None:
        model.register_forward_hook(functools.partial(_cast_outputs, level.output))


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return tree_map_only(Tensor, functools.partial(_cast_tensor, dtype), (args, kwargs))


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return tree_map_only(Tensor, functools.partial(_cast_tensor, dtype), output)


def _cast_tensor(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype is dtype:
        return tensor
    cast = tensor.to(dtype)
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    if dtype is torch.float32 or tensor.requires_grad or not is_dense:
        return cast
    # Attention masks contain the lowest value of their dtype. The cast makes it -inf, and softmax
    # returns NaN for a row with nothing else, so the lowest value of the new dtype replaces it.
    lowest = torch.finfo(tensor.dtype).min
    return cast.masked_fill_(tensor == lowest, torch.finfo(dtype).min)


# -- checks ----------------------------------------------------------------------------------------


def applied_level(model: nn.Module) -> PrecisionLevel | None:
    """Return the level to which `cast_model` cast this very module, or None."""
    return getattr(model, _LEVEL_ATTR, None)


def check_applied_level(model: nn.Module, level: PrecisionLevel) -> None:
    """Refuse a model that was cast for another level.

    Raises:
        ConfigError: The model was cast with other dtypes or other modules in float32.
    """
    cast_level = applied_level(model)
    if cast_level is not None and _signature(cast_level) != _signature(level):
        raise ConfigError(
            f"The model was cast for {cast_level.name} ({_signature(cast_level)}), and is to train "
            f"at {level.name} ({_signature(level)}). Pass the same level and settings to both "
            "calls, and build the model again, because rounding lost precision."
        )


def _signature(level: PrecisionLevel) -> str:
    """Return the text of the settings that change a model."""
    settings = {
        "parameters": level.param,
        "keep_batchnorm_fp32": level.keep_batchnorm_fp32,
        "module_precision": dict(level.pins),
        "linear_recipe": level.linear_recipe,
        "float8_all_gather": level.float8_all_gather,
    }
    return ", ".join(f"{name}={value}" for name, value in settings.items() if value)


def check_frozen(model: nn.Module, level: PrecisionLevel) -> None:
    """Refuse a level that cannot compute with the frozen parameters of a model.

    Only trained parameters must have the level's dtype. A region casts frozen parameters op by op,
    except in batch norms, because their statistics are written. Without a region frozen parameters
    must have the level's dtype, or float32, which is cast to that dtype.

    Raises:
        ConfigError: Frozen parameters are in half precision at fp32, or in another half precision
            than the level computes in, so that a cast would lose range or precision.
    """
    checked_class = _BatchNorm if level.autocasts else nn.Module
    for module in model.modules():
        if not isinstance(module, checked_class):
            continue
        for param in module.parameters(recurse=False):
            is_other_half = param.dtype in MASTER_LEVELS and param.dtype is not level.compute
            if not param.requires_grad and is_other_half:
                raise ConfigError(_frozen_text(param.dtype, level))


def _frozen_text(dtype: torch.dtype, level: PrecisionLevel) -> str:
    kind = "batch norms" if level.autocasts else "parameters"
    levels = "" if level.autocasts else "bf16, fp16 or "
    return (
        f"{level.name} computes in {level.compute}, and the model has frozen {kind} in {dtype}. "
        f"Use {levels}{MASTER_LEVELS[dtype]}, or cast them yourself by module.to(...)."
    )
