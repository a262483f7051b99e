"""A precision report as a picture: modules by dtype, and the bytes each module casts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distamp.autocast.report.rows import OpRow, collapse, total
from distamp.autocast.report.table import DTYPE_NAMES, human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_rows"]

# fp32 warm, half precision cool, everything else grey; colour-blind people see them as different.
_COLOURS = {
    "bf16": "#3a6ea5",
    "fp16": "#2a9d8f",
    "fp32": "#e9a23b",
    "fp64": "#b5472f",
    "other": "#c9ced6",
}
_CAUSES = {"autocast": "#6b7a99", "explicit": "#b86fa5", "autograd": "#b9a7d1"}
_CAUSE_LABELS = {
    "autocast": "cast by autocast",
    "explicit": "cast asked for in code",
    "autograd": "cast by autograd",
}
_INK = "#2b2f36"
_FAINT = "#8a919c"
_REST = "(all other modules)"


def plot_rows(rows: Iterable[OpRow], path: Path, title: str, *, modules: int = 24) -> None:
    """Draw the report to a file; see :meth:`PrecisionReport.plot`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture of a precision report needs matplotlib: pip install 'distamp[report]'"
        ) from error
    if modules < 1:
        raise ValueError(f"modules must be at least 1, got {modules}")
    by_module = _by_module(tuple(rows), modules)
    phases = [p for p in ("forward", "backward") if any(_shares(r, p) for r in by_module.values())]
    height = 1.5 + 0.27 * max(len(by_module), 3)
    figure = Figure(figsize=(11.5, height), layout=ConstrainedLayoutEngine(w_pad=0.12))
    widths = [2.4] * len(phases) + [2.0]
    axes = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    names = list(by_module)
    groups = list(by_module.values())
    used: dict[str, str] = {}
    for axis, phase in zip(axes, phases, strict=False):
        used |= _draw_shares(axis, [_shares(group, phase) for group in groups], phase)
    used |= _draw_bytes(axes[-1], groups)
    for axis in axes:
        _plain(axis, names)
    figure.suptitle(title or "Precision report", x=0.01, ha="left", color=_INK, fontweight="bold")
    _legend(figure, used)
    figure.savefig(path, dpi=150)


def _by_module(rows: tuple[OpRow, ...], limit: int) -> dict[str, list[OpRow]]:
    """Rows by module, modules alike together, those that compute or cast nothing left out."""
    shown = collapse(rows)
    members: dict[str, set[str]] = {}
    for name, new in shown.items():
        members.setdefault(new, set()).add(name)
    groups: dict[str, list[OpRow]] = {}
    for row in rows:
        if row.elements or row.casts or row.hits:
            groups.setdefault(shown[row.module], []).append(row)
    largest = sorted(groups, key=lambda name: -sum(row.elements for row in groups[name]))
    kept = set(largest if len(largest) <= limit else largest[: limit - 1])
    out: dict[str, list[OpRow]] = {}
    for name, group in groups.items():
        count = len(members[name])
        if name in kept:
            out[f"{name or '(model)'}{f'  x{count}' if count > 1 else ''}"] = group
    rest = [row for name, group in groups.items() if name not in kept for row in group]
    return out | ({_REST: rest} if rest else {})


def _shares(rows: Sequence[OpRow], phase: str) -> dict[str, float]:
    """Which part of the elements a module computed, not counting casts, has which dtype."""
    phases = ("forward", "recompute") if phase == "forward" else (phase,)
    sums: dict[str, float] = {}
    for row in rows:
        if row.phase in phases and not row.view and not row.cause and row.elements:
            name = DTYPE_NAMES.get(row.compute, "other")
            name = name if name in _COLOURS else "other"
            sums[name] = sums.get(name, 0.0) + row.elements
    whole = sum(sums.values())
    return {name: value / whole for name, value in sums.items()}


def _draw_shares(axis: Axes, shares: list[dict[str, float]], phase: str) -> dict[str, str]:
    used = {}
    for name, colour in _COLOURS.items():
        values = [100 * share.get(name, 0.0) for share in shares]
        if not any(values):
            continue
        used[name] = colour
        left = [100 * sum(_before(share, name)) for share in shares]
        axis.barh(range(len(shares)), values, left=left, color=colour, height=0.72)
    axis.set_xlim(0, 100)
    axis.set_xticks([0, 50, 100], ["0", "50", "100 %"])
    axis.set_title(f"{phase}: elements computed in", loc="left", fontsize=10, color=_INK)
    return used


def _before(share: dict[str, float], name: str) -> list[float]:
    order = list(_COLOURS)
    return [share.get(each, 0.0) for each in order[: order.index(name)]]


def _draw_bytes(axis: Axes, groups: list[list[OpRow]]) -> dict[str, str]:
    used = {}
    sums = [total(group) for group in groups]
    left = [0.0] * len(groups)
    for cause, colour in _CAUSES.items():
        values = [float(sum(r.bytes_written for r in g if r.cause == cause)) for g in groups]
        axis.barh(range(len(groups)), values, left=left, color=colour, height=0.72)
        left = [a + b for a, b in zip(left, values, strict=True)]
        if any(values):
            used[_CAUSE_LABELS[cause]] = colour
    longest = max([*left, 1.0])
    for y, (width, each) in enumerate(zip(left, sums, strict=True)):
        hits = f", {each.hits} hit{'s' if each.hits > 1 else ''}" if each.hits else ""
        if each.casts or each.hits:
            text = f"{human_bytes(each.bytes_written)} in {each.casts} casts{hits}"
            axis.text(width + longest * 0.02, y, text, va="center", fontsize=7.5, color=_FAINT)
    axis.set_xlim(0, longest * 2.1)
    axis.set_xticks([])
    axis.set_title("bytes written by casts", loc="left", fontsize=10, color=_INK)
    return used


def _plain(axis: Axes, names: list[str]) -> None:
    """Take everything off the axes that says nothing."""
    axis.set_yticks(range(len(names)), names, fontsize=8.5, color=_INK)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="both", length=0, labelcolor=_INK)
    axis.tick_params(axis="x", labelsize=8, labelcolor=_FAINT)
    for side in axis.spines.values():
        side.set_visible(False)


def _legend(figure: Any, used: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in used.items()]
    figure.legend(
        handles=patches,
        loc="outside lower left",
        ncols=max(len(patches), 1),
        frameon=False,
        fontsize=8.5,
        labelcolor=_INK,
        handlelength=1.0,
        handleheight=1.0,
    )
