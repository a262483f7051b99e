"""Runs as a picture: loss over the steps, and below it the loss scale and the skipped steps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.compare.records import Record
from launch.compare.run import Run, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MOST_RUNS", "draw", "picture"]


@dataclass(frozen=True)
class _Look:
    """How a run is drawn: validation dark, training light; dashes leave what lies below visible."""

    dark: str
    light: str
    dashes: str | tuple[int, tuple[float, ...]]
    width: float = 1.5


# Distinguishable for the colour-blind too.
_LOOKS = (
    _Look("#1f5fae", "#b6cbe8", "-", 2.0),
    _Look("#d1701c", "#f2cfac", (0, (4, 2))),
    _Look("#1b8a6b", "#b1dccf", (0, (1.5, 1.5))),
    _Look("#9a4fa3", "#dfc3e3", (0, (6, 2, 1.5, 2))),
    _Look("#55606e", "#c9ced6", (0, (8, 3))),
    _Look("#a8871b", "#e8dbaa", (0, (1, 3))),
)
MOST_RUNS = len(_LOOKS)
_SCALE, _SKIPPED = "#c2571a", "#8c1d18"


def draw(runs: Sequence[Run], path: str | Path, title: str = "") -> None:
    """Draw one run, or several over each other; the ending of ``path`` says in which format.

    Args:
        runs: One to six.
        path: Where the picture goes: .png, .svg, .pdf, ...
        title: What stands above it.

    Raises:
        ValueError: There are too many runs, or no such format.
        ModuleNotFoundError: matplotlib is not installed.
        OSError: It cannot be written.
    """
    picture(runs, title).savefig(path, dpi=150)


def picture(runs: Sequence[Run], title: str = "") -> Figure:
    """Return what :func:`draw` saves."""
    if not 1 <= len(runs) <= MOST_RUNS:
        raise ValueError(f"1 to {MOST_RUNS} runs can be drawn over each other, got {len(runs)}")
    try:
        with _no_word_of_fonts():
            from matplotlib.figure import Figure
            from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture of runs needs matplotlib: pip install 'distamp[report]'"
        ) from error
    scaled = any(run.scaled for run in runs)
    figure = Figure(figsize=(8, 5.2 if scaled else 3.6), layout=ConstrainedLayoutEngine())
    ratios = [2.2, 1.0] if scaled else [1.0]
    axes = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    _draw_losses(axes[0], runs)
    if scaled:
        _draw_scales(axes[1], runs)
    axes[-1].set_xlabel("step")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6", lw=0.6)
        axis.set_axisbelow(True)
        axis.margins(x=0.02)
    if title:
        figure.suptitle(title)
    return figure


@contextlib.contextmanager
def _no_word_of_fonts() -> Iterator[None]:
    """The first use ever of matplotlib builds a cache of fonts, and says so on the terminal."""
    fonts = logging.getLogger("matplotlib.font_manager")
    level = fonts.level
    fonts.setLevel(logging.ERROR)
    try:
        yield
    finally:
        fonts.setLevel(level)


def _draw_losses(axis: Axes, runs: Sequence[Run]) -> None:
    alone = len(runs) == 1
    in_bytes = all(run.in_bytes for run in runs)
    name = "bits_per_byte" if in_bytes else "loss"
    ends = []
    for run, look in zip(runs, _LOOKS, strict=False):
        label = "training" if alone else None
        axis.plot(*_points(run.records, name), color=look.light, lw=0.8, label=label, zorder=2)
        steps, losses = _points(run.records, f"validation_{name}")
        axis.plot(
            steps,
            losses,
            color=look.dark,
            linestyle=look.dashes,
            lw=look.width,
            marker="o",
            ms=4 if look is _LOOKS[0] else 6,
            mfc=look.dark if look is _LOOKS[0] else "none",
            label="validation" if alone else f"{run.name}, validation",
            zorder=3,
        )
        if losses:
            ends.append((losses[-1], steps[-1], look.dark))
    _name_ends(axis, ends)
    axis.set_ylabel("bits per byte" if in_bytes else "loss")
    axis.legend(frameon=False)


def _name_ends(axis: Axes, ends: list[tuple[float, int, str]]) -> None:
    """Write the highest end above its point and the lowest below: they are often close."""
    ordered = sorted(ends, reverse=True)
    for place, (loss, step, colour) in enumerate(ordered):
        if place in (0, len(ordered) - 1):
            axis.annotate(
                f"{loss:.2f}" if len(ends) == 1 else f"{loss:.3f}",
                (step, loss),
                xytext=(0, 8 if place == 0 else -16),
                textcoords="offset points",
                ha="center",
                color=colour,
            )


def _draw_scales(axis: Axes, runs: Sequence[Run]) -> None:
    alone = len(runs) == 1
    several = sum(run.scaled for run in runs) > 1
    for run, look in zip(runs, _LOOKS, strict=False):
        if not run.scaled:
            continue
        line, cross = (_SCALE, _SKIPPED) if alone else (look.dark, look.dark)
        dashes = look.dashes if several else "-"
        axis.step(*_points(run.records, "loss_scale"), where="post", color=line, ls=dashes, lw=1.4)
        skipped = [r for r in run.steps if not r.get("stepped", True)]
        axis.plot(
            *_points(skipped, "loss_scale"),
            "x",
            color=cross,
            ms=6,
            label=f"{'' if alone else f'{run.name}, '}skipped ({len(skipped)})",
        )
    axis.set_yscale("log", base=2)
    axis.set_ylabel("loss scale")
    axis.legend(frameon=False, loc="lower right")


def _points(records: Iterable[Record], name: str) -> tuple[list[int], list[float]]:
    """Return the steps with a finite value of this name, and the values."""
    found = [(r["step"], value) for r in records if (value := number(r, name)) is not None]
    return [step for step, _ in found], [value for _, value in found]
