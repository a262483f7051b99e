"""Precision levels as values: the dtype of each part of training, and the settings with it."""

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
from distamp.linear_recipe import LINEAR_RECIPES
from distamp.module_names import module_names

__all__ = ["APEX_NAMES", "LEVELS", "LevelLike", "PrecisionLevel"]

#: A level as an argument: its name, the dtype of that name, or the level itself.
LevelLike: TypeAlias = "str | torch.dtype | PrecisionLevel"

_HALF = (torch.float16, torch.bfloat16)
_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# The name under which reports list the operations that run in no module.
_NO_MODULE = "(outside)"
_PIN_NAMES = ("fp32", "fp16", "bf16", "fp32:keep_output", "fp16:keep_output", "bf16:keep_output")


@dataclass(frozen=True)
class PrecisionLevel:
    """The dtypes of one way to train, and the settings that follow from them.

    Differs from Apex's properties in that it is an immutable value, and that a combination of
    settings that contradict each other raises. `PrecisionLevel.from_name` returns the rows of
    `LEVELS`.

    Args:
        name: The name of the level, such as ``"bf16"``.
        param: The dtype of the model's parameters and floating buffers.
        compute: The dtype of matrix products and convolutions. If it differs from ``param``,
            autocast casts op by op. Otherwise every op runs in the dtype of the parameters.
        reduce: The dtype of gradients when ranks add them up.
        output: The dtype to which the model's outputs are cast; None leaves them unchanged.
        keep_batchnorm_fp32: Whether batch norms stay in float32 in a model of another dtype; None
            if there is no such model.
        master_weights: Whether the optimizer steps float32 copies of the parameters. ``"split"``
            stores the copies as bfloat16 parameters and 16-bit remainders. None if the parameters
            themselves are float32.
        loss_scale: ``"dynamic"``, or a constant; 1.0 does not scale.
        pins: Modules in a precision of their own, as pairs of a shell pattern over module names
            and a precision that `distamp.set_module_precision` accepts by name. If several patterns
            match a module, the last counts.
        linear_recipe: The name of the `LinearRecipe` by which linear layers compute, such as
            ``"float8"``; None if they compute as the rest of the model.
        float8_all_gather: True if FSDP2 gathers the weights of the recipe's layers in float8.

    Raises:
        ConfigError: A setting is unknown, or contradicts another setting.

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
    linear_recipe: str | None = None
    float8_all_gather: bool = False

    @property
    def autocasts(self) -> bool:
        """True if an autocast region casts ops one by one."""
        return self.compute is not self.param

    @property
    def casts_model(self) -> bool:
        """True if the model's own parameters are in half precision."""
        return self.param in _HALF

    @property
    def changes_model(self) -> bool:
        """True if the model itself is changed, before any wrapper."""
        return self.casts_model or self.linear_recipe is not None

    @property
    def scales(self) -> bool:
        """True if a scaler runs, which skips steps that overflow.

        A scaler also runs at a constant scale of 1.0 if gradients are float16, because they may
        overflow at any scale.
        """
        return self.loss_scale != 1.0 or self.compute is torch.float16

    def __post_init__(self) -> None:
        self._check_dtypes()
        if self.master_weights == "split":
            self._check_split_masters()
        self._check_option("keep_batchnorm_fp32", self.keep_batchnorm_fp32, contradiction=False)
        # Split masters need half-precision parameters, so they contradict no level here.
        if self.master_weights != "split":
            self._check_option("master_weights", self.master_weights, contradiction=True)
        self._check_linear_recipe()
        self._check_loss_scale()
        self._check_pins()

    def _check_dtypes(self) -> None:
        for name in ("param", "compute", "reduce", "output"):
            dtype = getattr(self, name)
            if name == "output" and dtype is None:
                continue
            if dtype not in (torch.float32, *_HALF):
                raise ConfigError(
                    f"{name} must be torch.float32, torch.float16 or torch.bfloat16, not {dtype!r}."
                )
        if self.autocasts and self.param is not torch.float32:
            raise ConfigError(
                f"compute={self.compute} contradicts param={self.param}, because autocast casts "
                "from float32 weights. Set param=torch.float32, or set compute and param to the "
                "same dtype."
            )

    def _check_split_masters(self) -> None:
        if self.param is not torch.bfloat16:
            raise ConfigError(
                "master_weights='split' stores float32 values as bfloat16 parameters and 16 bits, "
                f"but the parameters of {self.name} are {self.param}. Use bf16-O2, or "
                "master_weights=True at a level with half-precision parameters."
            )

    def _check_option(self, name: str, value: object, contradiction: bool) -> None:
        """Check an option that only levels with half-precision parameters have.

        Args:
            name: The name of the option.
            value: The value of the option.
            contradiction: The value that float32 training without autocast cannot have.
        """
        if not isinstance(value, bool) and (self.casts_model or value is not None):
            raise ConfigError(f"{name} must be True or False at {self.name}, not {value!r}.")
        if self.casts_model:
            return
        contradicts = value is contradiction
        if self.autocasts:
            contradicts = value is not None
        if contradicts:
            raise ConfigError(
                f"{name}={value} contradicts {self.name}, because its parameters are float32 "
                "already. Leave it out, or use fp16-O2 or fp16-O3, which cast the model."
            )

    def _check_linear_recipe(self) -> None:
        recipe = None
        if self.linear_recipe is not None:
            recipe = LINEAR_RECIPES.get(self.linear_recipe)
            is_bf16_region = self.autocasts and self.compute is torch.bfloat16
            if recipe is None or not is_bf16_region:
                raise ConfigError(
                    f"linear_recipe={self.linear_recipe!r} is not possible at {self.name}. A "
                    f"recipe must be one of {choices_text(LINEAR_RECIPES)}, in a region of "
                    "bfloat16 over float32 parameters. Use fp8 or fp8-rowwise."
                )
        if self.float8_all_gather and (recipe is None or not recipe.gathers_narrow):
            raise ConfigError(
                "float8_all_gather=True gathers shards with one scale for each weight, so it needs "
                f"linear_recipe='float8', not {self.linear_recipe!r}. Use fp8."
            )

    def _check_loss_scale(self) -> None:
        loss_scale = self.loss_scale
        if loss_scale == "dynamic":
            return
        is_finite = isinstance(loss_scale, float) and math.isfinite(loss_scale)
        if not is_finite or loss_scale <= 0:
            raise ConfigError(f"loss_scale must be 'dynamic' or a number > 0, not {loss_scale!r}.")

    def _check_pins(self) -> None:
        for pattern, pin in self.pins:
            if not isinstance(pattern, str):
                raise ConfigError(
                    f"module_precision= has the key {pattern!r}. Its keys must be shell patterns "
                    "over module names, as in {'*.norm': 'fp32'}."
                )
            if pin not in _PIN_NAMES:
                choices = choices_text(_PIN_NAMES)
                hint = similar_names(pin, _PIN_NAMES)
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
        """Return a row of `LEVELS`, with overrides as in Apex.

        Args:
            level: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"fp8"``, ``"fp8-rowwise"``,
                ``"fp16-O2"``, ``"fp16-O3"``, ``"bf16-O2"`` or ``"bf16-O3"``; Apex's ``"O0"`` to
                ``"O3"``, which are fp32, fp16, fp16-O2 and fp16-O3; ``torch.float32``,
                ``torch.float16`` or ``torch.bfloat16``, for the level of that name; or a level.
                Names may be in upper or lower case.
            keep_batchnorm_fp32: True, False, or the text ``"True"`` or ``"False"`` of a command
                line. None leaves the row's value unchanged, also in the arguments below.
            master_weights: True, False or ``"split"``.
            loss_scale: A number, also as text, or ``"dynamic"``.
            module_precision: The ``pins`` as a mapping: ``{"*.norm": "fp32", "lm_head":
                "fp32:keep_output"}``.

        Raises:
            ConfigError: There is no such level, or an override contradicts it.
        """
        row = level if isinstance(level, PrecisionLevel) else _find_level(level)
        overrides: dict[str, object] = {}
        if keep_batchnorm_fp32 is not None:
            overrides["keep_batchnorm_fp32"] = _parse_bool(keep_batchnorm_fp32)
        if master_weights is not None:
            overrides["master_weights"] = master_weights
        if loss_scale is not None:
            overrides["loss_scale"] = _parse_loss_scale(loss_scale)
        if module_precision is not None:
            overrides["pins"] = _as_pairs(module_precision)
        return row.replace(**overrides)

    def contract(self, *models: Any) -> dict[str, Any]:
        """Return the arguments of the `PrecisionContract` that this level declares.

        ``PrecisionContract(**level.contract(model))`` is the contract; ``amp.check(step)`` checks
        it.

        Args:
            models: The models of the step. At a level that casts, FSDP's parameters may be float32
                shards, which are the masters, and batch norms may stay float32.
        """
        param = _DTYPE_NAMES[self.param]
        compute = _DTYPE_NAMES[self.compute]
        fp32_or_compute: tuple[str, ...] = ("fp32",)
        if compute != "fp32":
            fp32_or_compute = ("fp32", compute)
        modules = _modules_by_pattern(models)
        fp32_batch_norms: list[str] = []
        if self.casts_model and self.keep_batchnorm_fp32:
            fp32_batch_norms = _batch_norms(modules)
        pins: dict[str, str] = {}
        for pattern, pin in self.pins:
            pins[pattern] = pin.removesuffix(":keep_output")
        if models:
            pins = _pinned_dtypes(modules)
        has_other_dtypes = bool(fp32_batch_norms or pins)

        parameters = "fp32"
        if self._has_cast_params(models):
            parameters = param

        computed: object = compute
        narrow_dtypes: tuple[str, ...] = ()
        if self.linear_recipe is not None:
            recipe = LINEAR_RECIPES[self.linear_recipe]
            narrow_dtypes = recipe.dtype_names
            computed = (compute, *narrow_dtypes)

        stepped: object = "fp32"
        if self.casts_model and not self.master_weights:
            stepped = param
        if stepped == param and has_other_dtypes:
            stepped = fp32_or_compute

        # FSDP gathers the next unit while this unit runs, so the dtypes of float32 and pinned
        # modules appear in any module.
        gathered: object = compute
        if self.autocasts or has_other_dtypes:
            gathered = fp32_or_compute
        if self.float8_all_gather:
            gathered = (*fp32_or_compute, *narrow_dtypes)

        sent: object = compute
        if self.autocasts:
            sent = fp32_or_compute
        if self.linear_recipe is not None:
            sent = (*fp32_or_compute, *recipe.message_dtype_names)

        reduced: object = (_DTYPE_NAMES[self.reduce],)
        if self.casts_model:
            # A MixedPrecisionPolicy may reduce in float32, as FSDP's documentation advises.
            reduced = fp32_or_compute

        module_contracts: dict[str, dict[str, object]] = {}
        for pattern in fp32_batch_norms:
            module_contracts[pattern] = {"parameters": "fp32"}
        for pattern, dtype_name in pins.items():
            module_contracts[pattern] = self._pinned_contract(dtype_name)
        if self.casts_model and self.output not in (None, self.compute):
            # A pipeline schedule sends the output of a stage, which such a level widens.
            output = _DTYPE_NAMES[self.output]
            module_contracts[_NO_MODULE] = {"activations": (compute, output)}

        return {
            "parameters": parameters,
            "compute": computed,
            "norms": fp32_or_compute,
            "param_all_gather": gathered,
            "grad_reduce": reduced,
            "activations": sent,
            "master_weights": stepped,
            "optimizer_state": stepped,
            "modules": module_contracts,
        }

    def _has_cast_params(self, models: tuple[Any, ...]) -> bool:
        """Return whether a model has a parameter of the level's dtype; True without a model."""
        if not models:
            return True
        for model in models:
            if any(param.dtype is self.param for param in model.parameters()):
                return True
        return False

    def _pinned_contract(self, dtype_name: str) -> dict[str, object]:
        """Return the contract of a pinned module."""
        contract: dict[str, object] = {}
        if self.casts_model:
            contract["parameters"] = (dtype_name, "fp32")
        contract["compute"] = dtype_name
        contract["norms"] = (dtype_name, "fp32")
        return contract

    def replace(self, **changes: object) -> Self:
        """Return a copy with other values of some fields, which is checked again."""
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


def _modules_by_pattern(models: tuple[Any, ...]) -> dict[str, Any]:
    """Return the modules of all models by a shell pattern that matches only their name."""
    modules: dict[str, Any] = {}
    for model in models:
        for module, name in module_names(model).items():
            # The name of a model itself is empty, and "*" matches it.
            pattern = glob.escape(name) or "*"
            modules[pattern] = module
    return modules


def _batch_norms(modules: Mapping[str, Any]) -> list[str]:
    """Return the patterns of batch norms."""
    patterns: list[str] = []
    for pattern, module in modules.items():
        if "BatchNorm" in type(module).__name__:
            patterns.append(pattern)
    return patterns


def _pinned_dtypes(modules: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the dtypes of pinned modules, also of pins that the user set."""
    dtype_names: dict[str, str] = {}
    for pattern, module in modules.items():
        pin = getattr(module, "distamp_pin", None)
        dtype = getattr(pin, "dtype", None)
        if dtype in _DTYPE_NAMES:
            dtype_names[pattern] = _DTYPE_NAMES[dtype]
    return dtype_names


def _as_pairs(module_precision: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(module_precision, Mapping):
        raise ConfigError(
            "module_precision= must map patterns over module names to precisions, as in "
            f"{{'*.norm': 'fp32'}}, not {module_precision!r:.80}."
        )
    return tuple(module_precision.items())


def _find_level(name: object) -> PrecisionLevel:
    """Return the row of `LEVELS` for its name, Apex's name of it or a dtype.

    Raises:
        ConfigError: There is no such level. The error names a similar level.
    """
    level_name = name
    if isinstance(name, torch.dtype):
        level_name = _DTYPE_NAMES.get(name)
    row = None
    if isinstance(level_name, str):
        row = _BY_LOWER_NAME.get(level_name.lower())
    if row is None:
        raise ConfigError(_unknown_level_text(name))
    return row


def _parse_bool(value: object) -> object:
    """Return the bool that a text stands for; any other value unchanged."""
    booleans = {"True": True, "False": False}
    return booleans.get(str(value), value)


def _parse_loss_scale(value: object) -> object:
    """Return a number, also as text, as a float; any other value unchanged."""
    if isinstance(value, bool):
        return value
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return value


_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_DYNAMIC: Literal["dynamic"] = "dynamic"

#          level      param  compute reduce output  batch norm, masters, loss scale, pins, recipe
_ROWS = (
    PrecisionLevel("fp32", _F32, _F32, _F32, _F32, None, False, 1.0),
    PrecisionLevel("fp16", _F32, _F16, _F32, None, None, None, _DYNAMIC),
    PrecisionLevel("fp16-O2", _F16, _F16, _F16, _F32, True, True, _DYNAMIC),
    PrecisionLevel("fp16-O3", _F16, _F16, _F16, _F32, False, False, 1.0),
    PrecisionLevel("bf16", _F32, _BF16, _F32, None, None, None, 1.0),
    PrecisionLevel("bf16-O2", _BF16, _BF16, _BF16, _F32, True, True, 1.0),
    PrecisionLevel("bf16-O3", _BF16, _BF16, _BF16, _F32, False, False, 1.0),
    PrecisionLevel("fp8", _F32, _BF16, _F32, None, None, None, 1.0, (), "float8"),
    PrecisionLevel("fp8-rowwise", _F32, _BF16, _F32, None, None, None, 1.0, (), "float8-rowwise"),
)

#: Every level by name.
LEVELS: Mapping[str, PrecisionLevel] = MappingProxyType({row.name: row for row in _ROWS})

#: Apex's names of levels.
APEX_NAMES: Mapping[str, str] = MappingProxyType(
    {"O0": "fp32", "O1": "fp16", "O2": "fp16-O2", "O3": "fp16-O3"}
)
_BY_LOWER_NAME = {name.lower(): row for name, row in LEVELS.items()}
for _apex_name, _name in APEX_NAMES.items():
    _BY_LOWER_NAME[_apex_name.lower()] = LEVELS[_name]
