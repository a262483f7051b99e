"""A model in float16 or bfloat16: its parameters cast, its inputs cast in, its outputs cast out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from distamp.errors import ConfigError
from distamp.levels.float8 import convert
from distamp.levels.kept import (
    Pins,
    kept_fp32,
    match_patterns,
    own_tensors,
    pin_all,
    unmatched_everywhere,
)
from distamp.levels.wrappers import recognise
from distamp.precision_level import LevelLike, PrecisionLevel
from distamp.process_group import GroupLike, resolve_process_group

__all__ = [
    "O2_OF",
    "cast_as",
    "cast_model",
    "check_cast_before",
    "check_frozen",
    "chosen_level",
    "prepare",
]

_M = TypeVar("_M", bound=nn.Module)
#: The level that trains a model whose parameters are in this dtype, with fp32 masters.
O2_OF = {torch.float16: "fp16-O2", torch.bfloat16: "bf16-O2"}
_MARK = "_distamp_cast_as"  # an attribute of a cast model, which its copies and pickles keep


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
    """Cast a model in place to what its level asks for, before anything is wrapped around it.

    As ``model.half()``, but these stay in float32: batch norms of every kind where the level says
    so; what is pinned to it, here or before; what the owners of a model of transformers declared
    (``_keep_in_fp32_modules``), and its tables of rotary embeddings. Calls of the model cast
    floating inputs in and floating outputs out. A level whose model is float32 only pins, so the
    call can stand in a script for every level. Parameters keep their identity: an optimizer made
    before holds them still.

    `initialize` does it by itself for a model without wrapper, or in DataParallel. Any other
    wrapper lays parameters out anew, so there the order is: ``cast_model``, wrapper, optimizer,
    ``initialize``.

    Args:
        model: A module that no wrapper holds.
        level: A name in ``distamp.levels.LEVELS``, one of Apex's, or a `PrecisionLevel`.
        opt_level: Apex's name of ``level``.
        keep_batchnorm_fp32: In place of the level's own.
        master_weights: In place of the level's own.
        module_precision: Modules in a precision of their own, by shell patterns over their names,
            as in ``{"*.norm": "fp32", "lm_head": "fp32:keep_output"}``; see
            `distamp.set_module_precision`. Of several that match, the last counts. Among several
            ranks a pattern may match nothing here, because another rank may have those modules;
            `initialize` compares all ranks.
        process_group: The ranks that have a part of the model, as `initialize` takes it.

    Returns:
        ``model`` itself.

    Raises:
        ConfigError: The model is wrapped or sharded already, or was cast to another dtype before;
            or it has frozen parameters in the other half precision; or, in a process alone, a
            pattern matches nothing.

    Source: Apex's documentation of fp16-O2, and Micikevicius et al., 2018, section 3.1. Apex casts
    batch norms without affine parameters; here their statistics stay in float32 too.
    """
    example = "Pass the level that initialize gets, as in cast_model(model, 'bf16-O2')."
    chosen = chosen_level("cast_model", level, opt_level, example)
    _refuse_dtype(chosen)
    level = PrecisionLevel.from_name(
        chosen,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        module_precision=module_precision,
    )
    pins, unmatched = match_patterns([model], level)
    group = resolve_process_group(process_group)
    if group is None or group.size() == 1:
        unmatched_everywhere([unmatched])
    wrapper = recognise(model).name
    if wrapper is not None and level.changes_model:
        raise ConfigError(
            f"cast_model was given a model inside {wrapper}, which has laid its parameters out in "
            "their present dtype; the order is cast_model(model, level), then the wrapper, then "
            "the optimizer, then initialize"
        )
    check_cast_before(model, level)
    check_frozen(model, level)
    prepare(model, level, pins)
    return model


def chosen_level(
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
    chosen = opt_level if level is None else level
    if chosen is None:
        raise TypeError(f"{call}() needs a level, because there is no default. {example}")
    return chosen


def _refuse_dtype(level: LevelLike) -> None:
    """Refuse a dtype, which does not tell whether an optimizer has float32 masters."""
    if isinstance(level, torch.dtype):
        with_masters = O2_OF.get(level, "bf16-O2")
        without_masters = with_masters.replace("O2", "O3")
        raise TypeError(
            f"cast_model() takes the name of a level, not {level}. Pass {with_masters!r} to train "
            f"with float32 master weights, or {without_masters!r} to train without them."
        )


def prepare(model: nn.Module, level: PrecisionLevel, pins: Pins) -> None:
    """Pin the modules of a model, and change the rest where the level says so and nobody has."""
    pin_all(model, pins, level.param)
    if cast_as(model) is not None or not level.changes_model:
        return
    if level.float8 is not None:
        convert(model, level)
    else:
        _cast_all(model, level)
    setattr(model, _MARK, level)


def _cast_all(model: nn.Module, level: PrecisionLevel) -> None:
    kept = kept_fp32(model, level)
    for tensor in own_tensors(*model.modules()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if id(tensor) in kept else level.param)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    inputs = functools.partial(_cast_inputs, level.param)
    model.register_forward_pre_hook(inputs, with_kwargs=True, prepend=True)
    if level.output is not None:
        model.register_forward_hook(functools.partial(_cast_outputs, level.output))


def check_frozen(model: nn.Module, level: PrecisionLevel) -> None:
    """Refuse a level that cannot compute with the frozen parameters as they are.

    Only what is trained must have the level's dtype. A region casts the rest op by op, but not
    batch norms, whose statistics are written. Without one they are in the level's dtype, or
    float32, which is cast to it.

    Raises:
        ConfigError: They are in half precision at fp32, or in another one than the level computes
            in, where a cast would lose range or precision.
    """
    kind, ways = (nn.Module, "bf16 or fp16, or ") if not level.autocasts else (_BatchNorm, "")
    modules = (module for module in model.modules() if isinstance(module, kind))
    held = (p for module in modules for p in module.parameters(recurse=False))
    others = {p.dtype for p in held if not p.requires_grad} & O2_OF.keys() - {level.compute}
    if others:
        dtype = others.pop()
        raise ConfigError(
            f"{level.name} computes in {level.compute} and the model has frozen "
            f"{'batch norms' if level.autocasts else 'parameters'} in {dtype}; take {ways}"
            f"{O2_OF[dtype]}, or cast them yourself: module.to(...)"
        )


def cast_as(model: nn.Module) -> PrecisionLevel | None:
    """Return what `cast_model` cast this very module to; None if it did not."""
    return getattr(model, _MARK, None)


def check_cast_before(model: nn.Module, level: PrecisionLevel) -> None:
    """Refuse a model that was cast to something else.

    Raises:
        ConfigError: It was.
    """
    before = cast_as(model)
    if before is not None and _layout_of(before) != _layout_of(level):
        raise ConfigError(
            f"the model was cast for {before.name} ({_layout_of(before)}) and is to train at "
            f"{level.name} ({_layout_of(level)}); give both the same, and build the model "
            "again, because rounding lost precision"
        )


def _layout_of(level: PrecisionLevel) -> str:
    named = {
        "parameters": level.param,
        "keep_batchnorm_fp32": level.keep_batchnorm_fp32,
        "module_precision": dict(level.pins),
        "float8": level.float8,
        "float8_all_gather": level.float8_all_gather,
    }
    return ", ".join(f"{name}={value}" for name, value in named.items() if value)


# The hooks are partials of module-level functions, so that a cast model can be copied and pickled.


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
    dense = tensor.layout is torch.strided and not tensor.is_nested
    if dtype is torch.float32 or tensor.requires_grad or not dense:
        return cast
    # What masks are made of: as -inf it would make a row of nothing else NaN.
    lowest = torch.finfo(tensor.dtype).min
    return cast.masked_fill_(tensor == lowest, torch.finfo(dtype).min)
