"""What preflight found out, as a frozen value: the table, the findings, and their writers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distamp.autocast.preflight.finding import Finding, as_lines
from distamp.autocast.report import PrecisionReport

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Preflight"]


@dataclass(frozen=True, slots=True)
class Preflight:
    """What :func:`preflight` found out.

    Attributes:
        report: The table, as of a real step.
        findings: What to mend, the worst first.
    """

    report: PrecisionReport
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that will stop the step or spoil its numbers."""
        return tuple(f for f in self.findings if f.severity == "error")

    def __str__(self) -> str:
        return "\n".join([str(self.report), "", "findings", *as_lines(self.findings)])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        colours = {"ERROR": "bold red", "WARNING": "yellow", "info": "cyan"}
        parts: list[Any] = [self.report.__rich__(), Text("\nfindings", style="bold")]
        for line in as_lines(self.findings):
            first = line.split(" ", 1)[0]
            parts.append(Text(line, style=colours.get(first, "")))
        return Group(*parts)

    def to_dict(self) -> dict[str, Any]:
        """Table and findings as JSON types."""
        findings = [finding.to_dict() for finding in self.findings]
        return {"findings": findings, "report": self.report.to_dict()}

    def to_json(self, path: str | PathLike[str]) -> None:
        """Write table and findings to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")
