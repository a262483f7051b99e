"""Findings: where half precision may spoil numbers, or time, read off any precision report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional as F  # noqa: N812

from distamp.autocast.report import OpRow, PrecisionReport, collapsed

__all__ = ["Finding", "findings", "half_speed", "show", "slowdown"]

_HALF = ("float16", "bfloat16")
_SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp")
_NORMS = ("native_layer_norm", "_fused_rms_norm", "native_group_norm", "linalg_vector_norm")
_SUMS = ("sum", "cumsum", "prod", "cumprod", "nansum", "logcumsumexp", "norm")
# Slower than float32 by more than this is worth a word; below, it is noise.
_SLOW = 1.5


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that will go wrong, or may.

    Attributes:
        severity: ``"error"`` (it raises), ``"warning"`` (its numbers may be wrong) or ``"info"``.
        rule: What was looked for, a fixed name such as ``"long-sum"``.
        module: The module's name; ``""`` is the model itself.
        op: The op.
        what: What is wrong.
        fix: What most likely puts it right.
    """

    severity: str
    rule: str
    module: str
    op: str
    what: str
    fix: str


def findings(report: PrecisionReport) -> tuple[Finding, ...]:
    """What half precision may spoil in a forward pass: losses, softmax and norms, long sums.

    It looks at which kernels ran in which dtypes and how many numbers they added up, and not at
    values: use it on :func:`precision_report` of a real step or on :func:`preflight`.
    """
    found = {
        Finding(severity, rule, row.module, row.label, what.format(row=row, dtype=_out(row)), fix)
        for row in report.rows
        for rule, severity, applies, what, fix in _RULES
        if row.phase == "forward" and not row.view and not row.cause and applies(row)
    }
    return tuple(sorted(found, key=lambda it: (it.rule, it.module, it.op, it.what)))


def _out(row: OpRow) -> str:
    return row.outputs[0] if row.outputs else ""


def _half(row: OpRow) -> bool:
    """Whether it takes half precision and returns it."""
    return row.inputs[:1] != () and row.inputs[0] in _HALF and _out(row) in _HALF


# Name, severity, whether it applies to a row, what is wrong, what puts it right.
_RULES: tuple[tuple[str, str, Callable[[OpRow], bool], str, str], ...] = (
    (
        "fp16-loss",
        "warning",
        lambda row: "loss" in row.function + row.op and _out(row) == "float16",
        "the loss is fp16: scaled by 65536 it overflows above 1",
        "take the loss of .float() inputs",
    ),
    (
        "half-softmax",
        "warning",
        # Fused attention keeps its softmax in float32 inside.
        lambda row: row.op in _SOFTMAX and _half(row) and "attention" not in row.function,
        "softmax in {dtype} keeps 3 digits or less of each probability",
        'call it on .float(), or list it: OpLists(fp32={"softmax", "log_softmax"})',
    ),
    (
        "half-norm",
        "info",
        lambda row: row.op in _NORMS and _half(row),
        "a norm of {dtype} inputs; its kernel may keep statistics in float32 inside",
        'list it, as CUDA does: OpLists(fp32={"layer_norm", "rms_norm", "group_norm"})',
    ),
    (
        "long-sum",
        "warning",
        lambda row: row.op in _SUMS and _out(row) in _HALF and row.length > 2048,
        "adds up {row.length:,} numbers for one of {dtype}",
        "sum with dtype=torch.float32, or take the mean",
    ),
    (
        "long-sum",
        "warning",
        lambda row: row.op not in _SUMS and _out(row) == "float16" and row.length >= 2**15,
        "adds up {row.length:,} products for one fp16 number, whose largest is 65504",
        "scale the inputs down, use bfloat16, or pin_precision(module, 'fp32')",
    ),
    (
        "mixed-half",
        "warning",
        lambda row: set(row.inputs) >= set(_HALF),
        "takes float16 and bfloat16 together",
        "use one half type: the region's dtype, the parameters' and FSDP's param_dtype",
    ),
)


def show(found: Iterable[Finding]) -> list[str]:
    """Lines for people, findings of modules alike but for an index as one."""
    found = tuple(found)
    shown = collapsed({(each.module, each.op) for each in found})
    lines = {
        f"{it.severity}: {shown[it.module] or '(model)'}, {it.op} [{it.rule}]: {it.what}; {it.fix}"
        for it in found
    }
    return sorted(lines) or ["no findings"]


_KINDS: dict[str, tuple[tuple[str, ...], Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]]
_KINDS = {
    "matrix products": (("mm", "addmm", "bmm", "linear"), torch.mm, ((128, 256), (256, 256))),
    "convolutions": (("convolution",), F.conv2d, ((1, 32, 14, 14), (32, 32, 3, 3))),
}


def half_speed(report: PrecisionReport, device_type: str, dtype: torch.dtype) -> Iterator[Finding]:
    """Where half precision is slower than float32 here, of what a report has in half precision."""
    if device_type != "cpu" and not torch.get_device_module(device_type).is_available():
        return
    name = str(dtype).removeprefix("torch.")
    ran = {row.op for row in report.rows if name in row.outputs}
    for kind, (ops, _, _) in _KINDS.items():
        ratio = slowdown(kind, device_type, dtype) if ran.intersection(ops) else 0.0
        if ratio > _SLOW:
            what = f"{name} takes {ratio:,.1f} times as long as float32 here, forward and backward"
            fix = "use the other half type, or pin these modules to float32 on this machine"
            yield Finding("warning", "speed", "", kind, what, fix)


@cache
def slowdown(kind: str, device_type: str, dtype: torch.dtype) -> float:
    """How many times longer forward and backward take than in float32, on small tensors."""
    from torch.utils.benchmark import Timer  # which loads setuptools

    _, run, shapes = _KINDS[kind]
    times = []
    for each in (dtype, torch.float32):
        inputs = [
            torch.ones(it, dtype=each, device=device_type, requires_grad=True) for it in shapes
        ]
        timer = Timer(
            "grad(run(*x).sum(), x)", globals={"grad": torch.autograd.grad, "run": run, "x": inputs}
        )
        times.append(timer.blocked_autorange(min_run_time=0.02).median)
    return float(times[0] / times[1])
