"""What stays float32 in a cast model: one rule with four sources; and pins by pattern.

Batch norms, as the level says; what the caller pinned; what the model's owner declared; and the
tables of rotary embeddings, which cast their result themselves.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from distamp.autocast import pin_of, pin_precision
from distamp.errors import LockstepError, SettingError
from distamp.precision import Precision
from distamp.report.following import module_names

__all__ = ["Pins", "declared", "kept_fp32", "matched", "pin_all"]

_log = logging.getLogger("distamp.initialize")
#: Modules, and what each is pinned to.
Pins = Mapping[nn.Module, str]


def matched(models: Sequence[nn.Module], precision: Precision, group: ProcessGroup | None) -> Pins:
    """Return the modules that a level's patterns name; the models themselves are not asked.

    Names are those without wrappers. Collective over ``group`` where there are patterns: a rank
    may have a part of the model that a pattern does not name.

    Raises:
        SettingError: A pattern names no module on any rank.
        LockstepError: Ranks have other patterns.
    """
    if not precision.pins:
        return {}
    # Of a wrapper and the module in it, which share a name, the module comes last.
    named = {name: m for model in models for m, name in module_names(model).items() if name}
    found = {
        pattern: [name for name in named if fnmatchcase(name, pattern)]
        for pattern, _ in precision.pins
    }
    nearest = {p: get_close_matches(p, named, 3, 0.0) for p, names in found.items() if not names}
    everyone: list[Any] = [(precision.pins, nearest)]
    if group is not None:
        everyone *= dist.get_world_size(group)
        dist.all_gather_object(everyone, (precision.pins, nearest), group=group)
    if any(pins != precision.pins for pins, _ in everyone):
        raise LockstepError(
            "ranks were given different precision=: "
            + "; ".join(f"rank {rank} {dict(pins)}" for rank, (pins, _) in enumerate(everyone))
        )
    for pattern in found:
        without = [rank for rank, (_, missing) in enumerate(everyone) if pattern in missing]
        if len(without) == len(everyone):
            close = dict.fromkeys(name for _, missing in everyone for name in missing[pattern])
            raise SettingError(
                f"precision has the pattern {pattern!r}, which no module's name matches on any "
                f"rank; the nearest are {', '.join(map(repr, list(close)[:3]))}"
            )
        if without:
            _log.info("the pattern %r of precision= matches nothing on ranks %s", pattern, without)
    return {named[name]: pin for pattern, pin in precision.pins for name in found[pattern]}


def pin_all(model: nn.Module, pins: Pins, dtype: torch.dtype) -> None:
    """Pin modules of a model that computes in ``dtype``, or in a region where that is float32.

    The output embeddings of a model of transformers are what it returns, and keep their precision.
    """
    own = set(model.modules())
    head = getattr(model, "get_output_embeddings", lambda: None)()
    around = None if dtype is torch.float32 else dtype
    for module, pin in pins.items():
        if module in own:
            keep = ":keep" if module is head and ":" not in pin else ""
            pin_precision(module, pin + keep, model_dtype=around)


def kept_fp32(model: nn.Module, precision: Precision, pins: Pins) -> set[int]:
    """Pin the modules that stay float32, and return the ids of their parameters and buffers.

    Raises:
        SettingError: The model as a whole is pinned to float32.
    """
    if getattr(pin_of(model), "dtype", None) is torch.float32:
        raise SettingError(
            f"the model itself is pinned to fp32, and {precision.level} casts it to "
            f"{precision.param}; take O0, or pin_precision(model, None)"
        )
    theirs = declared(model)
    before = {m: _NAMES[p.dtype] + ":keep" * p.keep for m in model.modules() if (p := pin_of(m))}
    owners = {each: "fp32" for each in theirs if isinstance(each, nn.Module)}
    pin_all(model, {**owners, **before, **pins}, precision.param)
    kept: set[int] = set()
    for module, fp32 in _with_pins(model):
        fp32 = fp32 or _is_kept_norm(module, precision)
        tables = _tables(module)
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        kept |= {id(tensor) for name, tensor in tensors if fp32 or name in tables}
    for module, fp32 in [*_with_pins(model)]:
        # One that shares a parameter with a pinned module computes in its dtype too.
        shares = any(id(each) in kept for each in module.parameters(recurse=False))
        if shares and not fp32 and not _is_kept_norm(module, precision):
            pin_all(model, {module: "fp32"}, precision.param)
    return kept | {id(each) for each in theirs if isinstance(each, Tensor)}


_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def _is_kept_norm(module: nn.Module, precision: Precision) -> bool:
    return bool(precision.keep_batchnorm_fp32) and isinstance(module, _BatchNorm)


def _with_pins(module: nn.Module, fp32: bool = False) -> Iterator[tuple[nn.Module, bool]]:
    """Yield every module, and whether the innermost pin around it is to float32."""
    pin = pin_of(module)
    fp32 = fp32 if pin is None else pin.dtype is torch.float32
    yield module, fp32
    for child in module.children():
        yield from _with_pins(child, fp32)


def declared(model: nn.Module) -> list[nn.Module | nn.Parameter]:
    """Return what the owners of a model of transformers declared to stay float32."""
    return [each for name in _declared_names(model) for each in _named(model, name)]


def _declared_names(model: nn.Module) -> set[str]:
    """Return what the owners of a model of transformers declared, of modules or parameters."""
    lists = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return {n for m in model.modules() for a in lists for n in getattr(m, a, None) or ()}


def _named(model: nn.Module, name: str) -> list[nn.Module | nn.Parameter]:
    """Return the modules and parameters of a name, wherever in the model, as transformers does."""
    ends = re.compile(rf"(^|\.){re.escape(name)}$")
    every = (*model.named_modules(), *model.named_parameters())
    return [each for full, each in every if ends.search(full)]


def _tables(module: nn.Module) -> set[str]:
    """Return the buffers of a rotary embedding of transformers, whose result it casts itself."""
    kind = type(module)
    ours = kind.__module__.startswith("transformers.")
    rotary = ours and re.search(r"Rotary\w*Embedding$", kind.__name__)
    buffers = {name for name, _ in module.named_buffers(recurse=False)} if rotary else set()
    return buffers - set(module.state_dict())
