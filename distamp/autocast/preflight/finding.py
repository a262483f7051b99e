"""The finding: one thing that preflight advises on, as a frozen value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from distamp.autocast.report.rows import OpRow, collapse

__all__ = ["SEVERITIES", "Finding", "as_lines", "as_names", "in_order"]

# error: it fails, or the numbers are wrong. warning: it may be. info: good to know.
SEVERITIES = ("error", "warning", "info")
_MARKS = {"error": "ERROR  ", "warning": "WARNING", "info": "info   "}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that will go wrong, may go wrong, or could not be looked at.

    Attributes:
        severity: ``"error"`` (it raises, or its numbers are wrong), ``"warning"`` (it may be
            wrong, or slow) or ``"info"``.
        rule: What was looked for, a fixed name such as ``"fp16-epsilon"``.
        module: The module's name; ``""`` is the model itself.
        op: The op, the optimizer's class or the wrapper's class.
        what: What is wrong.
        fix: What most likely puts it right.
    """

    severity: str
    rule: str
    module: str
    op: str
    what: str
    fix: str

    def to_dict(self) -> dict[str, str]:
        """The finding as JSON types."""
        return asdict(self)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Each finding once, the worst first."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda f: SEVERITIES.index(f.severity)))


def as_names(modules: Iterable[str], limit: int) -> str:
    """Names for people, those of modules alike but for an index as one, up to a number of them."""
    counts = Counter(_collapsed(modules := list(modules))[name] for name in modules)
    shown = [f"{name or '(model)'}" + (f" x{n}" if n > 1 else "") for name, n in counts.items()]
    return ", ".join([*shown[:limit], *(["..."] if len(shown) > limit else [])])


def _collapsed(modules: Iterable[str]) -> dict[str, str]:
    return collapse(OpRow(name, "", "", "", "", (), ()) for name in modules)


def as_lines(findings: Iterable[Finding]) -> list[str]:
    """Findings for people, those of modules alike but for an index as one."""
    findings = in_order(findings)
    shown = _collapsed(f.module for f in findings)
    groups: dict[Finding, int] = {}
    for finding in findings:
        group = replace(finding, module=shown[finding.module])
        groups[group] = groups.get(group, 0) + 1
    if not groups:
        return ["No findings."]
    lines = []
    for finding, count in groups.items():
        where = finding.module or "(model)"
        where += f"  x{count}" if count > 1 else ""
        lines.append(f"{_MARKS[finding.severity]}  {where}: {finding.op}  [{finding.rule}]")
        lines.append(f"         {finding.what}")
        lines.append(f"         fix: {finding.fix}")
    return lines
