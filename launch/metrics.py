"""What a run shows and leaves to look at: lines, JSON lines, TensorBoard, a picture."""

import contextlib
import json
import math
import os
import resource
import shlex
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from distamp import NonFinite
from launch.config import Config
from launch.data import Data
from launch.folder import begin, write_whole
from launch.model import blocks_of
from launch.parallel import Layout, on_first
from launch.usage import UsageError

Record = dict[str, Any]
# How a line shows what a record has.
_SHOWN = {
    "loss": "loss {:.4f}",
    "gradient_norm": "norm {:.3g}",
    "learning_rate": "lr {:.3g}",
    "loss_scale": "scale {:g}",
    "skipped": "skipped {}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "mfu {:.1%}",
    "validation_loss": "held out: loss {:.4f}",
    "bits_per_byte": "{:.4f} bits a byte",
    "accuracy": "accuracy {:.4f}",
}


class Metrics:
    """Where the records of a run go; on other ranks than the first, nowhere.

    Args:
        config: The run's flags.
        data: What is trained on.
        model: What is trained, not wrapped.
        layout: The ranks.
        device: Where the model is.
        step: From which the run goes on.

    Raises:
        UsageError: The folder cannot be written to, or another process does.
    """

    def __init__(
        self,
        config: Config,
        data: Data,
        model: nn.Module,
        layout: Layout,
        device: torch.device,
        step: int,
    ) -> None:
        self._config, self._data, self._device = config, data, device
        self._main = layout.rank == 0
        peak = layout.world * (config.peak_tflops or math.inf) * 1e12
        self._utilisation = flops_per_example(model, config, data) / peak
        self._board: Any = None
        on_first(layout, lambda: self._open(step))
        console = Console(highlight=False, soft_wrap=True, quiet=not self._main)
        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=config.steps, completed=step)
        self._bar.start()
        weights = sum(p.numel() for p in model.parameters())
        shape = f"{layout.replicate} x {layout.shard} x {layout.tp} ranks on {device.type}"
        self.say(f"{config.model}, {weights:,} weights, {config.precision}, {shape}")
        self.say(f"{data.name}: {len(data.train):,} examples, {len(data.held_out):,} held out")
        if step:
            self.say(f"going on after step {step}")
        self._first = step
        self._started = time.monotonic()
        self.start_clock(step)

    def _open(self, step: int) -> None:
        config, run = self._config, self._config.run_dir
        self._lock = begin(run, step if config.goes_on else None)
        # What came after the checkpoint comes again.
        old = read_records(run) if config.goes_on else []
        lines = [json.dumps(row) + "\n" for row in old if row["step"] <= step]
        text = self._data.text is not None
        told = {"data": self._data.name, "classes": self._data.classes, "text": text}
        write_whole(run / "data.json", json.dumps(told) + "\n")
        write_whole(run / "config.json", config.to_json())
        write_whole(run / "metrics.jsonl", "".join(lines))
        if config.tokenizer is not None:
            _copy(config.tokenizer, run / "tokenizer.json")
        if config.precision.endswith(".toml"):
            _copy(Path(config.precision), run / "precision.toml")
        self._file = (run / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        if config.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UsageError("--tensorboard: pip install -e '.[tensorboard]'") from None
            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def say(self, line: str) -> None:
        """Print a line, once, and at once."""
        self._bar.console.print(line, markup=False)
        self._bar.console.file.flush()

    def note(self, record: Record) -> None:
        """Write a record of a step or an evaluation, for machines and for people."""
        if not self._main:
            return
        step, trained = record["step"], "loss" in record
        if trained:
            record = {**record, **self._speed(step)}
        line = self._line(record)
        if trained and not self._bar.disable:
            self._bar.update(self._task, completed=step, description=line)
        else:
            self.say(line)
        # JSON has no NaN; a skipped step's norm is one.
        finite = {key: value if math.isfinite(value) else None for key, value in record.items()}
        self._file.write(json.dumps(finite) + "\n")
        if self._board is not None:
            for key in record.keys() - {"step"}:
                self._board.add_scalar(key, record[key], step)

    def blame(self, step: int, origin: NonFinite) -> None:
        """Keep where the first inf or NaN of a step was born; distamp has logged it."""
        if self._main:
            with (self._config.run_dir / "nonfinite.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **origin.to_dict()}, default=str) + "\n")

    def _line(self, record: Record) -> str:
        step, steps = record["step"], self._config.steps
        parts = [f"step {step:>{len(str(steps))}}/{steps}"]
        parts += [form.format(record[key]) for key, form in _SHOWN.items() if key in record]
        if "loss" in record:
            seconds = (time.monotonic() - self._started) / (step - self._first)
            parts.append(f"{timedelta(seconds=round((steps - step) * seconds))} left")
        return "  ".join(parts)

    def start_clock(self, step: int) -> None:
        """Begin to measure speed, after a step and all that was due."""
        self._began, self._last = time.monotonic(), step

    def _speed(self, step: int) -> Record:
        seconds = max(1e-9, time.monotonic() - self._began)
        examples = (step - self._last) * self._config.batch / seconds
        speed = {"tokens_per_second": round(examples * self._data.targets, 1)}
        return speed | (
            {"mfu": round(examples * self._utilisation, 4)} if self._utilisation else {}
        )

    def summarize(self, ended: bool, step: int, skipped: int) -> None:
        """Say how a run went, and what can be done with it."""
        run, keep = self._config.run_dir, self._config.keep
        self._bar.stop()
        rows = read_records(run) if self._main and skipped else []
        which = [str(row["step"]) for row in rows if not row.get("taken", True)]
        # With --log-every some steps have no record.
        shown = "" if len(which) == skipped else ", among those with a record"
        which = ["...", *which[-8:]] if len(which) > 8 else which
        shown = f" on every rank{shown}: {', '.join(which)}" if which else ""
        self.say(f"{step - skipped} steps taken, {skipped} skipped{shown}")
        self.say(f"peak memory of rank 0: {peak_memory(self._device) / 2**30:.2f} GiB")
        if ended:
            self.say(f"stopped as asked; go on with --resume {run}" if keep else "stopped as asked")
        self.say(f"Results are in {run}" + ("" if keep else ", without a checkpoint (--keep 0)"))
        if keep and self._data.text is not None:
            # `make` activates no environment: the interpreter is named as it is called from here.
            python = os.path.relpath(sys.executable)
            python = "python" if python.startswith("..") else python
            self.say(f"For text from it:\n  {python} -m launch.sample {shlex.quote(str(run))}")

    def close(self) -> None:
        """Write what is left, and draw the curves."""
        self._bar.stop()
        if self._board is not None:
            self._board.close()
        if self._main:
            with self._lock, self._file:
                draw([self._config.run_dir], self._config.run_dir / "curves.png")


def _copy(file: Path, to: Path) -> None:
    with contextlib.suppress(shutil.SameFileError):
        shutil.copyfile(file, to)


def flops_per_example(model: nn.Module, config: Config, data: Data) -> float:
    """Return the floating-point operations of one example, forward and backward.

    Six for each weight and token, and twelve for each channel, block and pair of tokens (PaLM,
    appendix B).
    """
    weights = sum(p.numel() for p in model.parameters())
    attention = 12 * len(blocks_of(model)) * config.width * config.block
    return float(data.targets * (6 * weights + attention * (config.model == "gpt")))


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this rank has used: of the accelerator, or of the process."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.accelerator.max_memory_allocated(device))


def read_records(run: Path) -> list[Record]:
    """Read metrics.jsonl, but for what a killed run has half written.

    Raises:
        UsageError: There is none.
    """
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]
    except FileNotFoundError:
        raise UsageError(f"{run}: no run there (metrics.jsonl)") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{run}/metrics.jsonl: {error}") from None


def draw(runs: list[Path], path: Path) -> None:
    """Draw runs over each other into a file."""
    figure_of(runs).savefig(path, dpi=120)


def figure_of(runs: list[Path]) -> Any:
    """Return a picture of losses, and of loss scales where a run has one; a cross is a skip."""
    from matplotlib.figure import Figure

    records = [read_records(run) for run in runs]
    scaled = any("loss_scale" in row for rows in records for row in rows)
    figure = Figure(figsize=(8, 5) if scaled else (8, 3.5), layout="constrained")
    ratios = (3, 1) if scaled else (1,)
    panels = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    panels[0].set_ylabel("loss (nats)")
    panels[-1].set_xlabel("step")
    if scaled:
        panels[1].set_yscale("log", base=2)
        panels[1].set_ylabel("loss scale")
        panels[1].margins(y=0.15)  # a cross is drawn around its point
    for number, (run, rows) in enumerate(zip(runs, records, strict=True)):
        skipped = [row for row in rows if not row.get("taken", True)]
        # Runs that lie on each other stay in sight: each is thinner than the one below it.
        width = 1.0 + 2.0 * (len(runs) - 1 - number)
        lines: list[tuple[int, str, str, list[Record], dict[str, Any]]] = [
            (0, "loss", "training", rows, {"lw": width, "alpha": 0.4}),
            (0, "validation_loss", "held out", rows, {"lw": width, "marker": "o", "ms": 2 + width}),
            (-1, "loss_scale", "scale", rows, {"lw": width, "drawstyle": "steps-pre"}),
            (-1, "loss_scale", "skipped", skipped, {"lw": 0, "marker": "x", "ms": 5 + width}),
        ]
        for panel, name, label, shown, style in lines:
            points = [(row["step"], row[name]) for row in shown if row.get(name) is not None]
            if points:
                style |= {"color": f"C{number}", "label": f"{run.name}, {label}"}
                panels[panel].plot(*zip(*points, strict=True), **style)
    for panel in (panel for panel in panels if panel.lines):
        panel.legend(fontsize="small", loc="best")
    return figure
