"""Findings: where half precision may spoil numbers, read off the rows of any precision report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from distamp.autocast.report import OpRow, PrecisionReport, collapsed

__all__ = ["Finding", "findings", "show"]

_HALF = frozenset({"float16", "bfloat16"})
_SOFTMAX = frozenset({"_softmax", "_log_softmax", "_safe_softmax", "logsumexp"})
_NORMS = frozenset(
    ("native_layer_norm", "_fused_rms_norm", "native_group_norm", "linalg_vector_norm", "norm")
)
_SUMS = frozenset({"sum", "cumsum", "prod", "cumprod", "nansum", "logcumsumexp"})
# fp16 counts no further than this in steps of 1; a product this long overflows where its terms'
# mean is above 2.
_LONG_SUM, _LONG_PRODUCT = 2048, 2**15


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
    found: dict[Finding, None] = {}
    for row in report.rows:
        if row.phase == "forward" and not row.view and not row.cause:
            found |= dict.fromkeys(each for rule in _RULES for each in rule(row))
    return tuple(found)


def _finding(row: OpRow, severity: str, rule: str, what: str, fix: str) -> Iterable[Finding]:
    yield Finding(severity, rule, row.module, row.label, what, fix)


def _loss(row: OpRow) -> Iterable[Finding]:
    if "loss" in f"{row.function} {row.op}" and row.outputs[:1] == ("float16",):
        what = "the loss is fp16: scaled by 65536 it overflows above 1, and its gradient at once"
        yield from _finding(row, "warning", "fp16-loss", what, "take the loss of .float() inputs")


def _precise(row: OpRow) -> Iterable[Finding]:
    # Fused attention keeps its softmax in float32 inside.
    fused = row.function.startswith("scaled_dot_product")
    half = row.inputs[:1] and row.inputs[0] in _HALF and row.outputs[0] in _HALF
    if half and row.op in _SOFTMAX and not fused:
        what = f"softmax in {row.outputs[0]} keeps 3 digits or less of each probability"
        fix = 'call it on .float(), or list it: OpLists(fp32={"softmax", "log_softmax"})'
        yield from _finding(row, "warning", "half-softmax", what, fix)
    if half and row.op in _NORMS:
        what = f"takes {row.inputs[0]} inputs; its kernel may keep statistics in float32 inside"
        fix = 'list it, as CUDA does: OpLists(fp32={"layer_norm", "rms_norm", "group_norm"})'
        yield from _finding(row, "info", "half-norm", what, fix)


def _long(row: OpRow) -> Iterable[Finding]:
    if not row.outputs or row.outputs[0] not in _HALF:
        return
    if row.op in _SUMS and row.length > _LONG_SUM:
        what = f"adds up {row.length:,} numbers for one of {row.outputs[0]}"
        fix = "sum with dtype=torch.float32, or take the mean"
        yield from _finding(row, "warning", "long-sum", what, fix)
    elif row.length >= _LONG_PRODUCT and row.outputs[0] == "float16" and row.op not in _SUMS:
        what = f"adds up {row.length:,} products for one fp16 number, whose largest is 65504"
        fix = "scale the inputs down, use bfloat16, or pin_precision(module, 'fp32')"
        yield from _finding(row, "warning", "long-sum", what, fix)


def _mixed(row: OpRow) -> Iterable[Finding]:
    if set(row.inputs) >= _HALF:
        what = "takes float16 and bfloat16 together"
        fix = "use one half type: the region's dtype, the parameters' and FSDP's param_dtype"
        yield from _finding(row, "warning", "mixed-half", what, fix)


_RULES: tuple[Callable[[OpRow], Iterable[Finding]], ...] = (_loss, _precise, _long, _mixed)


def show(found: Iterable[Finding]) -> list[str]:
    """Lines for people, findings of modules alike but for an index as one."""
    found = tuple(found)
    shown = collapsed({(each.module, each.op) for each in found})
    lines = {
        f"{it.severity}: {shown[it.module] or '(model)'}, {it.op} [{it.rule}]: {it.what}; {it.fix}"
        for it in found
    }
    return sorted(lines) or ["no findings"]
