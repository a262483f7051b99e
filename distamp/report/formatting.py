"""Text and JSON of results: names of dtypes and modules, tables, and files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

__all__ = [
    "NO_MODULE",
    "JsonResult",
    "collapse_indices",
    "dtype_abbr",
    "is_norm",
    "shorten",
    "text_table",
]

# The module name of ops that run in no module of the model.
NO_MODULE = "(outside)"
_DTYPE_ABBRS = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_SHOWN = 4


class JsonResult:
    """Base class of results that are written as JSON: reports, preflights, contract reports."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        raise NotImplementedError

    def to_json(self, path: str | PathLike[str]) -> None:
        """Write the result to a file as JSON."""
        text = json.dumps(self.to_dict(), indent=1)
        Path(path).write_text(f"{text}\n")


def dtype_abbr(dtype: object) -> str:
    """Return the name of a dtype in tables: ``"bf16"`` for ``torch.bfloat16``."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPE_ABBRS.get(name, name)


def is_norm(module: nn.Module | None) -> bool:
    """Return whether a module is a norm by its class name."""
    if module is None or "norm" not in type(module).__name__.lower():
        return False
    return not list(module.children())


def collapse_indices(modules: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Map module names to names without the indices in which modules of a class differ.

    ``h.0.attn`` and ``h.1.attn`` both become ``h.*.attn``.

    Args:
        modules: Names and classes.
    """
    groups: dict[tuple[str, str], set[str]] = {}
    for name, class_name in modules:
        pattern = _INDEX.sub("*", name)
        groups.setdefault((pattern, class_name), set()).add(name)
    collapsed: dict[str, str] = {}
    for group in groups.values():
        components = []
        paths = [name.split(".") for name in group]
        for column in zip(*paths, strict=True):
            component = "*"
            if len(set(column)) == 1:
                component = column[0]
            components.append(component)
        label = ".".join(components)
        collapsed |= dict.fromkeys(group, label)
    return collapsed


def shorten(names: Sequence[str]) -> str:
    """Return the first four names as text, and the number of further names."""
    text = ", ".join(names[:_SHOWN])
    further = len(names) - _SHOWN
    return f"{text} and {further} more" if further > 0 else text


def text_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 3
) -> list[str]:
    """Return the lines of a table; the last ``numbers`` columns are aligned to the right."""
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    first_number = len(widths) - numbers
    lines = []
    for row in (headings, *rows):
        line = ""
        for index, width in enumerate(widths):
            cell = row[index].ljust(width)
            if index >= first_number:
                cell = row[index].rjust(width)
            line += f"{cell}  "
        lines.append(line.rstrip())
    return lines
