"""`set_module_precision`, which makes one module of a model compute in another precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from distamp.autocast.compiled_backward import warn_of_module
from distamp.autocast.region import autocast
from distamp.error_text import choices_text, similar_names
from distamp.linear_recipe import recipe_of

__all__ = ["MODULE_PRECISIONS", "ModulePrecision", "get_module_precision", "set_module_precision"]

_M = TypeVar("_M", bound=nn.Module)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: The names that `set_module_precision` takes.
MODULE_PRECISIONS = (*_DTYPES, *(f"{name}:keep_output" for name in _DTYPES))
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ModulePrecision:
    """The precision of one module, an attribute of the instance that its copies keep.

    Args:
        dtype: The dtype that it computes in.
        keep_output: Whether its output stays in that dtype in a half-precision model.
        model_dtype: The dtype of the model around, which decides if the inputs do not.
    """

    dtype: torch.dtype
    keep_output: bool = False
    model_dtype: torch.dtype | None = None


def set_module_precision(
    module: _M, dtype: str | torch.dtype | None, *, model_dtype: torch.dtype | None = None
) -> _M:
    """Make a module, and the modules inside it, compute in one precision in any region.

    torch needs a nested ``autocast(enabled=False)`` for this, and casts of inputs, weights and
    outputs, at each call of the module. ``"fp32"`` runs the module with autocast off, and takes
    half-precision inputs and parameters in float32. A half precision runs it in a region of that
    dtype, inside a region or not. Apex's counterpart is ``@float_function`` on ``forward``.

    Outside of a region, a half-precision input shows that the model around computes in half
    precision, and the output is cast back to that dtype. The input may be any tensor among the
    arguments, keyword arguments and the containers in them, so ``forward(timestep_fp32,
    hidden_bf16)`` returns bfloat16. ``"fp32:keep_output"`` leaves the output in float32, for a
    router, or a head with log-probabilities that matter. In a region nothing is cast back, because
    autocast casts the inputs of the next layer.

    The precision is an attribute of the instance. Wrappers around the module, applied before or
    after (``fully_shard``, parametrizations, adapters, ``torch.compile``), stay when it is removed.

    Args:
        module: The module; it is changed in place.
        dtype: ``"fp32"``, ``"fp16"``, ``"bf16"``, each also with ``":keep_output"``, or the
            :class:`torch.dtype`. None removes the precision, so that the module follows the region
            it is called in.
        model_dtype: The dtype of the model around. The output is cast back to it if no input is
            floating point, as of an embedding, or if inputs have both half precisions.

    Returns:
        The module.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: Another ``dtype``; or a scripted module, a module with a replaced
            ``forward``, or a module with a layer that was converted to a `LinearRecipe`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, got {type(module).__name__}. Around a call, "
            "use autocast(device_type, enabled=False)."
        )
    target_dtype, keep_output = _parse_precision(dtype)
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        raise ValueError(
            f"The forward of this {type(module).__name__} is not the forward of its class, so its "
            "precision cannot be set. Set it before the module is scripted or its forward replaced."
        )
    if target_dtype is None:
        _remove_precision(module)
        return module
    for submodule in module.modules():
        recipe = recipe_of(submodule)
        if recipe is not None:
            raise ValueError(
                f"The {type(module).__name__} has a {type(submodule).__name__}, which computes in "
                f"{recipe.label} whatever its inputs are. Set the precision before the "
                "conversion, which then leaves the module out."
            )
    if not isinstance(module, _HasPrecision):
        plain_class: Any = type(module)
        _set_class(module, _class_with_precision(plain_class))
    vars(module)["distamp_pin"] = ModulePrecision(target_dtype, keep_output, model_dtype)
    return module


def get_module_precision(module: nn.Module) -> ModulePrecision | None:
    """Return the precision that a module itself has; None if it has none."""
    return module.distamp_pin if isinstance(module, _HasPrecision) else None


def _parse_precision(dtype: Any) -> tuple[torch.dtype | None, bool]:
    """Return the dtype of a precision, None for no dtype, and whether the output stays in it."""
    if dtype is None or dtype in _DTYPES.values():
        return dtype, False
    if dtype not in MODULE_PRECISIONS:
        raise ValueError(
            f"The precision of a module must be one of {choices_text(MODULE_PRECISIONS)}, "
            f"got {dtype!r}. {similar_names(dtype, MODULE_PRECISIONS)}"
        )
    name, _, suffix = dtype.partition(":")
    return _DTYPES[name], suffix == "keep_output"


def _remove_precision(module: nn.Module) -> None:
    vars(module).pop("distamp_pin", None)
    plain_class = vars(type(module)).get("plain_class")
    # Without the attribute, the class of another wrapper is over ours, and stays.
    if plain_class is not None:
        _set_class(module, plain_class)


def _set_class(module: Any, module_class: Any) -> None:
    module.__class__ = module_class


class _HasPrecision:
    """A mixin with a ``forward`` that runs in the precision of the instance, if it has one.

    DataParallel makes shallow copies of modules, which would share a ``forward`` in the instance,
    so the ``forward`` is in the class.
    """

    plain_class: type[nn.Module]
    # No module of a user has this name.
    distamp_pin: ModulePrecision | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        forward: Callable[..., Any] = super().forward  # type: ignore[misc]
        precision = self.distamp_pin
        if precision is None:
            return forward(*args, **kwargs)
        return _run(precision, module, forward, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the methods of the class without the mixin."""
        reduced: Any = super().__reduce_ex__(protocol)
        if "plain_class" not in vars(type(self)):  # the class of another wrapper is over ours
            return reduced
        function, args, *state = reduced
        args = tuple(self.plain_class if arg is type(self) else arg for arg in args)
        return (_reconstruct, (self.plain_class, function, args), *state)


def _run(
    precision: ModulePrecision,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Any,
) -> Any:
    """Call a forward in a precision: cast the inputs, enter regions, cast the output back."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device_types = _device_types(module, tensors)
    is_fp32 = precision.dtype is torch.float32
    half_param_dtype = _half_param_dtype(module) if is_fp32 else None
    output_dtype = None
    if not precision.keep_output and not any(map(torch.is_autocast_enabled, device_types)):
        output_dtype = _surrounding_dtype(precision, tensors, half_param_dtype)
    if is_dynamo_compiling():
        warn_of_module(type(module).__name__, precision.dtype)
    if is_fp32:
        args, kwargs = tree_map_only(Tensor, _upcast, (args, kwargs))
    # In a graph, regions are torch's. distamp's would warn for a second time.
    region = torch.autocast if is_dynamo_compiling() else autocast
    contexts: list[Any] = []
    for device_type in device_types:
        region_dtype = None if is_fp32 else precision.dtype
        contexts.append(region(device_type, region_dtype, not is_fp32))
    if half_param_dtype is not None:
        contexts.append(_UpcastParameters())
    output = _call_inside(contexts, forward, args, kwargs)
    if output_dtype is None:
        return output
    return tree_map_only(
        Tensor, functools.partial(_cast_back, precision.dtype, output_dtype), output
    )


def _device_types(module: nn.Module, tensors: list[Tensor]) -> list[str]:
    """Return the device types with autocast on which a module computes."""
    param = next(module.parameters(), None)
    placed = tensors if param is None else [*tensors, param]
    device_types = dict.fromkeys(tensor.device.type for tensor in placed)
    if not device_types:
        device_types = {"cpu": None}
    return [each for each in device_types if torch.amp.is_autocast_available(each)]


def _surrounding_dtype(
    precision: ModulePrecision, tensors: list[Tensor], half_param_dtype: torch.dtype | None
) -> torch.dtype | None:
    """Return the half precision of the model around a module; None if it has none.

    A float32 input is no evidence, because a half-precision model also passes timesteps, masks and
    routing weights in float32. docs/autocast.md has a table of the rule.
    """
    hints: list[torch.dtype] = []
    for dtype in (precision.model_dtype, half_param_dtype):
        if dtype is not None and dtype in _HALF:
            hints.append(dtype)
    input_dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    if not input_dtypes:
        return hints[0] if hints else None
    half_dtypes = [dtype for dtype in input_dtypes if dtype in _HALF]
    half_dtypes = [dtype for dtype in half_dtypes if dtype is not precision.dtype]
    for dtype in [*hints, *half_dtypes]:
        if dtype in half_dtypes:
            return dtype
    return None


def _call_inside(contexts: list[Any], forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a forward inside contexts; torch.compile does not trace an ExitStack of regions."""
    if not contexts:
        return forward(*args, **kwargs)
    with contexts[0]:
        return _call_inside(contexts[1:], forward, args, kwargs)


def _half_param_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the half precision of a module's parameters at this call; None without one.

    FSDP2 replaces parameters by gathered ones for the time of a forward, so each call looks anew.
    torch's ``parameters()`` takes several times as long.
    """
    for param in vars(module)["_parameters"].values():
        if param is not None and param.dtype in _HALF:
            return param.dtype  # type: ignore[no-any-return]
    for child in vars(module)["_modules"].values():
        dtype = None if child is None else _half_param_dtype(child)
        if dtype is not None:
            return dtype
    return None


class _UpcastParameters(TorchFunctionMode):
    """A mode in which functions take half-precision parameters and statistics in float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(nn.Parameter, _upcast, (args, kwargs or {}))
        if func is not nn.functional.batch_norm:
            return func(*args, **kwargs)
        # No kernel takes half-precision statistics, which are buffers, together with float32.
        upcast_args = tree_map_only(Tensor, _upcast, args)
        output = func(*upcast_args, **kwargs)
        if kwargs.get("training"):
            for buffer, upcast in zip(args[1:], upcast_args[1:], strict=True):
                if buffer is not upcast:
                    buffer.copy_(upcast)
        return output


@functools.cache
def _class_with_precision(plain_class: Any) -> type[nn.Module]:
    """Return the class with the mixin, one for each class, so that modules are of one type."""
    attributes = {
        "plain_class": plain_class,
        "__doc__": plain_class.__doc__,
        "__module__": plain_class.__module__,
        "__qualname__": plain_class.__qualname__,
    }
    materialized_class = getattr(plain_class, "cls_to_become", None)  # of a lazy module
    if materialized_class is not None:
        attributes["cls_to_become"] = _class_with_precision(materialized_class)
    return type(plain_class.__name__, (_HasPrecision, plain_class), attributes)


def _reconstruct(plain_class: Any, function: Callable[..., nn.Module], args: Any) -> nn.Module:
    module = function(*args)
    _set_class(module, _class_with_precision(plain_class))
    return module


def _upcast(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _cast_back(dtype: torch.dtype, output_dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(output_dtype) if tensor.dtype is dtype else tensor
