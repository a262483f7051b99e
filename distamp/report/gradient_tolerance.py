"""The tolerance of compare_gradients, which follows from dtypes and from lengths of sums."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from distamp.report.gradient_causes import Tolerance
from distamp.report.tensors import flatten_tensors

__all__ = ["StepRounding", "observe_step"]

#: Errors of rounding accumulate through the layers, and a step has several sums in a row.
_SUMS_IN_A_ROW = 16
#: Products in half precision are accumulated in float32, so their length does not count.
_ROUNDINGS_IN_A_ROW = 32
#: Gradients that cancel to zero are as large as the rounding of their module's gradients.
_CANCELLATION = 16
#: Rounding of a reduction in half precision is larger than this, and shows in float32.
_LARGEST_IN_FP32 = 2.0**-12
_LARGEST_IN_HALF = 0.25
_FP32_ROUNDING = 2.0**-24
_TF32_ROUNDING = 2.0**-11


@dataclass
class StepRounding:
    """Properties of a step that bound the rounding of its gradients.

    Attributes:
        dtypes: The floating dtypes of autocast, of the outputs of modules and of gradients.
        longest_sum: The largest number of terms in a sum: positions, or the width of a parameter.
    """

    dtypes: set[torch.dtype] = field(default_factory=set)
    longest_sum: int = 1

    def include(self, rounding: StepRounding) -> None:
        """Add the properties of another step."""
        self.dtypes |= rounding.dtypes
        self.longest_sum = max(self.longest_sum, rounding.longest_sum)

    @property
    def lowest_dtype(self) -> torch.dtype:
        """The dtype that rounds most; gradients in less than 16 bits do not occur."""
        lowest = torch.float32
        largest_eps = 0.0
        for dtype in self.dtypes:
            eps = torch.finfo(dtype).eps
            if dtype.itemsize >= 2 and eps > largest_eps:
                lowest, largest_eps = dtype, eps
        return lowest

    def tolerance(self, override: float | None) -> Tolerance:
        """Return the tolerance of a comparison.

        Args:
            override: The user's tolerance, or None.
        """
        rounding = torch.finfo(self.lowest_dtype).eps / 2
        if _uses_tf32():
            rounding = max(rounding, _TF32_ROUNDING)
        is_fp32 = rounding <= _FP32_ROUNDING
        relative = min(_ROUNDINGS_IN_A_ROW * rounding, _LARGEST_IN_HALF)
        if is_fp32:
            relative = _SUMS_IN_A_ROW * rounding * math.sqrt(self.longest_sum)
            relative = min(relative, _LARGEST_IN_FP32)
        if override is not None:
            relative = override
        return Tolerance(relative, _CANCELLATION * rounding, is_fp32)


def _uses_tf32() -> bool:
    if not torch.cuda.is_available():
        return False
    return torch.get_float32_matmul_precision() != "highest"


def observe_step(step: Callable[[], Any], models: Sequence[nn.Module]) -> StepRounding:
    """Run a step, and return the properties that bound its rounding.

    Args:
        step: Runs forward and backward.
        models: The models in which the step computes.
    """
    rounding = StepRounding()
    device_types = set()
    for model in models:
        for param in model.parameters():
            device_types.add(param.device.type)

    def observe(_module: nn.Module, _args: Any, output: Any) -> None:
        for device_type in device_types:
            if torch.is_autocast_enabled(device_type):
                rounding.dtypes.add(torch.get_autocast_dtype(device_type))
        for tensor in flatten_tensors(output):
            if tensor.is_floating_point() and tensor.dim():
                rounding.dtypes.add(tensor.dtype)
                positions = tensor.numel() // max(tensor.shape[-1], 1)
                rounding.longest_sum = max(rounding.longest_sum, positions)

    def observe_params(module: nn.Module, _args: Any) -> None:
        # FSDP gathers parameters in the dtype of its policy, and may cast outputs back.
        for param in module.parameters(recurse=False):
            if param.is_floating_point():
                rounding.dtypes.add(param.dtype)

    with contextlib.ExitStack() as stack:
        for model in models:
            for module in _eager_modules(model):
                for handle in (
                    module.register_forward_pre_hook(observe_params),
                    module.register_forward_hook(observe),
                ):
                    stack.callback(handle.remove)
        step()
    for model in models:
        for param in model.parameters():
            if param.grad is not None:
                rounding.dtypes.add(param.grad.dtype)
            if param.dim() > 1:
                rounding.longest_sum = max(rounding.longest_sum, *param.shape)
    return rounding


def _eager_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules outside of compiled code, because a hook would break up a graph."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return
    yield module
    # The hooks of the wrapper itself run outside of the compiled code.
    if type(module).__name__ != "OptimizedModule":
        for child in module.children():
            yield from _eager_modules(child)
