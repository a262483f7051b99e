"""What stays float32 in a cast model: one rule with four sources; and pins by pattern.

Batch norms, as the level says; what the caller pinned; what the model's owner declared; and the
tables of rotary embeddings, which cast their result themselves.
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
    "Pins",
    "declared",
    "kept_fp32",
    "match_patterns",
    "own_tensors",
    "pin_all",
    "return_model_dtype",
    "unmatched_everywhere",
]

#: Modules, and what each is pinned to.
Pins = Mapping[nn.Module, str]
#: How similar a module's name is to a pattern, at least, for a message to contain it.
_LEAST_RATIO = 0.6


def match_patterns(
    models: Sequence[nn.Module], level: PrecisionLevel
) -> tuple[Pins, dict[str, list[str]]]:
    """Return the modules of this rank that the patterns of a level name.

    Names are those without wrappers.

    Returns:
        The modules, each with its precision; and the patterns that match none, each with the
        most similar names. Another rank may have the part of the model that such a pattern names.
    """
    if not level.pins:
        return {}, {}
    # Of a wrapper and the module in it, which share a name, the module comes last.
    named = {name: m for model in models for m, name in module_names(model).items() if name}
    found = {pattern: fnmatch.filter(named, pattern) for pattern, _ in level.pins}
    pins = {named[name]: pin for pattern, pin in level.pins for name in found[pattern]}
    similar = {p: _similar_modules(p, named) for p, names in found.items() if not names}
    return pins, similar


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


def unmatched_everywhere(unmatched: Sequence[Mapping[str, Sequence[str]]]) -> None:
    """Refuse a pattern that matches no module on any rank.

    Args:
        unmatched: Of each rank the second result of `match_patterns`.

    Raises:
        ConfigError: There is such a pattern.
    """
    for pattern in unmatched[0]:
        if all(pattern in of_rank for of_rank in unmatched):
            close = dict.fromkeys(name for of_rank in unmatched for name in of_rank[pattern])
            hint = (
                "There is no similar name. model.named_modules() lists the names. For the whole "
                "model call set_module_precision(model, ...)."
            )
            if close:
                quoted = [repr(name) for name in close]
                alternatives = " or ".join(quoted[:3])
                hint = f"Did you mean {alternatives}?"
            raise ConfigError(
                f"module_precision= has the pattern {pattern!r}, and no module on any rank has a "
                f"name that matches it. {hint}"
            )


def pin_all(model: nn.Module, pins: Pins, dtype: torch.dtype) -> None:
    """Pin modules of a model that computes in ``dtype``, or in a region where that is float32.

    The output embeddings of a model of transformers are what it returns, and keep their precision.
    """
    own = set(model.modules())
    head = getattr(model, "get_output_embeddings", lambda: None)()
    around = None if dtype is torch.float32 else dtype
    for module, pin in pins.items():
        if module in own:
            keep = ":keep_output" if module is head and ":" not in pin else ""
            set_module_precision(module, pin + keep, model_dtype=around)


def return_model_dtype(model: nn.Module, pins: Container[nn.Module], dtype: torch.dtype) -> None:
    """Have what a user pinned to float32 return the dtype of a half precision model.

    A pin by itself returns the half precision that came in, and the model may pass float32: T5
    keeps its residual stream in it, and its norms return the dtype of their weight. What the
    owner of a model declared is not changed, because the model is written for its float32.

    Args:
        model: The model.
        pins: The modules that the user pinned.
        dtype: Of the model.
    """
    for module in _outermost_fp32(model):
        pin = get_module_precision(module)
        if pin is not None and not pin.keep_output and module in pins:
            module.register_forward_hook(functools.partial(_return_dtype, dtype))


def _return_dtype(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype is torch.float32 else tensor

    return tree_map_only(Tensor, cast, output)


def _outermost_fp32(module: nn.Module, inside: bool = False) -> Iterator[nn.Module]:
    """Yield the modules pinned to float32 that are in no other one."""
    pin = get_module_precision(module)
    fp32 = inside if pin is None else pin.dtype is torch.float32
    if fp32 and not inside:
        yield module
    for child in module.children():
        yield from _outermost_fp32(child, fp32)


def kept_fp32(model: nn.Module, level: PrecisionLevel) -> set[int]:
    """Pin what else stays float32, and return the ids of all parameters and buffers that do.

    Raises:
        ConfigError: The model as a whole is pinned to float32.
    """
    if getattr(get_module_precision(model), "dtype", None) is torch.float32:
        raise ConfigError(
            f"the model itself is pinned to fp32, and {level.name} casts it to "
            f"{level.param}; take fp32, or set_module_precision(model, None)"
        )
    theirs = declared(model)
    before = {
        m: _NAMES[p.dtype] + ":keep_output" * p.keep_output
        for m in model.modules()
        if (p := get_module_precision(m))
    }
    owners = {each: "fp32" for each in theirs if isinstance(each, nn.Module)}
    pin_all(model, {**owners, **before}, level.param)
    return_model_dtype(model, before, level.param)
    norms = _BatchNorm if level.keep_batchnorm_fp32 else ()
    full = {m for m, fp32 in _with_pins(model) if fp32 or isinstance(m, norms)}
    kept = {id(each) for each in (*own_tensors(*full), *_tables(model), *theirs)}
    for module in model.modules():
        # One that shares a parameter with a pinned module computes in its dtype too.
        if module not in full and any(
            id(each) in kept for each in module.parameters(recurse=False)
        ):
            pin_all(model, {module: "fp32"}, level.param)
    return kept


_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def own_tensors(*modules: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of these very modules."""
    for module in modules:
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)


def _with_pins(module: nn.Module, fp32: bool = False) -> Iterator[tuple[nn.Module, bool]]:
    """Yield every module, and whether the innermost pin around it is to float32."""
    pin = get_module_precision(module)
    fp32 = fp32 if pin is None else pin.dtype is torch.float32
    yield module, fp32
    for child in module.children():
        yield from _with_pins(child, fp32)


def declared(model: nn.Module) -> list[nn.Module | nn.Parameter]:
    """Return what the owners of a model of transformers declared to stay float32.

    By name, wherever in the model, as transformers does.
    """
    lists = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    names = {n for m in model.modules() for a in lists for n in getattr(m, a, None) or ()}
    ends = re.compile(rf"(^|\.)({'|'.join(map(re.escape, names))})$")
    every = (*model.named_modules(), *model.named_parameters())
    return [each for full, each in every if names and ends.search(full)]


def _tables(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tables of rotary embeddings of transformers, which cast their result themselves."""
    for module in model.modules():
        kind = type(module)
        ours = kind.__module__.startswith("transformers.")
        if ours and re.search(r"Rotary\w*Embedding$", kind.__name__):
            saved = module.state_dict()
            yield from (b for n, b in module.named_buffers(recurse=False) if n not in saved)
