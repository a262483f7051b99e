"""Linear layers that compute in float8, by torchao: which of them, and why the others do not."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from distamp.autocast.module_precision import get_module_precision
from distamp.errors import ConfigError
from distamp.levels.kept import declared
from distamp.precision_level import PrecisionLevel

__all__ = ["check_kernels", "computes_in_float8", "convert", "float8_layers"]

_log = logging.getLogger("distamp.initialize")
_CONVERTED = "float8"
# What the kernels take: both sizes of a weight.
_MULTIPLE = 16
# Of NVIDIA's devices, the first whose kernels take each scaling.
_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}


def float8_layers(model: nn.Module) -> dict[str, str]:
    """Return for every linear layer whether it computes in float8, and if not, why.

    Asked of the model as it is, so it holds for one that torchao converted by itself, too.

    Args:
        model: Before or after `cast_model` and the wrapper.

    Returns:
        By module name ``"float8"``, the reason against it, or nothing for a layer that
        `cast_model` would convert.
    """
    said: dict[str, str] = {}
    owners = {id(each) for each in declared(model)}
    for name, module in model.named_modules():
        pin = get_module_precision(module)
        owned = "declared fp32 by its owner" if id(module) in owners else ""
        around = said.get(name.rpartition(".")[0], "")
        said[name] = f"pinned to {pin.dtype}" if pin is not None else around or owned
    head = getattr(model, "get_output_embeddings", lambda: None)()
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    return {
        name: _CONVERTED
        if computes_in_float8(module)
        else said[name]
        or _why(module, uses)
        or ("what the model returns" if module is head else "")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }


def _why(module: nn.Linear, uses: Counter[int]) -> str:
    """Return why a layer cannot be converted; nothing where it can."""
    sizes = module.in_features, module.out_features
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__}, with a forward or a use of its own"
    if any(getattr(module, name) for name in hooks):
        return "it has hooks, which conversion drops"
    if any(size % _MULTIPLE for size in sizes):
        return f"sizes {sizes[0]} and {sizes[1]}, and the kernels take multiples of {_MULTIPLE}"
    return "it shares its weight" if uses[id(module.weight)] > 1 else ""


def computes_in_float8(module: nn.Module) -> bool:
    """Return whether this very module was converted by torchao."""
    return any(kind.__name__ == "Float8Linear" for kind in type(module).__mro__)


def convert(model: nn.Module, level: PrecisionLevel) -> None:
    """Let every linear layer of a model that can compute in float8, in place.

    Raises:
        ConfigError: torchao is not installed, the model is itself a layer, or none can.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError(
            f"{level.name} computes by torchao, which cannot be imported ({error}); install "
            "distamp[fp8], or take bf16"
        ) from error
    layers = float8_layers(model)
    if "" in layers or "" not in layers.values():
        reasons = "; ".join(f"{name or 'the model itself'}: {why}" for name, why in layers.items())
        raise ConfigError(
            f"{level.name} finds no layer inside the model that can compute in float8 "
            f"({reasons or 'it has no torch.nn.Linear'}); take bf16"
        )
    device = next(model.parameters()).device
    if device.type == "meta":
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    emulate = not _has_kernels(device, level)
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(str(level.float8)),
        emulate=emulate,
        enable_fsdp_float8_all_gather=level.float8_all_gather,
    )
    wanted = {name for name, why in layers.items() if not why}
    convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name in wanted, config=config
    )
    for module in filter(computes_in_float8, model.modules()):
        module.register_forward_pre_hook(_in_region)
    how = f", emulated: this {device.type} has no kernels; right, and slow" if emulate else ""
    severity = logging.WARNING if emulate else logging.INFO
    _log.log(severity, "%d of %d linear layers compute in float8%s", len(wanted), len(layers), how)


def _has_kernels(device: torch.device, level: PrecisionLevel) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return device.type == "cuda"
    return torch.cuda.get_device_capability(device) >= _CAPABILITY[str(level.float8)]


def check_kernels(models: Iterable[nn.Module], device: torch.device, level: PrecisionLevel) -> None:
    """Refuse layers that were converted for another device than the one they compute on.

    Raises:
        ConfigError: They emulate float8 where there are kernels, or need kernels that are not.
    """
    layers: list[Any] = [m for model in models for m in model.modules() if computes_in_float8(m)]
    wrong = [layer for layer in layers if layer.config.emulate is _has_kernels(device, level)]
    if wrong:
        how = "emulated" if wrong[0].config.emulate else "by kernels"
        raise ConfigError(
            f"{len(wrong)} layers were converted to compute in float8 {how}, and the model is now "
            f"on {device.type}, where that is otherwise; move the model to its device first, then "
            "cast_model"
        )


def _in_region(module: nn.Module, args: tuple[Any, ...]) -> Any:
    """Cast what comes in as the region would: Float8Linear asks for CUDA's region alone."""
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not torch.is_autocast_enabled(first.device.type):
        return None
    return (first.to(torch.get_autocast_dtype(first.device.type)), *args[1:])
