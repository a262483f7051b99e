"""Findings: places where half precision may spoil numbers, found in the rows of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from distamp.report.op_row import OpRow, collapsed

__all__ = ["FP16_LOSS", "Finding", "Findings", "find_risks"]

_HALF = ("float16", "bfloat16")
_SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp")
_NORMS = ("native_layer_norm", "_fused_rms_norm", "native_group_norm", "linalg_vector_norm")
_REDUCTIONS = ("allreduce", "all_reduce", "reduce_scatter", "c10d::reduce_")
_SUMS = ("sum", "cumsum", "prod", "cumprod", "nansum", "logcumsumexp", "norm")


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


class Findings(tuple[Finding, ...]):
    """The findings of a report; ``str`` has a line for each, and one line for similar modules."""

    __slots__ = ()

    def __str__(self) -> str:
        shown = collapsed({(finding.module, finding.op) for finding in self})
        lines = {str(replace(finding, module=shown[finding.module])) for finding in self}
        return "\n".join(sorted(lines)) or "no findings"


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
    matches = set()
    for row in rows:
        if row.view or row.cause:
            continue
        for rule, severity, applies, what, fix in _RULES:
            in_phase = row.phase == "forward" or rule in _ALWAYS
            if in_phase and applies(row):
                description = what.format(row=row, dtype=_out(row))
                matches.add(Finding(severity, rule, row.module, row.label, description, fix))
    return Findings(
        sorted(matches, key=lambda match: (match.rule, match.module, match.op, match.what))
    )


def _out(row: OpRow) -> str:
    return row.outputs[0] if row.outputs else ""


def _half(row: OpRow) -> bool:
    """Return whether the kernel takes half precision and returns it."""
    return row.inputs[:1] != () and row.inputs[0] in _HALF and _out(row) in _HALF


# Rules that apply to backward and recomputed passes too.
_ALWAYS = ("long-product", "mixed-half", "half-accumulation", "half-reduction")
# Name, severity, condition on a row, description and correction.
_RULES: tuple[tuple[str, str, Callable[[OpRow], bool], str, str], ...] = (
    (
        "fp16-loss",
        "warning",
        lambda row: "loss" in row.function + row.op and _out(row) == "float16",
        FP16_LOSS.what,
        FP16_LOSS.fix,
    ),
    (
        "half-softmax",
        "warning",
        # Fused attention keeps its softmax in float32 inside.
        lambda row: row.op in _SOFTMAX and _half(row) and "attention" not in row.function,
        "softmax in {dtype} keeps 3 digits or less of each probability",
        'call it on .float(), or list it: OpLists(fp32={"softmax", "log_softmax", "logsumexp"})',
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
        "long-product",
        "warning",
        lambda row: row.op not in _SUMS and _out(row) == "float16" and row.length >= 2**15,
        "adds up {row.length:,} products for one fp16 number, whose largest is 65504",
        "scale the inputs down, use bfloat16, or set_module_precision(module, 'fp32')",
    ),
    (
        "mixed-half",
        "warning",
        lambda row: set(row.inputs) >= set(_HALF),
        "takes float16 and bfloat16 together",
        "use one half type: the region's dtype, the parameters' and FSDP's param_dtype",
    ),
    (
        "half-accumulation",
        "warning",
        lambda row: row.function == "accumulate_grad" and row.op in ("add_", "add") and _half(row),
        "gradients of several backward passes are added up in {dtype}",
        "keep float32 parameters, under a region or FSDP's param_dtype; or, in fully_shard, reduce "
        "once, by no_sync(), with MixedPrecisionPolicy(reduce_dtype=torch.float32)",
    ),
    (
        "half-reduction",
        "warning",
        lambda row: (
            any(name in row.op for name in _REDUCTIONS)
            and row.inputs[:1] != ()
            and row.inputs[0] in _HALF
        ),
        "sums over ranks are in {row.inputs[0]}",
        "keep float32 gradients, or FSDP's reduce_dtype=torch.float32; a hook with sums in fp32",
    ),
)
