"""Findings: places where half precision may spoil numbers, found in the rows of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from distamp.report.formatting import collapse_indices
from distamp.report.op_row import OpRow

__all__ = ["FP16_LOSS", "Finding", "Findings", "find_risks"]

_HALF = ("float16", "bfloat16")
_SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp")
_NORMS = ("native_layer_norm", "_fused_rms_norm", "native_group_norm", "linalg_vector_norm")
_REDUCTIONS = ("allreduce", "all_reduce", "reduce_scatter", "c10d::reduce_")
_SUMS = ("sum", "cumsum", "prod", "cumprod", "nansum", "logcumsumexp", "norm")
# A sum in half precision stops growing, because it keeps only 8 or 11 significant bits.
_LONG_SUM = 2048
_LONG_PRODUCT = 2**15


@dataclass(frozen=True, slots=True)
class Finding:
    """One place in a model at which half precision fails or may spoil numbers.

    ``str`` is a line such as ``warning: head, softmax [half-softmax]: ...``.

    Attributes:
        severity: ``"error"`` (the op raises), ``"warning"`` (its numbers may be wrong) or
            ``"info"``.
        rule: The fixed name of the rule, such as ``"long-sum"``.
        module: The module's name; ``""`` is the model itself.
        op: The op.
        what: A description of the mistake.
        fix: The most likely correction.
    """

    severity: str
    rule: str
    module: str
    op: str
    what: str
    fix: str

    def __str__(self) -> str:
        place = f"{self.module or '(model)'}, {self.op}"
        return f"{self.severity}: {place} [{self.rule}]: {self.what}; {self.fix}"

    def to_dict(self) -> dict[str, str]:
        """Return the finding as JSON types."""
        return asdict(self)


class Findings(tuple[Finding, ...]):
    """The findings of a report; ``str`` has a line for each, and one line for similar modules."""

    __slots__ = ()

    def __str__(self) -> str:
        labels = collapse_indices((finding.module, finding.op) for finding in self)
        lines = set()
        for finding in self:
            collapsed = replace(finding, module=labels[finding.module])
            lines.add(str(collapsed))
        return "\n".join(sorted(lines)) or "no findings"

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as JSON types."""
        return {"findings": [finding.to_dict() for finding in self]}


# The finding for a loss function, which preflight also returns for its argument `loss_fn`.
FP16_LOSS = Finding(
    "warning",
    "fp16-loss",
    "",
    "loss_fn",
    "the loss is fp16: scaled by 65536 it overflows above 1",
    "take the loss of .float() inputs",
)


def find_risks(rows: Iterable[OpRow]) -> Findings:
    """Return a finding for each row to which a rule applies, ordered by rule and module."""
    findings = set()
    for row in rows:
        if row.view or row.cause:
            continue
        rules = [*_RULES_OF_EVERY_PHASE]
        if row.phase == "forward":
            rules += _RULES_OF_FORWARD
        for rule in rules:
            finding = rule(row)
            if finding is not None:
                findings.add(replace(finding, module=row.module, op=row.label))
    return Findings(sorted(findings, key=_order))


def _order(finding: Finding) -> tuple[str, ...]:
    return finding.rule, finding.module, finding.op, finding.what


def _warning(rule: str, message: str, fix: str) -> Finding:
    return Finding("warning", rule, "", "", message, fix)


def _output(row: OpRow) -> str:
    return row.outputs[0] if row.outputs else ""


def _has_half_input(row: OpRow) -> bool:
    return bool(row.inputs) and row.inputs[0] in _HALF


def _is_half(row: OpRow) -> bool:
    """Return whether the kernel takes half precision and returns it."""
    return _has_half_input(row) and _output(row) in _HALF


def _fp16_loss(row: OpRow) -> Finding | None:
    if "loss" in row.function + row.op and _output(row) == "float16":
        return FP16_LOSS
    return None


def _half_softmax(row: OpRow) -> Finding | None:
    # Fused attention keeps its softmax in float32 inside.
    if row.op not in _SOFTMAX or not _is_half(row) or "attention" in row.function:
        return None
    return _warning(
        "half-softmax",
        f"softmax in {_output(row)} keeps 3 digits or less of each probability",
        'call it on .float(), or list it: OpLists(fp32={"softmax", "log_softmax", "logsumexp"})',
    )


def _half_norm(row: OpRow) -> Finding | None:
    if row.op not in _NORMS or not _is_half(row):
        return None
    finding = _warning(
        "half-norm",
        f"a norm of {_output(row)} inputs; its kernel may keep statistics in float32 inside",
        'list it, as CUDA does: OpLists(fp32={"layer_norm", "rms_norm", "group_norm"})',
    )
    return replace(finding, severity="info")


def _long_sum(row: OpRow) -> Finding | None:
    if row.op not in _SUMS or _output(row) not in _HALF or row.length <= _LONG_SUM:
        return None
    return _warning(
        "long-sum",
        f"adds up {row.length:,} numbers for one of {_output(row)}",
        "sum with dtype=torch.float32, or take the mean",
    )


def _long_product(row: OpRow) -> Finding | None:
    if row.op in _SUMS or _output(row) != "float16" or row.length < _LONG_PRODUCT:
        return None
    return _warning(
        "long-product",
        f"adds up {row.length:,} products for one fp16 number, whose largest is 65504",
        "scale the inputs down, use bfloat16, or set_module_precision(module, 'fp32')",
    )


def _mixed_half(row: OpRow) -> Finding | None:
    if not set(row.inputs) >= set(_HALF):
        return None
    return _warning(
        "mixed-half",
        "takes float16 and bfloat16 together",
        "use one half type: the region's dtype, the parameters' and FSDP's param_dtype",
    )


def _half_accumulation(row: OpRow) -> Finding | None:
    is_addition = row.function == "accumulate_grad" and row.op in ("add_", "add")
    if not is_addition or not _is_half(row):
        return None
    return _warning(
        "half-accumulation",
        f"gradients of several backward passes are added up in {_output(row)}",
        "keep float32 parameters, under a region or FSDP's param_dtype; or, in fully_shard, reduce "
        "once, by no_sync(), with MixedPrecisionPolicy(reduce_dtype=torch.float32)",
    )


def _half_reduction(row: OpRow) -> Finding | None:
    is_reduction = any(name in row.op for name in _REDUCTIONS)
    if not is_reduction or not _has_half_input(row):
        return None
    return _warning(
        "half-reduction",
        f"sums over ranks are in {row.inputs[0]}",
        "keep float32 gradients, or FSDP's reduce_dtype=torch.float32; a hook with sums in fp32",
    )


_Rule = Callable[[OpRow], Finding | None]
_RULES_OF_FORWARD: tuple[_Rule, ...] = (_fp16_loss, _half_softmax, _half_norm, _long_sum)
_RULES_OF_EVERY_PHASE: tuple[_Rule, ...] = (
    _long_product,
    _mixed_half,
    _half_accumulation,
    _half_reduction,
)
