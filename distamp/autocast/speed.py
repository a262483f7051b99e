"""How fast half precision is on this machine: timed, never a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch.nn import functional as F  # noqa: N812

from distamp.autocast.findings import Finding
from distamp.autocast.report import PrecisionReport

__all__ = ["half_speed", "slowdown"]

# Slower than float32 by more than this is worth a word; below, it is noise.
_SLOW = 1.5
_KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "linear"),
    "convolutions": ("convolution",),
    "attention": ("_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention"),
}


def half_speed(report: PrecisionReport, device_type: str, dtype: torch.dtype) -> Iterator[Finding]:
    """Where half precision is slower than float32 here, of what a report has in half precision."""
    module = getattr(torch, device_type, None)
    if module is None or not module.is_available():
        return
    name = str(dtype).removeprefix("torch.")
    ran = {row.op for row in report.rows if name in row.outputs}
    for kind, ops in _KINDS.items():
        ratio = slowdown(kind, device_type, dtype) if ran.intersection(ops) else 0.0
        if ratio > _SLOW:
            what = f"{name} takes {ratio:,.1f} times as long as float32 here, forward and backward"
            fix = "use the other half type, or pin these modules to float32 on this machine"
            yield Finding("warning", "speed", "", kind, what, fix)


@cache
def slowdown(kind: str, device_type: str, dtype: torch.dtype) -> float:
    """How many times longer forward and backward take than in float32, on small tensors."""
    from torch.utils.benchmark import Timer  # which loads setuptools

    half, full = (
        Timer("run()", globals={"run": _step(kind, device_type, each)}).blocked_autorange(
            min_run_time=0.02
        )
        for each in (dtype, torch.float32)
    )
    return float(half.median / full.median)


def _step(kind: str, device_type: str, dtype: torch.dtype) -> Callable[[], object]:
    shapes = {
        "matrix products": ((128, 256), (256, 256)),
        "convolutions": ((1, 32, 14, 14), (32, 32, 3, 3)),
        "attention": ((1, 4, 128, 32),) * 3,
    }[kind]
    ops: dict[str, Callable[..., torch.Tensor]] = {
        "matrix products": torch.mm,
        "convolutions": F.conv2d,
        "attention": F.scaled_dot_product_attention,
    }
    run = ops[kind]
    tensors = [
        torch.ones(shape, dtype=dtype, device=device_type, requires_grad=True) for shape in shapes
    ]
    return lambda: torch.autograd.grad(run(*tensors).sum(), tensors)
