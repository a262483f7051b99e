"""The output of a run: log lines, metrics.jsonl, TensorBoard, and a picture of the curves."""

import contextlib
import json
import math
import resource
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json
from rich.console import Console
from rich.progress import Progress

from distamp.report import NonFiniteOrigin
from launch.data import Data
from launch.folder import acquire_run_dir, write_atomically
from launch.job import Job
from launch.model import find_blocks, unwrap_ddp
from launch.program import convert_to_usage_error, flag

Record = dict[str, Any]
# Formats of the entries of a log line, in their order.
_LINE_FORMATS = {
    "count": "step {}",
    "loss": "loss {:.4f}",
    "gradient_norm": "norm {:.3g}",
    "learning_rate": "lr {:.3g}",
    "loss_scale": "scale {:.10g}",
    "skipped": "skipped {}",
    "tokens_per_second": "{:,.0f} {unit}/s",
    "mfu": "mfu {:.1%}",
    "time_left": "{} left",
    "reason": "SKIPPED: {}",
    "rewind": "WENT BACK {}",
    "skipped_earlier": "SKIPPED since the last line: {}",
    "validation_loss": "held out: loss {:.4f}",
    "bits_per_byte": "{:.4f} bits a byte",
    "accuracy": "accuracy {:.4f}",
}
# Number of skipped steps that the summary lists.
_LISTED_SKIPS = 8


class Metrics(contextlib.ExitStack):
    """The output of a run, until the context ends. Only the first rank writes.

    Args:
        job: The run.

    Raises:
        UsageError: The folder of the run cannot be written to, or another process trains in it.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._is_first = job.layout.rank == 0
        self._tensorboard: Any = None
        self._targets = count_targets(job.data)
        self._flops = flops_per_example(job)
        self._unit = "examples" if self._targets == 1 else "tokens"
        job.layout.run_on_first_rank(self._open)
        console = Console(highlight=False, soft_wrap=True, quiet=not self._is_first)
        bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._bar = self.enter_context(bar)
        self._task = self._bar.add_task("", total=job.config.steps, completed=job.progress.step)
        self._print_start()
        self._start_time = time.monotonic()
        self.start_clock()

    def _open(self) -> None:
        """Take the folder of the run and open the files in it."""
        config = self._job.config
        step = self._job.progress.step
        run_dir = config.run_dir
        # The folder may contain these files, and is emptied below.
        copies = {}
        if config.tokenizer is not None:
            copies["tokenizer.json"] = config.tokenizer.read_bytes()
        if config.precision.endswith(".toml"):
            copies["precision.toml"] = Path(config.precision).read_bytes()
        resumed_step = step if config.resumes_in_place else None
        self.enter_context(acquire_run_dir(run_dir, resumed_step))
        for name, content in copies.items():
            (run_dir / name).write_bytes(content)
        data = self._job.data
        about = {"data": data.name, "classes": data.classes, "text": data.text is not None}
        write_atomically(run_dir / "data.json", json.dumps(about) + "\n")
        write_atomically(run_dir / "config.json", config.model_dump_json(indent=1) + "\n")
        # The steps after the checkpoint are repeated, and so are their records.
        lines = []
        if config.resumes_in_place:
            for record in read_records(run_dir):
                if record["step"] <= step:
                    lines.append(json.dumps(record) + "\n")
        write_atomically(run_dir / "metrics.jsonl", "".join(lines))
        file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self._file = self.enter_context(file)
        self.callback(self._write_picture)
        if config.tensorboard:
            hint = "--tensorboard: pip install -e '.[tensorboard]'"
            with convert_to_usage_error(hint, ImportError):
                from torch.utils.tensorboard import SummaryWriter
            self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)
            self.callback(self._tensorboard.close)

    def _print_start(self) -> None:
        config, data, layout = self._job.config, self._job.data, self._job.layout
        flags = config.model_dump(exclude_defaults=True, exclude={"run_dir", "resume"})
        command_line = " ".join(_format_flag(name, value) for name, value in flags.items())
        now = time.strftime("%Y-%m-%d %H:%M")
        self.print_line(f"{now} {config.run_dir}: {command_line}")
        num_weights = 0
        num_frozen = 0
        for param in self._job.model.parameters():
            num_weights += param.numel()
            if not param.requires_grad:
                num_frozen += param.numel()
        weights = f"{num_weights:,} weights"
        if num_frozen:
            weights += f" ({num_frozen:,} frozen)"
        self.print_line(
            f"The model {config.model} has {weights} and trains on {self._job.device.type} with "
            f"--replicate {layout.replicate} --shard {layout.shard} --tp {layout.tp}."
        )
        self.print_line(
            f"The data are {data.name}: {len(data.train):,} examples to train on, and "
            f"{len(data.held_out):,} held-out examples."
        )
        if self._job.progress.step:
            self.print_line(f"The run resumes after step {self._job.progress.step}.")

    def print_line(self, line: str) -> None:
        """Print a line on the first rank, and flush it."""
        self._bar.console.print(line, markup=False)
        self._bar.console.file.flush()

    def record(self, record: Record, seconds: float = math.inf) -> None:
        """Write the record of a step or an evaluation to every output.

        Args:
            record: The values by name, with ``"step"``.
            seconds: The time until the run must end.
        """
        if not self._is_first:
            return
        step = record["step"]
        is_step = "loss" in record
        if is_step:
            record = {**record, **self._measure_speed(step)}
        line = self._format_line(record, seconds)
        if is_step and not self._bar.disable:
            self._bar.update(self._task, completed=step, description=line)
        else:
            self.print_line(line)
        # JSON has no NaN, which is the norm of a skipped step.
        self._file.write(to_json(record, inf_nan_mode="null").decode() + "\n")
        if self._tensorboard is not None:
            for name, value in record.items():
                if name not in ("step", "skipped_steps", "error"):
                    self._tensorboard.add_scalar(name, value, step)

    def _format_line(self, record: Record, seconds: float) -> str:
        config = self._job.config
        step = record["step"]
        width = len(str(config.steps))
        entries = {**record, "count": f"{step:>{width}}/{config.steps}"}
        if "loss" in record:
            num_targets = (config.steps - step) * config.global_batch_size * self._targets
            time_left = min(seconds, num_targets / max(0.1, record["tokens_per_second"]))
            entries["time_left"] = timedelta(seconds=max(0, round(time_left)))
        if not record.get("taken", True):
            entries["reason"] = "not finite"
            if math.isfinite(record["gradient_norm"]):
                entries["reason"] = f"norm above --skip-norm-above {config.skip_norm_above:g}"
        if "rewound" in record:
            num_steps = format_steps(record["rewound"])
            entries["rewind"] = f"{num_steps} after {record['error']}"
        skipped_earlier = [str(s) for s in record.get("skipped_steps", []) if s != step]
        if "rewound" in record:
            skipped_earlier = []  # The number of steps is in the line already.
        if skipped_earlier:
            noun = "step" if len(skipped_earlier) == 1 else "steps"
            entries["skipped_earlier"] = f"{noun} {', '.join(skipped_earlier)}"
        parts = []
        for name, line_format in _LINE_FORMATS.items():
            if name in entries:
                parts.append(line_format.format(entries[name], unit=self._unit))
        return "  ".join(parts)

    def start_clock(self) -> None:
        """Start to measure the speed, after an evaluation or a checkpoint."""
        self._clock_start = time.monotonic()
        self._clock_step = self._job.progress.step

    def _measure_speed(self, step: int) -> Record:
        config = self._job.config
        seconds = max(1e-9, time.monotonic() - self._clock_start)
        examples_per_second = (step - self._clock_step) * config.global_batch_size / seconds
        speed = {"tokens_per_second": round(examples_per_second * self._targets, 1)}
        if config.peak_tflops:
            peak = self._job.layout.world_size * config.peak_tflops * 1e12
            speed["mfu"] = round(examples_per_second * self._flops / peak, 6)
        return speed

    def write_nonfinite_origin(self, origin: NonFiniteOrigin) -> None:
        """Write the origin of the first inf or NaN of this step to nonfinite.jsonl."""
        if not self._is_first:
            return
        row = {"step": self._job.progress.step, **origin.to_dict()}
        path = self._job.config.run_dir / "nonfinite.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=str) + "\n")

    def print_summary(self, stop_reason: str) -> None:
        """Print the result of the run, the reason of an early end, and the next command.

        Args:
            stop_reason: The reason why the run ended before its last step, or an empty string.
        """
        config, progress = self._job.config, self._job.progress
        run_dir = config.run_dir
        taken = format_steps(progress.step - progress.skipped)
        if progress.skipped == 0:
            self.print_line(f"The run took {taken} and skipped none.")
        elif self._is_first:
            listed = _list_skipped_steps(read_records(run_dir), progress.skipped)
            skipped = f"skipped {progress.skipped} on every rank: {listed}"
            self.print_line(f"The run took {taken} and {skipped}.")
        elapsed = timedelta(seconds=round(time.monotonic() - self._start_time))
        gibibytes = peak_memory(self._job.device) / 2**30
        self.print_line(
            f"It ran for {elapsed}, and the peak memory of rank 0 was {gibibytes:.2f} GiB."
        )
        has_checkpoint = config.keep_checkpoints > 0
        if stop_reason:
            self.print_line(f"It ended before its last step because {stop_reason}.")
            if has_checkpoint:
                self.print_line(f"Resume it with --resume {run_dir}.")
        if not has_checkpoint:
            self.print_line(
                f"The results are in {run_dir}, without a checkpoint (--keep-checkpoints 0)."
            )
            return
        self.print_line(f"The results are in {run_dir}.")
        if self._job.data.text is not None:
            command = shlex.join([sys.executable, "-m", "launch.sample", str(run_dir)])
            self.print_line(f"To print text that the model generates, run\n  {command}")

    def _write_picture(self) -> None:
        run_dir = self._job.config.run_dir
        try:
            draw_figure([run_dir]).savefig(run_dir / "curves.png")
        except OSError as error:
            # This runs while an error may end the run, and must not replace that error.
            self.print_line(f"Warning: no curves.png: {error}")


def _format_flag(name: str, value: Any) -> str:
    """Return a flag with its value as the user would type it."""
    if isinstance(value, bool):
        return flag(name) if value else flag(f"no_{name}")
    if isinstance(value, tuple):
        value = " ".join(value)
    return f"{flag(name)} {value}"


def format_steps(number: int) -> str:
    """Return a number of steps as text, such as "1 step"."""
    return f"{number} step" if number == 1 else f"{number} steps"


def _list_skipped_steps(records: Sequence[Record], num_skipped: int) -> str:
    """Return the numbers of the last skipped steps as text, such as "..., 7, 9"."""
    steps: list[str] = []
    for record in records:
        steps += [str(step) for step in skipped_steps(record)]
    # A step that was skipped and later taken back is in two records.
    steps = list(dict.fromkeys(steps))[-_LISTED_SKIPS:]
    if len(steps) < num_skipped:
        steps.insert(0, "...")
    return ", ".join(steps)


def skipped_steps(record: Record) -> list[int]:
    """Return the steps that were skipped since the record before this one."""
    if "skipped_steps" in record:
        return list(record["skipped_steps"])
    # Records of an older version contain only whether their step was taken.
    return [] if record.get("taken", True) else [record["step"]]


def count_targets(data: Data) -> int:
    """Return the number of targets of one example: the tokens of a text, or 1 for values."""
    targets = data.first_batch(torch.device("cpu")).targets
    return 1 if targets.is_floating_point() else targets.numel()


def flops_per_example(job: Job) -> float:
    """Return the floating-point operations of one example, forward and backward.

    A token costs 6 operations for each weight, and 12 for each channel, block and other token of
    the sequence (PaLM, appendix B).
    """
    config = job.config
    model = unwrap_ddp(job.model)
    per_token = 6 * sum(p.numel() for p in model.parameters())
    if config.model == "gpt":
        per_token += 12 * len(find_blocks(model)) * config.d_model * config.seq_len
    return float(count_targets(job.data) * per_token)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this rank has used: of the accelerator, or of the process."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.accelerator.max_memory_allocated(device))


def read_records(run_dir: Path) -> list[Record]:
    """Read metrics.jsonl, without a line that a killed run has left incomplete.

    Raises:
        UsageError: There is no such file, or it cannot be read.
    """
    with convert_to_usage_error(f"{run_dir}: no run there", OSError, ValueError):
        text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
        complete_lines = text.split("\n")[:-1]
        return [json.loads(line) for line in complete_lines]


# -- the picture -----------------------------------------------------------------------------------


def draw_figure(run_dirs: Sequence[Path]) -> Any:
    """Return a picture of the losses and loss scales of runs, with a cross for each skipped step.

    The panel of the loss scale is left out if no run has one.
    """
    from matplotlib.figure import Figure

    records = {run_dir.name: read_records(run_dir) for run_dir in run_dirs}
    has_scale = any(_has_scale(rows) for rows in records.values())
    size, ratios = ((8, 5), (3, 1)) if has_scale else ((8, 3.5), (1,))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    grid = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)
    panels = grid[:, 0]
    losses, scales = panels[0], panels[-1]
    if has_scale:
        scales.set_yscale("log", base=2)
        scales.set_ylabel("loss scale")
    losses.set_ylabel("loss (nats)")
    scales.set_xlabel("step")
    for index, (name, rows) in enumerate(records.items()):
        # Each run is thinner than the run below it, so that equal curves stay visible.
        width = 1.0 + 2.0 * (len(records) - 1 - index)
        _draw_run(losses, scales, name, rows, color=f"C{index}", width=width)
    for panel in panels:
        # The margin keeps the crosses, which are larger than their points, inside the frame.
        panel.margins(y=0.15)
        if panel.lines:
            panel.legend(fontsize="small")
    return figure


def _has_scale(rows: Sequence[Record]) -> bool:
    return any("loss_scale" in row for row in rows)


def _draw_run(
    losses: Any, scales: Any, name: str, rows: Sequence[Record], *, color: str, width: float
) -> None:
    """Draw the curves of one run into the two panels."""
    dots = {"marker": "o", "ms": 2 + width}
    crosses = {"ls": "", "marker": "x", "ms": 5 + width}
    cross_panel, cross_key = (scales, "loss_scale") if _has_scale(rows) else (losses, "loss")
    skips: list[tuple[int, float]] = []
    for row in rows:
        # A step between two records has the loss scale of the next record.
        if row.get(cross_key) is not None:
            skips += [(step, row[cross_key]) for step in skipped_steps(row)]
    curves = (
        (losses, "training", _points(rows, "loss"), {"alpha": 0.4}),
        (losses, "held out", _points(rows, "validation_loss"), dots),
        (scales, "scale", _points(rows, "loss_scale"), {"drawstyle": "steps-pre"}),
        (cross_panel, "skipped", skips, crosses),
    )
    label: str | None = f"{name}, went back"
    for row in rows:
        if "rewound" in row:
            first_step = row["step"] - row["rewound"]
            losses.axvspan(first_step, row["step"], color=color, alpha=0.2, lw=0, label=label)
            label = None  # One entry of the legend for all.
    for panel, label, points, style in curves:
        if points:
            (line,) = panel.plot(*zip(*points, strict=True), **style)
            line.set(color=color, lw=width, label=f"{name}, {label}")


def _points(rows: Sequence[Record], key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]
