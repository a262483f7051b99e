"""The precisions of single modules in a model, and the tensors that stay float32 when it is cast.

Four sources keep a module or a tensor in float32: the level for batch norms, the caller by
``module_precision=`` or `distamp.set_module_precision`, the owner of a transformers model by
``_keep_in_fp32_modules``, and the class of a rotary embedding.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from distamp.autocast.module_precision import get_module_precision, set_module_precision
from distamp.errors import ConfigError
from distamp.module_names import module_names
from distamp.precision_level import PrecisionLevel

__all__ = [
    "ModulePrecisions",
    "apply_module_precisions",
    "cast_outputs_to_model_dtype",
    "direct_tensors",
    "is_fp32_module",
    "keep_in_fp32_modules",
    "match_patterns",
    "output_embeddings",
    "refuse_unmatched_patterns",
    "set_fp32_modules",
]

#: Modules, and the name of the precision that each is to have.
ModulePrecisions = Mapping[nn.Module, str]

# How similar a module's name is to a pattern, at least, for a message to contain it.
_LEAST_RATIO = 0.6
_PRECISION_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_TRANSFORMERS_LISTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
_ROTARY_CLASS = re.compile(r"Rotary\w*Embedding$")


# -- patterns over module names --------------------------------------------------------------------


def match_patterns(
    models: Sequence[nn.Module], level: PrecisionLevel
) -> tuple[ModulePrecisions, dict[str, list[str]]]:
    """Return the modules of this rank that the patterns of a level match.

    Names do not contain wrappers. The root of a model has no name, so no pattern matches it.

    Returns:
        The modules, each with its precision; and the patterns without a match, each with the most
        similar names. Another rank may have the part of the model that such a pattern matches.
    """
    if not level.pins:
        return {}, {}
    modules: dict[str, nn.Module] = {}
    for model in models:
        # A wrapper and the module in it share a name. The module comes last and stays.
        for module, name in module_names(model).items():
            if name:
                modules[name] = module
    precisions: dict[nn.Module, str] = {}
    similar_names: dict[str, list[str]] = {}
    for pattern, precision in level.pins:
        names = fnmatch.filter(modules, pattern)
        for name in names:
            precisions[modules[name]] = precision
        if not names:
            similar_names[pattern] = _similar_modules(pattern, modules)
    return precisions, similar_names


def _similar_modules(pattern: str, names: Iterable[str]) -> list[str]:
    """Return at most three module names that are similar to a pattern, the most similar first."""
    searched = re.sub(r"[*?\[\]]", "", pattern)
    searched = searched.strip(".")
    # A pattern begins with a star for all components but the last ones.
    depth = 1 + searched.count(".")
    ratios: dict[str, float] = {}
    for name in names:
        components = name.split(".")
        end = ".".join(components[-depth:])
        matcher = SequenceMatcher(None, searched, end)
        ratio = matcher.ratio()
        if ratio >= _LEAST_RATIO:
            ratios[name] = ratio
    similar = sorted(ratios, key=ratios.__getitem__, reverse=True)
    return similar[:3]


def refuse_unmatched_patterns(unmatched: Sequence[Mapping[str, Sequence[str]]]) -> None:
    """Refuse a pattern that matches no module on any rank.

    Args:
        unmatched: The second result of `match_patterns` on every rank.

    Raises:
        ConfigError: There is such a pattern.
    """
    for pattern in unmatched[0]:
        if not all(pattern in unmatched_on_rank for unmatched_on_rank in unmatched):
            continue
        similar: dict[str, None] = {}
        for unmatched_on_rank in unmatched:
            similar.update(dict.fromkeys(unmatched_on_rank[pattern]))
        hint = (
            "There is no similar name. model.named_modules() lists the names. For the whole "
            "model call set_module_precision(model, ...)."
        )
        if similar:
            quoted = [repr(name) for name in similar]
            alternatives = " or ".join(quoted[:3])
            hint = f"Did you mean {alternatives}?"
        raise ConfigError(
            f"module_precision= has the pattern {pattern!r}, and no module on any rank has a "
            f"name that matches it. {hint}"
        )


# -- the precision of single modules ---------------------------------------------------------------


def apply_module_precisions(
    model: nn.Module, precisions: ModulePrecisions, dtype: torch.dtype
) -> None:
    """Set the precision of modules of a model.

    The output embeddings of a transformers model compute the model's output, so they keep it in
    their precision.

    Args:
        model: The model. Modules of other models are left out.
        precisions: The modules.
        dtype: The dtype in which the model computes; float32 if a region casts its ops.
    """
    modules = set(model.modules())
    head = output_embeddings(model)
    model_dtype = None if dtype is torch.float32 else dtype
    for module, precision in precisions.items():
        if module not in modules:
            continue
        if module is head and ":" not in precision:
            precision = f"{precision}:keep_output"
        set_module_precision(module, precision, model_dtype=model_dtype)


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """Return the head of a transformers model, or None for another model."""
    get_output_embeddings = getattr(model, "get_output_embeddings", None)
    if get_output_embeddings is None:
        return None
    head: nn.Module | None = get_output_embeddings()
    return head


def cast_outputs_to_model_dtype(
    model: nn.Module, modules: Container[nn.Module], dtype: torch.dtype
) -> None:
    """Cast the outputs of float32 modules to the dtype of a half-precision model.

    `set_module_precision` alone casts outputs to the half precision of an input. A model may pass
    float32: T5 keeps its residual stream in float32, and its norms return the dtype of their
    weight. Modules that the owner of a model declared are not changed, because the model is written
    for their float32 outputs.

    Args:
        model: The model.
        modules: The modules that the user set to float32. Others are left out.
        dtype: The dtype of the model.
    """
    for module in _outermost_fp32_modules(model):
        precision = get_module_precision(module)
        if precision is None or precision.keep_output or module not in modules:
            continue
        module.register_forward_hook(functools.partial(_cast_fp32_outputs, dtype))


def _cast_fp32_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype is torch.float32 else tensor

    return tree_map_only(Tensor, cast, output)


def is_fp32_module(module: nn.Module) -> bool:
    """Return whether this very module has the precision float32."""
    precision = get_module_precision(module)
    return precision is not None and precision.dtype is torch.float32


def _effective_fp32(module: nn.Module, is_inside_fp32: bool) -> bool:
    """Return whether the precision of a module, or of a module around it, is float32."""
    if get_module_precision(module) is None:
        return is_inside_fp32
    return is_fp32_module(module)


def _outermost_fp32_modules(module: nn.Module, is_inside_fp32: bool = False) -> Iterator[nn.Module]:
    """Yield the modules with precision float32 that are in no other such module."""
    is_fp32 = _effective_fp32(module, is_inside_fp32)
    if is_fp32 and not is_inside_fp32:
        yield module
    for child in module.children():
        yield from _outermost_fp32_modules(child, is_fp32)


def _fp32_modules(module: nn.Module, is_inside_fp32: bool = False) -> Iterator[nn.Module]:
    """Yield the modules that compute in float32 because of a precision."""
    is_fp32 = _effective_fp32(module, is_inside_fp32)
    if is_fp32:
        yield module
    for child in module.children():
        yield from _fp32_modules(child, is_fp32)


# -- a model that is cast --------------------------------------------------------------------------


def set_fp32_modules(model: nn.Module, level: PrecisionLevel) -> set[int]:
    """Set the modules of a cast model that stay float32 to that precision.

    Returns:
        The ids of all parameters and buffers that stay float32.

    Raises:
        ConfigError: The model as a whole has the precision float32.
    """
    if is_fp32_module(model):
        raise ConfigError(
            f"The precision of the model itself was set to fp32, and {level.name} casts the model "
            f"to {level.param}. Use level fp32, or call set_module_precision(model, None)."
        )
    owners = keep_in_fp32_modules(model)
    owner_precisions = {owner: "fp32" for owner in owners if isinstance(owner, nn.Module)}
    user_precisions = _current_precisions(model)
    apply_module_precisions(model, {**owner_precisions, **user_precisions}, level.param)
    cast_outputs_to_model_dtype(model, user_precisions, level.param)

    fp32_modules = set(_fp32_modules(model))
    if level.keep_batchnorm_fp32:
        batch_norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        fp32_modules.update(batch_norms)
    fp32_ids: set[int] = set()
    for tensor in (*direct_tensors(*fp32_modules), *_rotary_buffers(model), *owners):
        fp32_ids.add(id(tensor))
    for module in model.modules():
        if module in fp32_modules:
            continue
        # A module that shares a parameter with a float32 module computes in float32, too.
        if any(id(param) in fp32_ids for param in module.parameters(recurse=False)):
            apply_module_precisions(model, {module: "fp32"}, level.param)
    return fp32_ids


def _current_precisions(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules that have a precision, with the name of it."""
    precisions: dict[nn.Module, str] = {}
    for module in model.modules():
        precision = get_module_precision(module)
        if precision is None:
            continue
        name = _PRECISION_NAMES[precision.dtype]
        precisions[module] = f"{name}:keep_output" if precision.keep_output else name
    return precisions


def direct_tensors(*modules: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of modules, without their children's."""
    for module in modules:
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)


def keep_in_fp32_modules(model: nn.Module) -> list[nn.Module | nn.Parameter]:
    """Return the modules and parameters that the owner of a transformers model keeps in float32.

    As in transformers, the names count anywhere in the model.
    """
    names: set[str] = set()
    for module in model.modules():
        for attribute in _TRANSFORMERS_LISTS:
            names.update(getattr(module, attribute, None) or ())
    if not names:
        return []
    alternatives = "|".join(re.escape(name) for name in names)
    ends_in_name = re.compile(rf"(^|\.)({alternatives})$")
    owners: list[nn.Module | nn.Parameter] = []
    for full_name, owner in (*model.named_modules(), *model.named_parameters()):
        if ends_in_name.search(full_name):
            owners.append(owner)
    return owners


def _rotary_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tables of transformers' rotary embeddings, which cast their result themselves."""
    for module in model.modules():
        cls = type(module)
        if not cls.__module__.startswith("transformers.") or not _ROTARY_CLASS.search(cls.__name__):
            continue
        saved_names = module.state_dict()
        for name, buffer in module.named_buffers(recurse=False):
            if name not in saved_names:
                yield buffer
