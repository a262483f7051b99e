"""Which dtypes are fast on a device: measured, in a few seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Speed", "measured_speeds"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Work of about a millisecond in float32: a matrix product, and a convolution.
_SIDE = {"cpu": 384}
_SIDE_ELSEWHERE = 4096


@dataclass(frozen=True)
class Speed:
    """How long one op takes in one dtype.

    Args:
        op: ``"matmul"`` or ``"conv2d"``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        milliseconds: Median of a few calls; None where the device cannot do it.
        of_float32: That, as a ratio to float32; below 1 is faster. None where there is none.
        why: The error of the device, where it cannot.
    """

    op: str
    dtype: str
    milliseconds: float | None
    of_float32: float | None
    why: str = ""

    @property
    def verdict(self) -> str:
        """Say it in a word: fast, slow, as float32, or cannot."""
        if self.of_float32 is None:
            return "cannot"
        if self.of_float32 < 0.8:
            return "fast"
        return "slow" if self.of_float32 > 1.25 else "as float32"


def measured_speeds(device: str, seconds: float = 5.0) -> list[Speed]:
    """Time two ops in three dtypes on ``device``.

    Args:
        device: A device type.
        seconds: What all of it may take. An op that takes longer than its share is called once, so
            only a single very slow call can go beyond.
    """
    side = _SIDE.get(device, _SIDE_ELSEWHERE)
    ops: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
        "matmul": ((side, side), (side, side), torch.matmul),
        "conv2d": ((4, 32, side // 8, side // 8), (32, 32, 3, 3), functional.conv2d),
    }
    share = seconds / (len(ops) * len(_DTYPES))
    speeds = []
    for op, (left, right, function) in ops.items():
        in_float32: float | None = None
        for dtype in _DTYPES:
            name = str(dtype).removeprefix("torch.")
            try:
                took = _median_ms(device, dtype, left, right, function, share)
            except RuntimeError as error:
                speeds.append(Speed(op, name, None, None, str(error).splitlines()[0][:200]))
                continue
            in_float32 = took if dtype is torch.float32 else in_float32
            ratio = None if in_float32 is None else took / in_float32
            speeds.append(Speed(op, name, took, ratio))
    return speeds


def _median_ms(
    device: str,
    dtype: torch.dtype,
    left: tuple[int, ...],
    right: tuple[int, ...],
    function: Callable[[Tensor, Tensor], Tensor],
    share: float,
) -> float:
    """Return the median time of a call, of as many as fit into ``share`` seconds, at most 50."""
    one = torch.rand(left, device=device).to(dtype)
    other = torch.rand(right, device=device).to(dtype)
    end = time.perf_counter() + share
    first = _call_ms(device, function, one, other)  # the first call sets things up
    took: list[float] = []
    while len(took) < 50 and time.perf_counter() + first / 1000 < end:
        took.append(_call_ms(device, function, one, other))
    return statistics.median(took or [first])


def _call_ms(
    device: str, function: Callable[[Tensor, Tensor], Tensor], one: Tensor, other: Tensor
) -> float:
    start = time.perf_counter()
    function(one, other)
    if device != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - start) * 1000
