"""Runs beside each other: how each ended, and what may make the comparison unfair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from launch.compare.records import Record
from launch.compare.run import Run, number

__all__ = ["Comparison", "compare", "power_of_two"]

# Where a run lay, how it was begun and what it was watched with change no number of it.
_NO_NUMBERS = {"run_dir", "resume", "auto_resume", "overwrite", "checkpoint_every", "timeout"}
_NO_NUMBERS |= {"keep_checkpoints", "report", "profile", "tensorboard", "wandb"}
_SHAPE = ("model_args", "layers", "heads", "width", "block", "dropout", "patch", "image_size")


@dataclass(frozen=True)
class Comparison:
    """How runs ended; ``str()`` is the table that people read.

    Attributes:
        names: The runs.
        rows: What is compared, and its value in each run; for two runs, how the second differs.
        notes: One line for each thing to know before a conclusion is drawn.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        head = ("", *self.names, "difference") if len(self.names) == 2 else ("", *self.names)
        table = [head, *self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        lines = []
        for row in table:
            first, *cells = (cell for cell in row)
            shown = [first.ljust(widths[0])]
            shown += [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join(shown).rstrip())
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def compare(runs: Sequence[Run]) -> Comparison:
    """Put runs beside each other.

    Args:
        runs: Two or more.

    Raises:
        ValueError: There are fewer than two.
    """
    if len(runs) < 2:
        raise ValueError(f"compare needs two runs or more, got {len(runs)}")
    rows = [
        _row("step", [float(run.steps[-1]["step"]) for run in runs], "{:.0f}", relative=False),
        _row("loss", [number(run.steps[-1], "loss") for run in runs], "{:.4f}"),
    ]
    rows += _validation_rows(runs, None, "")
    common = _last_common_validation(runs)
    if common is not None and not _end_alike(runs):
        rows += _validation_rows(runs, common, f" at step {common}")
    if any(run.scaled for run in runs):
        scales = [number(r.steps[-1], "loss_scale") if r.scaled else None for r in runs]
        rows.append(("loss scale", *map(power_of_two, scales), *_blank(runs)))
        skipped = [number(run.steps[-1], "skipped") if run.scaled else None for run in runs]
        rows.append(_row("skipped steps", skipped, "{:.0f}", relative=False))
    rows.append(_row("tokens/s (median)", [_speed(run) for run in runs], "{:,.0f}"))
    return Comparison(tuple(run.name for run in runs), tuple(rows), tuple(_notes(runs)))


_VALIDATION = (
    ("validation loss", "validation_loss", "{:.4f}"),
    ("bits per byte", "validation_bits_per_byte", "{:.4f}"),
    ("accuracy", "validation_accuracy", "{:.2%}"),
)


def _validation_rows(runs: Sequence[Run], step: int | None, says: str) -> list[tuple[str, ...]]:
    ends = [_validation(run, step) for run in runs]
    return [
        _row(f"{name}{says}", [number(end, key) for end in ends], form)
        for name, key, form in _VALIDATION
        if any(number(end, key) is not None for end in ends)
    ]


def _row(
    name: str, values: Sequence[float | None], form: str, *, relative: bool = True
) -> tuple[str, ...]:
    shown = ["-" if value is None else form.format(value) for value in values]
    if len(values) != 2:
        return (name, *shown)
    one, other = values
    difference = ""
    if one is not None and other is not None and one != other:
        by = other - one
        if "%" in form:
            difference = f"{100 * by:+.2f} points"
        else:
            difference = f"{by / one:+.2%}" if relative and one else f"{by:+g}"
    return (name, *shown, difference)


def _blank(runs: Sequence[Run]) -> tuple[str, ...]:
    return ("",) if len(runs) == 2 else ()


def power_of_two(scale: float | None) -> str:
    """Show a loss scale as a power of two where it is one, and as a dash where there is none."""
    if scale is None:
        return "-"
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{scale:g}"


def _validation(run: Run, step: int | None) -> Record:
    """Return the last validation, or the last at a step."""
    found = [r for r in run.validations if step is None or r["step"] == step]
    return found[-1] if found else {}


def _last_common_validation(runs: Sequence[Run]) -> int | None:
    common = set.intersection(*({r["step"] for r in run.validations} for run in runs))
    return max(common, default=None)


def _end_alike(runs: Sequence[Run]) -> bool:
    return len({_validation(run, None).get("step") for run in runs}) == 1


def _speed(run: Run) -> float | None:
    speeds = [s for r in run.steps if (s := number(r, "tokens_per_second")) is not None]
    return median(speeds) if speeds else None


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = [f"{run.name}: its last line is half written and was passed over" for run in runs]
    notes = [note for note, run in zip(notes, runs, strict=True) if run.cut]
    if len({run.steps[-1]["step"] for run in runs}) > 1:
        notes.append("the runs end at different steps; compare them where both were validated")
    if len({run.in_bytes for run in runs}) > 1:
        notes.append("only some of the runs are of text; what is drawn is the loss in nats")
    known = [run for run in runs if run.settings]
    if len(known) < len(runs):
        missing = next(run.name for run in runs if not run.settings)
        notes.append(f"{missing}: no config.json; what it was asked to do is not known")
    if len(known) > 1:
        notes += _differences(known)
    return notes


def _differences(runs: Sequence[Run]) -> list[str]:
    """Say which settings differ, those that make losses incomparable first."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    differ = {
        name: [run.settings.get(name) for run in runs]
        for name in names
        if name not in _NO_NUMBERS and len({repr(run.settings.get(name)) for run in runs}) > 1
    }
    notes = []
    if "model" in differ:
        models = " and ".join(map(str, differ["model"]))
        notes.append(f"the runs are of different models: {models}; their losses may not compare")
    elif shape := {name: differ[name] for name in _SHAPE if name in differ}:
        notes.append(f"the runs are of models of different shape: {_shown(shape)}")
    if "data" in differ:
        notes.append(f"the runs are of different data: {_shown({'data': differ['data']})}")
    rest = {n: v for n, v in differ.items() if n not in ("model", "data", *_SHAPE)}
    if rest:
        notes.append(f"other settings: {_shown(rest)}")
    return notes


def _shown(differ: dict[str, list[object]]) -> str:
    return ", ".join(
        f"{name} {' / '.join('default' if v is None else str(v) for v in values)}"
        for name, values in differ.items()
    )
