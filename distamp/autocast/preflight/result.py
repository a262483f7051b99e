"""What preflight found out, as a frozen value: the table, the findings, and their writers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distamp.autocast.preflight.finding import Finding, as_lines, as_names
from distamp.autocast.report import PrecisionReport

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Preflight"]

# Modules that the summary names.
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Preflight:
    """What :func:`preflight` found out.

    Attributes:
        report: The table, as of a real step.
        findings: What to mend, the worst first.
        forward: Whether forward, and ``loss_fn``, ran to their end.
        visited: Names of the modules that took part: their forward ran, or an op took one of their
            own parameters or buffers. ``""`` is the model itself.
        not_visited: Names of the other modules, containers that have no forward left out.
    """

    report: PrecisionReport
    findings: tuple[Finding, ...]
    forward: bool
    visited: tuple[str, ...]
    not_visited: tuple[str, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that will stop the step or spoil its numbers."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def finished(self) -> bool:
        """Whether all that was asked for ran to its end."""
        return self.forward

    @property
    def summary(self) -> str:
        """In one line, how far the step came."""
        parts = [f"forward {'finished' if self.forward else 'NOT FINISHED'}"]
        count = len(self.visited)
        parts.append(f"{count} of {count + len(self.not_visited)} modules visited")
        line = ", ".join(parts)
        return f"{line}; not: {as_names(self.not_visited, _NAMED)}" if self.not_visited else line

    def __str__(self) -> str:
        lines = [str(self.report), "", self.summary, "", "findings", *as_lines(self.findings)]
        return "\n".join(lines)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        colours = {"ERROR": "bold red", "WARNING": "yellow", "info": "cyan"}
        summary = Text(f"\n{self.summary}", style="" if self.finished else "bold red")
        parts: list[Any] = [self.report.__rich__(), summary, Text("\nfindings", style="bold")]
        for line in as_lines(self.findings):
            first = line.split(" ", 1)[0]
            parts.append(Text(line, style=colours.get(first, "")))
        return Group(*parts)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return {
            "forward": self.forward,
            "visited": list(self.visited),
            "not_visited": list(self.not_visited),
            "findings": [finding.to_dict() for finding in self.findings],
            "report": self.report.to_dict(),
        }

    def to_json(self, path: str | PathLike[str]) -> None:
        """Write table and findings to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")
