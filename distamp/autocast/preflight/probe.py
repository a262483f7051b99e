"""How fast this machine is in half precision: the model's kinds of op, timed small, never a table.

A kernel that is missing or emulated shows at small sizes too (the backward of an fp16 convolution
takes hundreds of times as long as fp32's on some CPUs, with no warning), so each kind is timed once
on small tensors, half precision and float32 in turn, and kept for the life of the process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from distamp.autocast.devices import is_here
from distamp.autocast.preflight.finding import Finding
from distamp.autocast.report.recording import Observed

__all__ = ["Kind", "Kinds", "Timing", "measure", "probe"]

# Slower than float32 by more than this is worth a word; below, it is noise.
_SLOW = 1.5
_CLIFF = 5.0
# A call shorter than this is mostly the call itself.
_SHORT_S = 50e-6
_RUNS = 5
_LIMIT_S = 0.25
# Sizes are cut to these, so that a probe takes milliseconds; 1 stays 1.
_ROWS, _INNER, _CHANNELS, _SPACE = 128, 256, 32, 14


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of op: its name, its tensors' sizes, and what else it needs."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    # stride, padding, dilation, groups of a convolution
    settings: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds for one call in half precision and in float32, or the error it raises in half."""

    half: float
    full: float
    error: str = ""

    @property
    def ratio(self) -> float:
        """How many times longer half precision takes."""
        return self.half / self.full


class Kinds:
    """Collects the kinds of op that a simulation runs in half precision, and where."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.found: dict[Kind, list[str]] = {}

    def observe(self, call: Observed) -> None:
        """Look at one call; made for ``Recorder(observe=...)``."""
        if call.phase == "backward" or not call.outputs or call.outputs[0].dtype != self._dtype:
            return
        kind = _kind(call)
        if kind is not None:
            modules = self.found.setdefault(kind, [])
            if call.owner.module not in modules:
                modules.append(call.owner.module)


def probe(
    kinds: Kinds,
    device_type: str,
    dtype: torch.dtype,
    *,
    backward: bool = True,
    timer: Callable[[Kind, str, torch.dtype, bool], Timing] | None = None,
) -> list[Finding]:
    """Time each kind, float32 beside half precision, and report what is slower or missing."""
    short = str(dtype).removeprefix("torch.")
    both = ", forward and backward" if backward else ""
    if not is_here(device_type):
        what = f"no {device_type} device here: the speed of {short} was not measured"
        fix = "run preflight on the machine that will train"
        return [Finding("info", "speed", "", device_type, what, fix)]
    findings = []
    for kind, modules in kinds.found.items():
        timing = (timer or measure)(kind, device_type, dtype, backward)
        sizes = " by ".join("x".join(map(str, shape)) for shape in kind.shapes)
        if timing.error:
            what = f"this {device_type} has no {short} kernel for it: {timing.error}"
            fix = "use another dtype, or pin these modules to float32"
            found = [Finding("error", "speed", name, kind.op, what, fix) for name in modules]
        elif timing.ratio > _SLOW and timing.half > _SHORT_S:
            what = (
                f"{short} takes {timing.ratio:,.1f} times as long as float32 here{both} "
                f"({timing.half * 1e6:,.0f} us for {timing.full * 1e6:,.0f} us, {sizes})"
            )
            fix = _advice(dtype)
            severity = "warning" if timing.ratio > _CLIFF else "info"
            found = [Finding(severity, "speed", name, kind.op, what, fix) for name in modules]
        else:
            continue
        findings += found
    return findings


@lru_cache(maxsize=1024)
def measure(kind: Kind, device_type: str, dtype: torch.dtype, backward: bool = True) -> Timing:
    """Median time of one call in ``dtype`` and in float32, taken in turn."""
    try:
        runs = [_call(kind, device_type, d, backward) for d in (dtype, torch.float32)]
        samples: list[list[float]] = [[], []]
        begin = time.perf_counter()
        for run in runs:
            run()
        while len(samples[0]) < _RUNS:
            for run, times in zip(runs, samples, strict=True):
                times.append(_time(run, device_type))
            if time.perf_counter() - begin > _LIMIT_S:
                break
    except (RuntimeError, NotImplementedError) as error:
        return Timing(0.0, 1.0, str(error).splitlines()[0])
    return Timing(statistics.median(samples[0]), statistics.median(samples[1]))


def _time(run: Callable[[], object], device_type: str) -> float:
    _wait(device_type)
    begin = time.perf_counter()
    run()
    _wait(device_type)
    return time.perf_counter() - begin


def _wait(device_type: str) -> None:
    if device_type != "cpu":
        torch.accelerator.synchronize()


def _call(kind: Kind, device_type: str, dtype: torch.dtype, backward: bool) -> Callable[[], object]:
    tensors = [
        torch.ones(shape, dtype=dtype, device=device_type, requires_grad=backward)
        for shape in kind.shapes
    ]
    forward = _forward(kind, tensors)
    if not backward:
        return torch.inference_mode()(forward)
    grad = torch.ones_like(forward())
    return lambda: torch.autograd.grad(forward(), tensors, grad)


def _forward(kind: Kind, tensors: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    first, second = tensors[:2]
    if kind.op == "convolution":
        return lambda: torch.convolution(first, second, None, *kind.settings)
    if kind.op == "attention":
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda: attention(first, second, tensors[2])
    return lambda: torch.matmul(first, second)


def _kind(call: Observed) -> Kind | None:
    name = call.func._schema.name.removeprefix("aten::")
    tensors = [a for a in call.args if isinstance(a, torch.Tensor)]
    if name == "convolution":
        return _convolution(tensors[0], tensors[1], call.args[3:9])
    if name in ("mm", "addmm", "bmm", "baddbmm", "linear"):
        a, b = tensors[-2:] if name != "linear" else (tensors[0], tensors[1].t())
        batch = tuple(min(size, 4) for size in a.shape[:-2])
        rows, inner = min(a.shape[-2], _ROWS) if a.dim() > 1 else 1, min(a.shape[-1], _INNER)
        columns = min(b.shape[-1], _INNER)
        return Kind("matmul", ((*batch, rows, inner), (*batch, inner, columns)))
    if name.startswith("_scaled_dot_product") and "backward" not in name:
        query = tensors[0].shape
        shape = (1, min(query[1], 4), min(query[2], _ROWS), min(query[3], _INNER))
        return Kind("attention", (shape, shape, shape))
    return None


def _convolution(x: torch.Tensor, weight: torch.Tensor, settings: tuple[Any, ...]) -> Kind:
    _, _, dilation, transposed, _, groups = settings
    # Depthwise stays depthwise; otherwise one group keeps what matters about the kernel.
    per_group = min(weight.shape[1], _CHANNELS)
    groups = min(groups, _CHANNELS)
    outputs = max(min(weight.shape[0], _CHANNELS) // groups, 1) * groups
    channels = per_group * groups
    if transposed:
        outputs, channels = per_group, outputs
        shape = (channels, per_group, *weight.shape[2:])
    else:
        shape = (outputs, per_group, *weight.shape[2:])
    extent = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    space = [max(min(s, _SPACE), e) for s, e in zip(x.shape[2:], extent, strict=True)]
    frozen = tuple(tuple(s) if isinstance(s, list | tuple) else s for s in (*settings[:5], groups))
    return Kind("convolution", ((1, channels, *space), shape), frozen)


def _advice(dtype: torch.dtype) -> str:
    other = "bfloat16" if dtype == torch.float16 else "float32"
    return f"try torch.{other}, or pin these modules to float32 on this machine"
