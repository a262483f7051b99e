"""What the ranks say: rank 0 shows the run and writes its records, the others do nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from launch.compare import METRICS, Record, Run, draw, power_of_two
from launch.config import Config
from launch.reporting.metrics import MetricsFile
from launch.reporting.tracking import TRACKERS, trackers_for

__all__ = ["PLOT", "Reporter", "RunReporter"]

PLOT = "curves.png"
T = TypeVar("T")
# Without a terminal, a line this often.
_SECONDS_BETWEEN_LINES = 15.0


@dataclass(frozen=True)
class _Measure:
    """What people ask of data of one kind: a number in a record, and what a step is made of."""

    name: str
    unit: str
    counts: str
    short: str


_MEASURES = {
    "text": _Measure("bits_per_byte", "bits/byte", "tokens", "tok"),
    "images": _Measure("loss", "nats", "images", "images"),
}


class _Output:
    """The standard output, without errors: a run goes on when its pipe or terminal is closed."""

    def write(self, text: str) -> int:
        return self._try(lambda: sys.stdout.write(text)) or 0

    def flush(self) -> None:
        self._try(sys.stdout.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    @staticmethod
    def _try(do: Callable[[], T]) -> T | None:
        try:
            return do()
        except OSError:
            # What is written there from now on, by the interpreter's end too, goes nowhere.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
            return None


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

    def flush(self) -> None:
        """Put on the disk what was taken: a checkpoint is about to be written."""

    def finish(self, more: dict[str, str]) -> None:
        """Draw the plot and print where everything is, and ``more``."""

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
        unlock: Called once nothing more is written there.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        kind: str,
        history: list[Record],
        first: int,
        unlock: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.scales = config.level.scales
        self.measure = _MEASURES[kind]
        output: Any = _Output()
        self.console = Console(file=output, highlight=False, soft_wrap=not sys.stdout.isatty())
        self.metrics = MetricsFile(folder, history)
        self.trackers = trackers_for(folder, config, history, first)
        self.first = first
        self._unlock = unlock
        self.began = self.last = time.monotonic()
        self.shown_at = 0.0
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
        if self.scales:
            shown += f"  scale {power_of_two(record['loss_scale'])}  skipped {record['skipped']}"
        speed_shown = f"{self.rate / 1000:.1f}k" if self.rate >= 1000 else f"{self.rate:.0f}"
        shown += f"  {speed_shown} {self.measure.short}/s"
        step = record["step"]
        if self.bar is not None:
            self.bar.update(self.task, completed=step, shown=shown)
        elif now - self.shown_at > _SECONDS_BETWEEN_LINES or step == self.config.steps:
            self.shown_at = now
            self.console.print(f"step {step:>5}/{self.config.steps}  {shown}")

    def validation(self, record: Record) -> None:
        """Write the record and print it as a line that stays."""
        self._write(record)
        good = (
            f"{100 * record['validation_accuracy']:.1f} % right"
            if self.measure.name == "loss"
            else f"{record[f'validation_{self.measure.name}']:.3f} {self.measure.unit}"
        )
        self.console.print(
            f"step {record['step']:>5}/{self.config.steps}  validation:"
            f" loss {record['validation_loss']:.4f}, {good}"
        )
        self.last = time.monotonic()

    def flush(self) -> None:
        """Have the trackers write what they hold; metrics.jsonl holds nothing back."""
        self._track("flush", lambda flag: self.trackers[flag].flush())

    def finish(self, more: dict[str, str]) -> None:
        """Draw the plot, and print the summary and where the results are."""
        self.close()
        records = self.metrics.records
        left = {METRICS: "every step and validation, one JSON object per line"}
        try:
            title = f"{self.config.model} in {self.config.level_name}"
            draw([Run(self.folder.name, records)], self.folder / PLOT, title)
            left[PLOT] = "loss and loss scale" if self.scales else "loss"
        except OSError as error:
            self.note(f"Warning: cannot write {PLOT}: {error.strerror}")
        for flag in self.trackers:
            left[flag] = TRACKERS[flag].leaves.format(folder=self.folder)
        if self.config.keep_checkpoints:
            left["checkpoints"] = (
                f"the run as it stands; for more, --resume {self.folder} --steps N"
            )
        left["config.json"] = "what it was asked to do"
        self.console.print()
        self._table({**self._ends(records), **more})
        self.console.print(f"Results are in [bold]{self.folder}[/bold]:")
        for name, what in left.items():
            self.console.print(f"  {name:<14} {what}")

    def close(self) -> None:
        """Stop the bar, close metrics.jsonl and end what the trackers began."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        self.metrics.close()
        self._track("close", lambda flag: self.trackers[flag].close())
        self._unlock()

    def _ends(self, records: list[Record]) -> dict[str, str]:
        """Say how the run began and how it ended."""
        validations = [r for r in records if "validation_loss" in r]
        steps = [r for r in records if "loss" in r]
        first, last = validations[0], validations[-1]
        facts = {}
        for name, key, form in _ENDS:
            if (name_in_record := f"validation_{key}") in last:
                ends = (_shown(record.get(name_in_record), form) for record in (first, last))
                facts[name] = " -> ".join(ends)
        elapsed = time.monotonic() - self.began
        speed = self.tokens / self.busy if self.busy else 0.0
        done = steps[-1]["step"] - self.first
        facts["Time"] = (
            f"{_duration(elapsed)} for {done} steps, {speed:,.0f} {self.measure.counts}/s"
        )
        if self.scales:
            facts["Loss scale"] = power_of_two(steps[-1]["loss_scale"])
            facts["Skipped"] = f"{steps[-1]['skipped']} of {steps[-1]['step']} steps"
        return facts

    def _table(self, facts: dict[str, str]) -> None:
        width = max(12, *(len(name) + 2 for name in facts))
        for name, fact in facts.items():
            self.console.print(f"[bold]{name:<{width}}[/bold]{fact}")
        self.console.print()

    def _write(self, record: Record) -> None:
        if (error := self.metrics.write(record)) is not None:
            self.note(f"Warning: cannot write {METRICS}: {error.strerror}; the run goes on")
        written = self.metrics.records[-1]
        self._track("write", lambda flag: self.trackers[flag].write(written))

    def _track(self, what: str, do: Callable[[str], None]) -> None:
        """Do something with each tracker; one that fails is named and left out."""
        for flag in list(self.trackers):
            try:
                do(flag)
            except Exception as error:  # of any class; what watches a run must not end it
                failed = self.trackers.pop(flag)
                with contextlib.suppress(Exception):
                    failed.close()
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                self.note(f"Warning: --{flag} cannot {what}: {reason}; the run goes on without it")


# Of a validation: its row in the summary, its name in a record, and its format.
_ENDS = (
    ("Loss", "loss", "{:.4f}"),
    ("Bits per byte", "bits_per_byte", "{:.3f}"),
    ("Right", "accuracy", "{:.1%}"),
)


def _shown(value: float | None, form: str) -> str:
    """Return a number as text; in a record, one that is not finite is None."""
    return "nan" if value is None else form.format(value)


def _bar(console: Console) -> Progress:
    columns: list[ProgressColumn] = [
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(compact=True),
    ]
    # Drawing takes time from the ranks, which share the cores.
    return Progress(*columns, console=console, refresh_per_second=2, expand=True)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
