"""What a run shows and leaves behind: progress, metrics.jsonl, a plot and a summary."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from launch.config import Config

__all__ = ["MEASURES", "METRICS", "PLOT", "Measure", "Reporter", "RunReporter", "read_metrics"]

METRICS = "metrics.jsonl"
PLOT = "curves.png"
Record = dict[str, Any]
# Without a terminal, a line this often.
_SECONDS_BETWEEN_LINES = 15.0


@dataclass(frozen=True)
class Measure:
    """What a loss is shown in: its name in a record, and how people say it."""

    name: str
    unit: str
    says: str


MEASURES = {
    "text": Measure("bits_per_byte", "bits/byte", "bits per byte"),
    "images": Measure("loss", "nats", "loss"),
}


class Reporter:
    """What the ranks that do not report do: nothing."""

    def start(self, facts: dict[str, str]) -> None:
        """Say what is about to run."""

    def note(self, text: str) -> None:
        """Say one line."""

    def step(self, record: Record, tokens: int) -> None:
        """Take a training step's record; ``tokens`` were trained on in it, over all ranks."""

    def validation(self, record: Record) -> None:
        """Take a validation's record."""

    def finish(self, more: dict[str, str]) -> None:
        """Draw the plot and say where everything is; ``more`` is said with it."""

    def close(self) -> None:
        """Leave the terminal and the files in order, whatever happened."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunReporter(Reporter):
    """Shows the run on rank 0 and writes its records as they come.

    Args:
        folder: Where metrics.jsonl and the plot go.
        config: The run's settings.
        kind: What the data are, which decides what a loss is shown in.
        history: Records of the run so far, when it is resumed; metrics.jsonl starts with them.
        first: Steps done before.
    """

    def __init__(
        self, folder: Path, config: Config, kind: str, history: list[Record], first: int
    ) -> None:
        self.folder = folder
        self.config = config
        self.measure = MEASURES[kind]
        self.records = history
        self.console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        self.metrics = _start_metrics(folder / METRICS, history)
        self.behind = False
        self.first = first
        self.began = self.last = time.monotonic()
        self.said = 0.0
        self.busy = 0.0
        self.tokens = 0
        self.rate = 0.0
        self.bar: Progress | None = None
        if self.console.is_terminal:
            self.bar = _bar(self.console)
            self.task = self.bar.add_task("", total=config.steps, completed=first, shown="")

    def start(self, facts: dict[str, str]) -> None:
        """Print the facts as a small table and start the bar."""
        self._table(facts)
        if self.bar is not None:
            self.bar.start()
        self.began = self.last = time.monotonic()

    def note(self, text: str) -> None:
        """Print one line above the bar."""
        self.console.print(text)

    def step(self, record: Record, tokens: int) -> None:
        """Write the record, with the speed, and show it."""
        now = time.monotonic()
        spent, self.last = now - self.last, now
        self.busy += spent
        self.tokens += tokens
        # The first step of a process also sets up kernels and buckets.
        speed = tokens / spent
        self.rate = speed if self.rate == 0 else 0.95 * self.rate + 0.05 * speed
        self._write({**record, "tokens_per_second": round(speed, 1)})
        shown = f"loss {record['loss']:.3f}"
        if self.measure.name != "loss":
            shown += f"  {record[self.measure.name]:.3f} {self.measure.unit}"
        if self.config.precision == "fp16":
            shown += f"  scale {_power(record['loss_scale'])}  skipped {record['skipped']}"
        shown += f"  {self.rate / 1000:.1f}k tok/s"
        step = record["step"]
        if self.bar is not None:
            self.bar.update(self.task, completed=step, shown=shown)
        elif now - self.said > _SECONDS_BETWEEN_LINES or step == self.config.steps:
            self.said = now
            self.console.print(f"step {step:>5}/{self.config.steps}  {shown}")

    def validation(self, record: Record) -> None:
        """Write the record and print it as a line that stays."""
        self._write(record)
        self.console.print(
            f"step {record['step']:>5}/{self.config.steps}  validation:"
            f" loss {record['validation_loss']:.4f}, {self._validation(record)}"
        )
        self.last = time.monotonic()

    def finish(self, more: dict[str, str]) -> None:
        """Draw the plot, and print the summary and where the results are."""
        self.close()
        plot_run(self.records, self.config, self.measure, self.folder / PLOT)
        validations = [r for r in self.records if "validation_loss" in r]
        steps = [r for r in self.records if "loss" in r]
        first, last = (self._validation(r) for r in (validations[0], validations[-1]))
        elapsed = time.monotonic() - self.began
        speed = self.tokens / self.busy if self.busy else 0.0
        facts = {
            "Validation": f"{first} -> {last}",
            "Time": f"{elapsed:.0f} s, {speed:,.0f} tokens/s",
        }
        if self.config.precision == "fp16":
            facts["Loss scale"] = _power(steps[-1]["loss_scale"])
            facts["Skipped"] = f"{steps[-1]['skipped']} of {steps[-1]['step']} steps"
        self.console.print()
        self._table({**facts, **more})
        self.console.print(f"Results are in [bold]{self.folder}[/bold]:")
        for name, what in {
            METRICS: "every step and validation, one JSON object per line",
            PLOT: "loss and loss scale",
            "checkpoints": f"the run as it stands; for more, --resume {self.folder} --steps N",
            "config.json": "what it was asked to do",
        }.items():
            self.console.print(f"  {name:<14} {what}")

    def close(self) -> None:
        """Stop the bar and close metrics.jsonl."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        with contextlib.suppress(OSError):
            self.metrics.close()

    def _table(self, facts: dict[str, str]) -> None:
        for name, fact in facts.items():
            self.console.print(f"[bold]{name:<12}[/bold]{fact}")
        self.console.print()

    def _validation(self, record: Record) -> str:
        """Say how good the model is, in what people measure that in."""
        if self.measure.name == "loss":
            return f"{100 * record['validation_accuracy']:.1f} % right"
        return f"{record[f'validation_{self.measure.name}']:.3f} {self.measure.unit}"

    def _write(self, record: Record) -> None:
        record = {k: _finite(v) for k, v in record.items()}
        self.records.append(record)
        try:
            if self.behind:  # a line may be half written: begin anew with all of them
                self.metrics.close()
                self.metrics = _start_metrics(self.folder / METRICS, self.records)
            else:
                # A line is handed to the system at once: killing the process loses none.
                self.metrics.write(json.dumps(record) + "\n")
                self.metrics.flush()
            self.behind = False
        except OSError as error:
            if not self.behind:
                self.note(f"Warning: cannot write {METRICS}: {error.strerror}; the run goes on")
            self.behind = True


def _bar(console: Console) -> Progress:
    columns: list[ProgressColumn] = [
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(compact=True),
    ]
    # Drawing takes time from the ranks, which share the cores.
    return Progress(*columns, console=console, refresh_per_second=2, expand=True)


def _power(scale: float) -> str:
    """Show a loss scale as a power of two where it is one."""
    exponent = math.log2(scale) if scale > 0 and math.isfinite(scale) else math.nan
    return f"2^{exponent:.0f}" if exponent == round(exponent, 9) // 1 else f"{scale:g}"


def _finite(value: Any) -> Any:
    """JSON has no inf and no nan."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path, until: int | None = None) -> list[Record]:
    """Read a run's records, up to a step; a last line cut off by a kill is no record."""
    if not path.is_file():
        return []
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return [r for r in records if until is None or r["step"] <= until]


def _start_metrics(path: Path, history: list[Record]) -> TextIO:
    """Open metrics.jsonl to append to what happened before the checkpoint, and nothing after."""
    fresh = path.with_name(f".{path.name}.partial")
    fresh.write_text("".join(json.dumps(r) + "\n" for r in history), encoding="utf-8")
    fresh.replace(path)
    return path.open("a", encoding="utf-8")


def plot_run(records: list[Record], config: Config, measure: Measure, path: Path) -> None:
    """Draw the loss, in what people measure it in, and the loss scale over the steps."""
    # The first use ever builds a cache of fonts, and says so on the terminal.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps = [r for r in records if r.get("loss") is not None]
    validations = [r for r in records if r.get("validation_loss") is not None]
    scaled = config.precision == "fp16"
    figure, axes = plt.subplots(
        1 + scaled,
        1,
        figsize=(8, 5.2 if scaled else 3.6),
        sharex=True,
        squeeze=False,
        height_ratios=[2.2, 1][: 1 + scaled],
        layout="constrained",
    )
    top = axes[0][0]
    x = [r["step"] for r in steps]
    top.plot(x, [r[measure.name] for r in steps], color="#b6cbe8", lw=0.8, label="training")
    top.plot(
        [r["step"] for r in validations],
        [r[f"validation_{measure.name}"] for r in validations],
        color="#1f5fae",
        marker="o",
        ms=4,
        lw=1.6,
        label="validation",
    )
    if validations:
        last = validations[-1]
        top.annotate(
            f"{last[f'validation_{measure.name}']:.2f}",
            (last["step"], last[f"validation_{measure.name}"]),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            color="#1f5fae",
        )
    top.set_ylabel(measure.says)
    top.legend(frameon=False)
    if scaled:
        bottom = axes[1][0]
        bottom.step(x, [r["loss_scale"] for r in steps], where="post", color="#c2571a", lw=1.4)
        bottom.set_yscale("log", base=2)
        skipped = [r for r in steps if not r["stepped"]]
        bottom.plot(
            [r["step"] for r in skipped],
            [r["loss_scale"] for r in skipped],
            "x",
            color="#8c1d18",
            ms=6,
            label=f"skipped ({len(skipped)})",
        )
        bottom.set_ylabel("loss scale")
        bottom.legend(frameon=False, loc="lower right")
    axes[-1][0].set_xlabel("step")
    for axis in (a for row in axes for a in row):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6", lw=0.6)
        axis.set_axisbelow(True)
    figure.suptitle(f"{config.model} in {config.precision}")
    figure.savefig(path, dpi=150)
    plt.close(figure)
