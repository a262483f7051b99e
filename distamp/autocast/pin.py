"""set_module_precision: one module of a model in a precision of its own."""

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

from distamp.autocast.compiled_backward import warn_of_pin
from distamp.autocast.op_names import nearest
from distamp.autocast.region import autocast

__all__ = ["PINS", "Pin", "pin_of", "set_module_precision"]

_M = TypeVar("_M", bound=nn.Module)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: What a module can be pinned to, by name.
PINS = (*_DTYPES, *(f"{name}:keep_output" for name in _DTYPES))
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Pin:
    """The precision of one module: an attribute of the instance, which its copies keep.

    Args:
        dtype: What it computes in.
        keep: Whether its output stays in that dtype in a half precision model.
        model_dtype: The dtype of the model around, which decides where the inputs do not.
    """

    dtype: torch.dtype
    keep: bool = False
    model_dtype: torch.dtype | None = None


def set_module_precision(
    module: _M, dtype: str | torch.dtype | None, *, model_dtype: torch.dtype | None = None
) -> _M:
    """Make a module, and the modules inside it, compute in one precision in whatever region.

    What torch needs a nested ``autocast(enabled=False)`` and casts of inputs, weights and outputs
    for, where the module is called. ``"fp32"`` runs it with autocast off, and takes half precision
    inputs and parameters in float32; a half precision runs it in a region of that dtype, inside a
    region or not. Apex's counterpart is ``@float_function`` on ``forward``.

    Outside of a region, a half-precision input shows that the model around computes in half
    precision, and the output is cast back to that dtype. The input may be any tensor among the
    arguments, keyword arguments and the containers in them, so ``forward(timestep_fp32,
    hidden_bf16)`` returns bfloat16. ``"fp32:keep_output"`` leaves the output in float32, for a
    router, or a head whose log-probabilities matter. In a region nothing is cast back, because
    autocast casts the inputs of the next layer.

    The pin is an attribute of the instance: what others lay over the module, before or after
    (``fully_shard``, parametrizations, adapters, ``torch.compile``), stays when it is taken off.

    Args:
        module: The module; it is changed in place.
        dtype: ``"fp32"``, ``"fp16"``, ``"bf16"``, each also with ``":keep_output"``, or one of
            these as a :class:`torch.dtype`; None lets the module follow the region it is called in
            again.
        model_dtype: The dtype of the model around. The output is cast back to it if no input is
            floating point, as of an embedding, or if inputs have both half precisions.

    Returns:
        The module.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: Another ``dtype``; or a scripted module, one whose ``forward`` is its own, or
            one that computes in float8.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, got {type(module).__name__}; around a call "
            "use autocast(device_type, enabled=False)"
        )
    name, _, keep = dtype.partition(":") if isinstance(dtype, str) else (dtype, "", "")
    chosen: Any = _DTYPES.get(name, name) if isinstance(name, str) else name
    if (chosen is not None and chosen not in _DTYPES.values()) or keep not in ("", "keep_output"):
        raise ValueError(
            f"precision must be one of {list(PINS)}, got {dtype!r}{nearest(dtype, PINS)}"
        )
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        raise ValueError(
            f"the forward of this {type(module).__name__} is not its class's, and cannot be "
            "pinned; pin it before it is scripted or its forward replaced"
        )
    float8 = [type(each).__name__ for each in module.modules() if "Float8" in type(each).__name__]
    if float8 and chosen is not None:
        raise ValueError(
            f"the {type(module).__name__} has a {float8[0]}, which computes in float8 whatever it "
            "is given; pin before the conversion, which then leaves it out"
        )
    plain: Any = module
    kind: Any = type(module)
    if chosen is not None:
        if not issubclass(kind, _Pinned):
            plain.__class__ = _pinned_class(kind)
        plain.distamp_pin = Pin(chosen, keep == "keep_output", model_dtype)
    elif issubclass(kind, _Pinned):
        vars(module).pop("distamp_pin", None)
        if "unpinned_class" in vars(kind):  # else another's class is over it
            plain.__class__ = kind.unpinned_class
    return module


def pin_of(module: nn.Module) -> Pin | None:
    """Return the pin of a module itself; None where it has none."""
    return module.distamp_pin if isinstance(module, _Pinned) else None


class _Pinned:
    """What makes a class heed the pin of its instances, and nothing where there is none.

    A ``forward`` in the instance would be shared by shallow copies, as DataParallel makes them.
    """

    unpinned_class: type[nn.Module]
    distamp_pin: Pin | None = None  # by a name that no module of a user's has

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        run: Callable[..., Any] = super().forward  # type: ignore[misc]
        pin = self.distamp_pin
        return run(*args, **kwargs) if pin is None else _run(pin, module, run, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the class before does, by its own methods."""
        reduced: Any = super().__reduce_ex__(protocol)
        if "unpinned_class" not in vars(type(self)):  # another's class is over it
            return reduced
        function, args, *rest = reduced
        args = tuple(self.unpinned_class if each is type(self) else each for each in args)
        return (_remade, (self.unpinned_class, function, args), *rest)


def _run(
    pin: Pin, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Call a forward in the precision of a pin: casts in, regions around, a cast out."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    first = next(module.parameters(), None)
    devices = dict.fromkeys(each.device.type for each in (*tensors, first) if each is not None)
    available = [each for each in devices or ["cpu"] if torch.amp.is_autocast_available(each)]
    full = pin.dtype is torch.float32
    inside = _half_precision(module) if full else None
    in_region = any(map(torch.is_autocast_enabled, available))
    back_to = None
    if not in_region and not pin.keep:
        back_to = _surrounding_dtype(pin, tensors, inside)
    if is_dynamo_compiling():
        warn_of_pin(type(module).__name__, pin.dtype)
    if full:
        args, kwargs = tree_map_only(Tensor, _to_fp32, (args, kwargs))
    # In a graph, regions are torch's. distamp's would warn of itself, after the pin did.
    region = torch.autocast if is_dynamo_compiling() else autocast
    scopes: list[Any] = [region(each, None if full else pin.dtype, not full) for each in available]
    if inside is not None:
        scopes.append(_TakeInFp32())
    output = _run_in(scopes, run, args, kwargs)
    if back_to is None:
        return output
    return tree_map_only(Tensor, functools.partial(_cast_back, pin.dtype, back_to), output)


def _surrounding_dtype(
    pin: Pin, tensors: list[Tensor], weight_dtype: torch.dtype | None
) -> torch.dtype | None:
    """Return the half precision of the model around a pinned module; None where it has none.

    A float32 input says nothing about the model: a half-precision model, too, passes timesteps,
    masks and routing weights in float32.
    """
    floating = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    hints = [dtype for dtype in (pin.model_dtype, weight_dtype) if dtype in _HALF]
    if not floating:
        return hints[0] if hints else None
    half = [dtype for dtype in floating if dtype in _HALF and dtype is not pin.dtype]
    for hint in hints:
        if hint in half:
            return hint
    return half[0] if half else None


def _run_in(scopes: list[Any], run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``run`` in context managers; torch.compile traces no ExitStack of regions."""
    if not scopes:
        return run(*args, **kwargs)
    with scopes[0]:
        return _run_in(scopes[1:], run, args, kwargs)


def _half_precision(module: nn.Module) -> torch.dtype | None:
    """Return the half precision that parameters of a module are in at this call; None without.

    FSDP2 puts gathered ones in place for the time of a forward, so it is asked at each call, and
    without torch's ``parameters()``, which takes several times as long.
    """
    for parameter in vars(module)["_parameters"].values():
        if parameter is not None and parameter.dtype in _HALF:
            return parameter.dtype  # type: ignore[no-any-return]
    for child in vars(module)["_modules"].values():
        if child is not None and (found := _half_precision(child)) is not None:
            return found
    return None


class _TakeInFp32(TorchFunctionMode):
    """Has every function take half precision parameters, and statistics, in float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(nn.Parameter, _to_fp32, (args, kwargs or {}))
        if func is not nn.functional.batch_norm:
            return func(*args, **kwargs)
        # No kernel takes its statistics, which are buffers, in half precision beside float32.
        given, args = args, tree_map_only(Tensor, _to_fp32, args)
        output = func(*args, **kwargs)
        for buffer, moved in zip(given[1:], args[1:], strict=True):
            if buffer is not moved and kwargs.get("training"):
                buffer.copy_(moved)
        return output


@functools.cache
def _pinned_class(before: Any) -> type[nn.Module]:
    """The one class for this one, so that modules of it are of one type, also after pickling."""
    body = {"unpinned_class": before, "__doc__": before.__doc__}
    body |= {"__module__": before.__module__, "__qualname__": before.__qualname__}
    if becomes := getattr(before, "cls_to_become", None):  # a lazy module's
        body["cls_to_become"] = _pinned_class(becomes)
    return type(before.__name__, (_Pinned, before), body)


def _remade(before: Any, function: Callable[..., nn.Module], args: Any) -> nn.Module:
    module = function(*args)
    module.__class__ = _pinned_class(before)
    return module


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _cast_back(dtype: torch.dtype, to: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(to) if tensor.dtype is dtype else tensor
