"""Numerical risks that single ops show in their arguments: epsilons, masks, long sums."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from distamp.autocast.preflight.finding import Finding
from distamp.autocast.report.kernels import kernel_of
from distamp.autocast.report.recording import Observed

__all__ = ["FP16_ZERO", "Risks", "inner_length"]

_FP16_MAX = torch.finfo(torch.float16).max
# Half of the smallest fp16 number: what is below rounds to 0.
FP16_ZERO = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps / 2
# fp16 counts no further than this in steps of 1: eps is 2**-10.
_LONG_SUM = 2 / torch.finfo(torch.float16).eps
_LONG_PRODUCT = 2**15

# Ops whose scalar is a value beside the tensor's values; alpha and the like are factors.
_VALUES = frozenset(
    ("add", "sub", "rsub", "clamp", "clamp_min", "clamp_max", "masked_fill", "fill", "full")
    + ("full_like", "constant_pad_nd", "threshold", "where", "maximum", "minimum")
)
_SUMS = frozenset({"sum", "cumsum", "prod", "cumprod", "nansum", "logcumsumexp", "norm"})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear"})
# Norm kernels and where their eps stands among the arguments.
_NORMS = {
    "native_layer_norm": 4,
    "native_batch_norm": 7,
    "native_group_norm": 7,
    "_fused_rms_norm": 3,
}


class Risks:
    """Looks at each kernel call of a simulation and notes what half precision cannot hold."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def observe(self, call: Observed) -> None:
        """Look at one call; made for ``Recorder(observe=...)``."""
        dtypes = {t.dtype for t in call.inputs}
        if torch.float16 in dtypes and torch.bfloat16 in dtypes and not kernel_of(call.func).copies:
            self._mixed(call)
        if call.phase == "backward":
            # Gradients are a matter of the loss scale, which the scaler looks after.
            return
        fp16 = torch.float16 in dtypes or any(t.dtype == torch.float16 for t in call.outputs)
        if not fp16:
            return
        name = call.func._schema.name.removeprefix("aten::")
        plain = name.strip("_") if name not in _NORMS else name
        if name in _NORMS:
            self._norm(call, name)
        elif plain in _VALUES and _result(call) == torch.float16:
            self._scalars(call, plain)
        elif plain in _SUMS or plain in _PRODUCTS:
            self._long(call, plain)

    def _note(self, call: Observed, severity: str, rule: str, op: str, what: str, fix: str) -> None:
        self.findings.append(Finding(severity, rule, call.owner.module, op, what, fix))

    def _mixed(self, call: Observed) -> None:
        op = call.owner.function or call.func._schema.name
        what = "takes float16 and bfloat16 together, which are promoted to float32"
        fix = "use one half type: the region's dtype, the parameters' and FSDP's param_dtype"
        self._note(call, "warning", "mixed-half", op, what, fix)

    def _norm(self, call: Observed, name: str) -> None:
        at = _NORMS[name]
        eps = call.args[at] if len(call.args) > at else None
        if isinstance(eps, float) and 0 < eps < FP16_ZERO:
            what = (
                f"eps={eps:g} is 0 in fp16; this kernel keeps its statistics in fp32, a decomposed "
                "or exported one need not"
            )
            self._note(
                call, "info", "fp16-epsilon", name, what, f"use eps of {_eps_advice()} or more"
            )

    def _scalars(self, call: Observed, name: str) -> None:
        for value in _floats(call.args):
            if 0 < abs(value) < FP16_ZERO:
                what = f"{value:g} beside an fp16 tensor is 0: it guards against nothing"
                fix = f"use {_eps_advice()} or more, or take the input to .float() first"
                self._note(call, "warning", "fp16-epsilon", name, what, fix)
            elif math.isfinite(value) and abs(value) > _FP16_MAX:
                what = f"{value:g} does not fit fp16, whose largest number is 65504"
                fix = "use torch.finfo(x.dtype).min or max, or float('-inf') for masks"
                self._note(call, "error", "fp16-range", name, what, fix)

    def _long(self, call: Observed, name: str) -> None:
        length = inner_length(name, call.args, call.outputs)
        if name in _PRODUCTS:
            if length >= _LONG_PRODUCT:
                what = (
                    f"sums {length:,} products into fp16: it overflows where their mean is above "
                    f"{_FP16_MAX / length:.2g}"
                )
                fix = "scale the inputs down, use bfloat16, or pin this module to float32"
                self._note(call, "warning", "fp16-reduction", name, what, fix)
        elif _result(call) == torch.float16 and length > _LONG_SUM:
            what = (
                f"sums {length:,} elements into fp16: it overflows where their mean is above "
                f"{_FP16_MAX / length:.2g}, and counts no further than 2048 in steps of 1"
            )
            fix = "take the mean, or sum with dtype=torch.float32"
            self._note(call, "warning", "fp16-reduction", name, what, fix)


def inner_length(name: str, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> int:
    """How many numbers are added up for one number of the result."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if not tensors or not outputs:
        return 0
    if name in _PRODUCTS:
        # Of addmm's three tensors the product's are the last two.
        first = tensors[0] if name == "linear" else tensors[-2] if len(tensors) > 1 else tensors[0]
        return int(first.shape[-1]) if first.dim() else 1
    if name in ("cumsum", "cumprod", "logcumsumexp"):
        dim = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
        return int(tensors[0].shape[dim]) if tensors[0].dim() else 1
    return tensors[0].numel() // max(outputs[0].numel(), 1)


def _result(call: Observed) -> torch.dtype | None:
    return call.outputs[0].dtype if call.outputs else None


def _floats(values: Iterable[Any]) -> list[float]:
    found = []
    for value in values:
        if isinstance(value, float | int) and not isinstance(value, bool):
            found.append(float(value))
        elif isinstance(value, torch.Tensor) and value.dim() == 0:
            constant = getattr(value, "constant", None)
            if constant is not None and constant.is_floating_point():
                found.append(float(constant))
    return found


def _eps_advice() -> str:
    return "1e-6"
