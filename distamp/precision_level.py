"""Levels of precision as values: which dtype each part of training has, and what goes with it."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Self, TypeAlias

import torch

from distamp.error_text import choices_text, similar_names
from distamp.errors import ConfigError
from distamp.module_names import module_names

__all__ = ["APEX_NAMES", "LEVELS", "LevelLike", "PrecisionLevel"]

#: What stands for a level in a call: its name, the dtype of that name, or the level itself.
LevelLike: TypeAlias = "str | torch.dtype | PrecisionLevel"

_HALF = (torch.float16, torch.bfloat16)
_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# The name that reports give to everything that runs in no module.
_OUTSIDE = "(outside)"
_PINS = ("fp32", "fp16", "bf16", "fp32:keep_output", "fp16:keep_output", "bf16:keep_output")


@dataclass(frozen=True)
class PrecisionLevel:
    """The dtypes of one way to train, and what follows from them.

    Differs from Apex's properties in that it is a value: nothing is set on it, and a combination
    that contradicts itself cannot be made. `PrecisionLevel.from_name` makes the rows of `LEVELS`.

    Args:
        name: Its name, such as ``"bf16"``.
        param: The dtype of the model's parameters and floating buffers.
        compute: The dtype of matrix products and convolutions. Where it differs from ``param``,
            autocast casts op by op; else every op runs in the dtype of the parameters.
        reduce: The dtype of gradients when ranks add them up.
        output: The dtype that what the model returns is cast to; None leaves it as it is.
        keep_batchnorm_fp32: Whether batch norms stay in float32 in a model of another dtype; None
            where there is no such model.
        master_weights: Whether the optimizer works on float32 copies of the parameters; None where
            parameters are float32 themselves. ``"split"``: on copies that are stored as bfloat16
            parameters and 16-bit remainders.
        loss_scale: ``"dynamic"``, or a constant, where 1.0 is none.
        pins: Modules in a precision of their own: pairs of a shell pattern over module names and
            what `distamp.set_module_precision` takes by name; of several that match, the last
            counts.
        float8: How linear layers that can are scaled when they compute in float8; None where none
            does.
        float8_all_gather: Whether FSDP2 gathers their weights in float8.

    Raises:
        ConfigError: Something contradicts something else.

    Source: Apex's documentation of its opt levels; Micikevicius et al., "Mixed Precision Training",
    2018.
    """

    name: str
    param: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    output: torch.dtype | None
    keep_batchnorm_fp32: bool | None
    master_weights: bool | Literal["split"] | None
    loss_scale: float | Literal["dynamic"]
    pins: tuple[tuple[str, str], ...] = ()
    float8: Literal["tensorwise", "rowwise"] | None = None
    float8_all_gather: bool = False

    @property
    def autocasts(self) -> bool:
        """Whether ops are cast one by one, by an autocast region."""
        return self.compute is not self.param

    @property
    def casts_model(self) -> bool:
        """Whether the model's own parameters are in a lower precision."""
        return self.param in _HALF

    @property
    def changes_model(self) -> bool:
        """Whether the model itself is changed before anything is wrapped around it."""
        return self.casts_model or self.float8 is not None

    @property
    def scales(self) -> bool:
        """Whether a scaler runs, which skips steps that overflow.

        At a constant scale of 1.0 there is nothing to unscale; yet float16 gradients overflow at
        any scale, so with them it runs.
        """
        return self.loss_scale != 1.0 or self.compute is torch.float16

    def __post_init__(self) -> None:
        for name in ("param", "compute", "reduce", "output"):
            dtype = getattr(self, name)
            if dtype not in (torch.float32, *_HALF) and (name, dtype) != ("output", None):
                raise ConfigError(
                    f"{name} must be torch.float32, torch.float16 or torch.bfloat16, not {dtype!r}"
                )
        if self.autocasts and self.param is not torch.float32:
            raise ConfigError(
                f"compute={self.compute} with param={self.param}: autocast casts from float32 "
                "weights, so let param be torch.float32, or compute the same as param"
            )
        is_split = self.master_weights == "split"
        if is_split and self.param is not torch.bfloat16:
            raise ConfigError(
                "master_weights='split' stores float32 values as bfloat16 parameters and 16 bits, "
                f"and the parameters of {self.name} are {self.param}; take bf16-O2, or True"
            )
        for name, contradiction in (("keep_batchnorm_fp32", False), ("master_weights", True)):
            value = True if name == "master_weights" and is_split else getattr(self, name)
            if not isinstance(value, bool) and (self.casts_model or value is not None):
                raise ConfigError(f"{name} must be True or False at {self.name}, not {value!r}")
            contradicts = value is not None if self.autocasts else value is contradiction
            if contradicts and not self.casts_model:
                raise ConfigError(
                    f"{name}={value} contradicts {self.name}, whose parameters are float32 "
                    "already; leave it out, or take fp16-O2 or fp16-O3, whose model is cast"
                )
        beside = (self.param, self.compute) == (torch.float32, torch.bfloat16)
        if self.float8 is not None and not (self.float8 in ("tensorwise", "rowwise") and beside):
            raise ConfigError(
                "float8 must be 'tensorwise' or 'rowwise', in a region of bfloat16 over float32 "
                f"parameters, not {self.float8!r} at {self.name}; take fp8 or fp8-rowwise"
            )
        if self.float8_all_gather and self.float8 != "tensorwise":
            raise ConfigError(
                "float8_all_gather gathers shards under one scale for each weight: it needs "
                f"float8='tensorwise', not {self.float8!r}; take fp8"
            )
        scale = self.loss_scale
        number = isinstance(scale, float) and math.isfinite(scale) and scale > 0
        if scale != "dynamic" and not number:
            raise ConfigError(f"loss_scale must be 'dynamic' or a number > 0, not {scale!r}")
        for pattern, pin in self.pins:
            if not isinstance(pattern, str):
                raise ConfigError(
                    f"module_precision= has the key {pattern!r}. Its keys must be shell patterns "
                    "over module names, as in {'*.norm': 'fp32'}."
                )
            if pin not in _PINS:
                choices = choices_text(_PINS)
                hint = similar_names(pin, _PINS)
                raise ConfigError(
                    f"module_precision= has no precision {pin!r} for the pattern {pattern!r}. "
                    f"Choose from {choices}. {hint}"
                )

    @classmethod
    def from_name(
        cls,
        level: LevelLike,
        *,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | Literal["split"] | None = None,
        loss_scale: float | str | None = None,
        module_precision: Mapping[str, str] | None = None,
    ) -> PrecisionLevel:
        """Return a row of `LEVELS`, with some of it overridden as in Apex.

        Args:
            level: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"fp8"``, ``"fp8-rowwise"``,
                ``"fp16-O2"``, ``"fp16-O3"``, ``"bf16-O2"`` or ``"bf16-O3"``; Apex's ``"O0"`` to
                ``"O3"``, which are fp32, fp16, fp16-O2 and fp16-O3; ``torch.float32``,
                ``torch.float16`` or ``torch.bfloat16``, for the level of that name; or your own
                value. Upper and lower case are the same.
            keep_batchnorm_fp32: Overrides the row's; also ``"True"`` and ``"False"``, as a
                command line gives them. None keeps the row's value, here and below.
            master_weights: Overrides the row's.
            loss_scale: Overrides the row's; a number, also as text, or ``"dynamic"``.
            module_precision: Its ``pins``, as a mapping: ``{"*.norm": "fp32", "lm_head":
                "fp32:keep_output"}``.

        Raises:
            ConfigError: There is no such level, or the override contradicts it.
        """
        row = level if isinstance(level, PrecisionLevel) else _level_named(level)
        words = {"True": True, "False": False}
        overrides = {
            "keep_batchnorm_fp32": words.get(str(keep_batchnorm_fp32), keep_batchnorm_fp32),
            "master_weights": master_weights,
            "loss_scale": _number(loss_scale),
            "pins": None if module_precision is None else _pairs(module_precision),
        }
        return row.replace(
            **{name: value for name, value in overrides.items() if value is not None}
        )

    def contract(self, *models: Any) -> dict[str, Any]:
        """Return what this level promises of each part of a step: `PrecisionContract`'s arguments.

        ``PrecisionContract(**level.contract(model))`` is the contract; ``amp.check(step)`` checks
        it.

        Args:
            models: Whose parameters at a level that casts may be FSDP's float32 shards, which are
                the masters, and whose batch norms stay float32.
        """
        param, compute = _SHORT[self.param], _SHORT[self.compute]
        either = tuple(dict.fromkeys(("fp32", compute)))
        # torchao sends the scales of rows in float64.
        sent = (*either, "fp64") if self.float8 == "rowwise" else either
        # Names become shell patterns, and "*" matches the model itself.
        modules = {
            glob.escape(name) or "*": module
            for model in models
            for module, name in module_names(model).items()
        }
        norms = [name for name, each in modules.items() if "BatchNorm" in type(each).__name__]
        kept = norms if self.casts_model and self.keep_batchnorm_fp32 else []
        pins = {name: pin.split(":")[0] for name, pin in self.pins}
        if models:
            # Those that are there, also by the model's owner.
            dtypes = {name: getattr(each, "distamp_pin", None) for name, each in modules.items()}
            dtypes = {name: getattr(pin, "dtype", None) for name, pin in dtypes.items()}
            pins = {name: _SHORT[dtype] for name, dtype in dtypes.items() if dtype in _SHORT}
        half = not models or any(p.dtype is self.param for m in models for p in m.parameters())
        steps: object = "fp32" if self.master_weights or not self.casts_model else param
        if steps == param and (kept or pins):
            steps = either
        # A pipeline schedule sends what a stage returns, which a level that casts may widen.
        returned = {}
        if self.casts_model and self.output is not None and self.output is not self.compute:
            returned["activations"] = (compute, _SHORT[self.output])
        return {
            "parameters": param if half else "fp32",
            "compute": compute if self.float8 is None else (compute, "fp8"),
            "norms": either,
            "param_all_gather": (*either, "fp8")[: 3 if self.float8_all_gather else 2]
            # FSDP gathers the next unit while this one runs, so what is kept shows anywhere.
            if self.autocasts or kept or pins
            else compute,
            # A policy may reduce in more, as FSDP's pages advise.
            "grad_reduce": either if self.casts_model else (_SHORT[self.reduce],),
            "activations": sent if self.autocasts else compute,
            "master_weights": steps,
            "optimizer_state": steps,
            "modules": {
                **{name: {"parameters": "fp32"} for name in kept},
                **{name: self._of_pinned(pin) for name, pin in pins.items()},
                **({_OUTSIDE: returned} if returned else {}),
            },
        }

    def _of_pinned(self, pin: str) -> dict[str, object]:
        parameters = {"parameters": (pin, "fp32")} if self.casts_model else {}
        return parameters | {"compute": pin, "norms": (pin, "fp32")}

    def replace(self, **changes: object) -> Self:
        """Return a copy with some fields changed, checked as a whole."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _unknown_level_text(level: object) -> str:
    """Return an error message for a level that does not exist, with a similar level."""
    name = str(level)
    name = name.removeprefix("torch.")
    if name.startswith("0"):
        hint = f"Did you mean 'O{name[1:]}', with the letter O?"
    else:
        hint = similar_names(name, list(LEVELS))
    choices = choices_text(LEVELS)
    return f"There is no level {level!r:.80}. Choose from {choices}. {hint}"


def _pairs(module_precision: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(module_precision, Mapping):
        raise ConfigError(
            "module_precision= must map patterns over module names to precisions, as in "
            f"{{'*.norm': 'fp32'}}, not {module_precision!r:.80}."
        )
    return tuple(module_precision.items())


def _level_named(name: object) -> PrecisionLevel:
    """Return the row of `LEVELS` for its name, Apex's name of it or a dtype.

    Raises:
        ConfigError: There is no such level. The error names a similar one.
    """
    key = _SHORT.get(name) if isinstance(name, torch.dtype) else name
    row = _BY_LOWER_NAME.get(key.lower()) if isinstance(key, str) else None
    if row is None:
        raise ConfigError(_unknown_level_text(name))
    return row


def _number(value: object) -> object:
    """Return a loss scale as a float where it is one, also as text; else what was given."""
    try:
        return value if value is None or isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return value


_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_DYNAMIC: Literal["dynamic"] = "dynamic"

#: Every level by name.
LEVELS: Mapping[str, PrecisionLevel] = MappingProxyType(
    {
        row.name: row
        for row in (
            #         level      param  compute reduce output  batch norm, masters, loss scale
            PrecisionLevel("fp32", _F32, _F32, _F32, _F32, None, False, 1.0),
            PrecisionLevel("fp16", _F32, _F16, _F32, None, None, None, _DYNAMIC),
            PrecisionLevel("fp16-O2", _F16, _F16, _F16, _F32, True, True, _DYNAMIC),
            PrecisionLevel("fp16-O3", _F16, _F16, _F16, _F32, False, False, 1.0),
            PrecisionLevel("bf16", _F32, _BF16, _F32, None, None, None, 1.0),
            PrecisionLevel("bf16-O2", _BF16, _BF16, _BF16, _F32, True, True, 1.0),
            PrecisionLevel("bf16-O3", _BF16, _BF16, _BF16, _F32, False, False, 1.0),
            PrecisionLevel("fp8", _F32, _BF16, _F32, None, None, None, 1.0, float8="tensorwise"),
            PrecisionLevel(
                "fp8-rowwise", _F32, _BF16, _F32, None, None, None, 1.0, float8="rowwise"
            ),
        )
    }
)

#: Apex's names of levels.
APEX_NAMES: Mapping[str, str] = MappingProxyType(
    {"O0": "fp32", "O1": "fp16", "O2": "fp16-O2", "O3": "fp16-O3"}
)
_BY_LOWER_NAME = {name.lower(): row for name, row in LEVELS.items()}
_BY_LOWER_NAME |= {apex.lower(): LEVELS[name] for apex, name in APEX_NAMES.items()}
