"""Conversion of linear layers to the recipe of a level, such as float8."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from distamp.autocast.module_precision import get_module_precision
from distamp.errors import ConfigError
from distamp.levels.fp32_modules import keep_in_fp32_modules, output_embeddings
from distamp.linear_recipe import LINEAR_RECIPES, LinearRecipe, recipe_of
from distamp.precision_level import PrecisionLevel

__all__ = ["check_device_support", "convert_linear_layers", "float8_layers"]

_logger = logging.getLogger("distamp.levels")
_HOOK_ATTRS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEFAULT_RECIPE = "float8"


def float8_layers(model: nn.Module) -> dict[str, str]:
    """Return for every linear layer that it computes in float8, or the reason that it does not.

    The function looks at the model in its present state, so it serves for a model that torchao
    converted without distamp, too.

    Args:
        model: Before or after `cast_model` and the wrapper.

    Returns:
        By module name ``"float8"`` (the ``label`` of its `LinearRecipe`), the reason against the
        conversion, or an empty text for a layer that `cast_model` would convert.
    """
    return _linear_layers(model, LINEAR_RECIPES[_DEFAULT_RECIPE])


def _linear_layers(model: nn.Module, recipe: LinearRecipe) -> dict[str, str]:
    exclusions = _excluded_modules(model)
    head = output_embeddings(model)
    uses: Counter[int] = Counter()
    for module in model.modules():
        for param in module.parameters(recurse=False):
            uses[id(param)] += 1
    layers: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        converted_to = recipe_of(module)
        if converted_to is not None:
            layers[name] = converted_to.label
            continue
        reason = exclusions[name] or _ineligible_reason(module, uses, recipe)
        if not reason and module is head:
            reason = "what the model returns"
        layers[name] = reason
    return layers


def _excluded_modules(model: nn.Module) -> dict[str, str]:
    """Return for every module the reason for which it or a module around it is not converted."""
    declared_ids = {id(owner) for owner in keep_in_fp32_modules(model)}
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        parent_name, _, _ = name.rpartition(".")
        precision = get_module_precision(module)
        reason = reasons.get(parent_name, "")
        if precision is not None:
            reason = f"pinned to {precision.dtype}"
        elif not reason and id(module) in declared_ids:
            reason = "declared fp32 by its owner"
        reasons[name] = reason
    return reasons


def _ineligible_reason(layer: nn.Linear, uses: Counter[int], recipe: LinearRecipe) -> str:
    """Return the reason for which a layer cannot be converted, or an empty text."""
    multiple = recipe.size_multiple
    if type(layer) is not nn.Linear:
        return f"a {type(layer).__name__}, with a forward or a use of its own"
    if any(getattr(layer, attribute) for attribute in _HOOK_ATTRS):
        return "it has hooks, which conversion drops"
    if layer.in_features % multiple or layer.out_features % multiple:
        return (
            f"sizes {layer.in_features} and {layer.out_features}, and the kernels take multiples "
            f"of {multiple}"
        )
    if uses[id(layer.weight)] > 1:
        return "it shares its weight"
    return ""


def convert_linear_layers(model: nn.Module, level: PrecisionLevel) -> None:
    """Convert every linear layer that the recipe of a level can compute, in place.

    Raises:
        ConfigError: The library of the recipe is not installed, the model is itself a linear layer,
            or no layer can be converted.
    """
    recipe = _recipe(level)
    layers = _linear_layers(model, recipe)
    eligible = {name for name, reason in layers.items() if not reason}
    if not eligible or "" in eligible:
        reasons = "; ".join(
            f"{name or 'the model itself'}: {reason}" for name, reason in layers.items()
        )
        raise ConfigError(
            f"{level.name} finds no layer inside the model that can compute in {recipe.label} "
            f"({reasons or 'it has no torch.nn.Linear'}). Use bf16."
        )
    device = next(model.parameters()).device
    if device.type == "meta":
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    emulate = not recipe.has_kernels(device)
    try:
        recipe.convert(model, eligible, emulate=emulate, narrow_all_gather=level.float8_all_gather)
    except ImportError as error:
        package, extra = recipe.package
        raise ConfigError(
            f"{level.name} computes by {package}, which cannot be imported ({error}). Install "
            f"{extra}, or use bf16."
        ) from error
    for module in model.modules():
        if recipe.is_converted(module):
            module.register_forward_pre_hook(_cast_input_for_autocast)
    counts = f"{len(eligible)} of {len(layers)} linear layers compute in {recipe.label}"
    if emulate:
        _logger.warning(
            "%s, emulated. This %s has no kernels for it, so results are right, and slow.",
            counts,
            device.type,
        )
    else:
        _logger.info("%s.", counts)


def _recipe(level: PrecisionLevel) -> LinearRecipe:
    assert level.linear_recipe is not None
    return LINEAR_RECIPES[level.linear_recipe]


def check_device_support(
    models: Iterable[nn.Module], device: torch.device, level: PrecisionLevel
) -> None:
    """Refuse layers that were converted for another device than their present one.

    Raises:
        ConfigError: Layers emulate on a device with kernels, or need kernels that the device does
            not have.
    """
    recipe = _recipe(level)
    has_kernels = recipe.has_kernels(device)
    num_wrong = 0
    for model in models:
        for module in model.modules():
            if recipe.is_converted(module) and recipe.is_emulated(module) is has_kernels:
                num_wrong += 1
    if num_wrong:
        converted = "by emulation" if has_kernels else "by kernels"
        missing = "has kernels for it" if has_kernels else "has no kernels for it"
        raise ConfigError(
            f"{num_wrong} layers were converted to compute in {recipe.label} {converted}, and the "
            f"model is now on {device.type}, which {missing}. Move the model to its device first, "
            "then call cast_model()."
        )


def _cast_input_for_autocast(module: nn.Module, args: tuple[Any, ...]) -> Any:
    """Cast the input of a layer as its region would; torchao's layers look at CUDA's alone."""
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not torch.is_autocast_enabled(first.device.type):
        return None
    return (first.to(torch.get_autocast_dtype(first.device.type)), *args[1:])
