"""What a run shows and leaves to look at: lines, JSON lines, TensorBoard, a picture."""

import contextlib
import json
import math
import resource
import shlex
import sys
import time
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
# How a line shows what a record has.
_SHOWN = {
    "of": "step {}",
    "loss": "loss {:.4f}",
    "gradient_norm": "norm {:.3g}",
    "learning_rate": "lr {:.3g}",
    "loss_scale": "scale {:.10g}",
    "skipped": "skipped {}",
    "tokens_per_second": "{:,.0f} {unit}/s",
    "mfu": "mfu {:.1%}",
    "left": "{} left",
    "why": "SKIPPED: {}",
    "validation_loss": "held out: loss {:.4f}",
    "bits_per_byte": "{:.4f} bits a byte",
    "accuracy": "accuracy {:.4f}",
}


class Metrics(contextlib.ExitStack):
    """Where the records of a run go, until it is left; on other ranks than the first, nowhere.

    Args:
        job: The run.

    Raises:
        UsageError: The folder cannot be written to, or another process does.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job, self._is_first = job, job.layout.rank == 0
        self._board: Any = None
        self._targets, self._flops = count_targets(job.data), flops_per_example(job)
        self._unit = "examples" if self._targets == 1 else "tokens"
        job.layout.run_on_first_rank(self._open)
        console = Console(highlight=False, soft_wrap=True, quiet=not self._is_first)
        bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._bar = self.enter_context(bar)
        self._task = self._bar.add_task("", total=job.config.steps, completed=job.progress.step)
        self._say_what_begins()
        self._started = time.monotonic()
        self.start_clock()

    def _open(self) -> None:
        config, data, step = self._job.config, self._job.data, self._job.progress.step
        run = config.run_dir
        rules = config.precision if config.precision.endswith(".toml") else None
        given = {"tokenizer.json": config.tokenizer, "precision.toml": rules}
        # Read before the folder is emptied, in which they may lie.
        copies = {name: Path(path).read_bytes() for name, path in given.items() if path}
        self.enter_context(acquire_run_dir(run, step if config.resumes_in_place else None))
        about = {"data": data.name, "classes": data.classes, "text": data.text is not None}
        write_atomically(run / "data.json", json.dumps(about) + "\n")
        write_atomically(run / "config.json", config.model_dump_json(indent=1) + "\n")
        for name, content in copies.items():
            (run / name).write_bytes(content)
        # What came after the checkpoint comes again.
        kept = (
            [row for row in read_records(run) if row["step"] <= step]
            if config.resumes_in_place
            else []
        )
        write_atomically(run / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
        file = (run / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self._file = self.enter_context(file)
        self.callback(self._draw)
        if config.tensorboard:
            with convert_to_usage_error(
                "--tensorboard: pip install -e '.[tensorboard]'", ImportError
            ):
                from torch.utils.tensorboard import SummaryWriter
            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)
            self.callback(self._board.close)

    def _say_what_begins(self) -> None:
        config, data, layout = self._job.config, self._job.data, self._job.layout
        flags = config.model_dump(exclude_defaults=True, exclude={"run_dir", "resume"})
        told = " ".join(_given(name, value) for name, value in flags.items())
        self.say(f"{time.strftime('%Y-%m-%d %H:%M')} {config.run_dir}: {told}")
        parameters = [*self._job.model.parameters()]
        frozen = sum(p.numel() for p in parameters if not p.requires_grad)
        weights = f"{sum(p.numel() for p in parameters):,} weights, {frozen:,} of them frozen"
        ranks = f"--replicate {layout.replicate} --shard {layout.shard} --tp {layout.tp}"
        self.say(f"{config.model}, {weights}, on {self._job.device.type}, {ranks}")
        self.say(f"{data.name}: {len(data.train):,} examples, {len(data.held_out):,} held out")
        if self._job.progress.step:
            self.say(f"going on after step {self._job.progress.step}")

    def say(self, line: str) -> None:
        """Print a line, once, and at once."""
        self._bar.console.print(line, markup=False)
        self._bar.console.file.flush()

    def note(self, record: Record, seconds: float = math.inf) -> None:
        """Write a record of a step or an evaluation, for machines and for people.

        Args:
            record: What there is to say.
            seconds: Until the run must end.
        """
        if not self._is_first:
            return
        step, is_step = record["step"], "loss" in record
        if is_step:
            record = {**record, **self._speed(step)}
        line = self._line(record, seconds)
        if is_step and not self._bar.disable:
            self._bar.update(self._task, completed=step, description=line)
        else:
            self.say(line)
        # JSON has no NaN; a skipped step's norm is one.
        self._file.write(to_json(record, inf_nan_mode="null").decode() + "\n")
        if self._board is not None:
            for key in record.keys() - {"step"}:
                self._board.add_scalar(key, record[key], step)

    def _line(self, record: Record, seconds: float) -> str:
        step, config = record["step"], self._job.config
        shown = {**record, "of": f"{step:>{len(str(config.steps))}}/{config.steps}"}
        if "loss" in record:
            tokens = (config.steps - step) * config.global_batch_size * self._targets
            seconds = min(seconds, tokens / max(0.1, record["tokens_per_second"]))
            shown["left"] = timedelta(seconds=max(0, round(seconds)))
        if not record.get("taken", True):
            finite = math.isfinite(record["gradient_norm"])
            shown["why"] = (
                f"norm above --skip-norm-above {config.skip_norm_above:g}"
                if finite
                else "not finite"
            )
        parts = [(form, shown[key]) for key, form in _SHOWN.items() if key in shown]
        return "  ".join(form.format(value, unit=self._unit) for form, value in parts)

    def start_clock(self) -> None:
        """Begin to measure speed, after a step and all that was due."""
        self._began, self._last = time.monotonic(), self._job.progress.step

    def _speed(self, step: int) -> Record:
        job, seconds = self._job, max(1e-9, time.monotonic() - self._began)
        examples = (step - self._last) * job.config.global_batch_size / seconds
        speed = {"tokens_per_second": round(examples * self._targets, 1)}
        if job.config.peak_tflops:
            peak = job.layout.world * job.config.peak_tflops * 1e12
            speed["mfu"] = round(examples * self._flops / peak, 4)
        return speed

    def blame(self, origin: NonFiniteOrigin) -> None:
        """Keep where the first inf or NaN of this step was born; distamp has logged it."""
        row = {"step": self._job.progress.step, **origin.to_dict()}
        if self._is_first:
            with (self._job.config.run_dir / "nonfinite.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, default=str) + "\n")

    def summarize(self, *, ended: str) -> None:
        """Say how a run went, what can be done with it, and why it ended before its last step."""
        config, progress = self._job.config, self._job.progress
        run, keep = config.run_dir, config.keep_checkpoints
        rows = read_records(run) if self._is_first else []
        last = [str(row["step"]) for row in rows if not row.get("taken", True)][-8:]
        which = ", ".join(["..."] * (len(last) < progress.skipped) + last)
        skipped = f"{progress.skipped} skipped on every rank: {which}" if which else "none skipped"
        self.say(f"{format_steps(progress.step - progress.skipped)} taken, {skipped}")
        took = timedelta(seconds=round(time.monotonic() - self._started))
        gigabytes = peak_memory(self._job.device) / 2**30
        self.say(f"it took {took}; peak memory of rank 0: {gigabytes:.2f} GiB")
        if ended:
            self.say(f"ended early: {ended}" + (f"; go on with --resume {run}" if keep else ""))
        self.say(
            f"Results are in {run}"
            + ("" if keep else ", without a checkpoint (--keep-checkpoints 0)")
        )
        if keep and self._job.data.text is not None:
            words = sys.executable, "-m", "launch.sample", str(run)
            self.say(f"For text from it:\n  {shlex.join(words)}")

    def _draw(self) -> None:
        run = self._job.config.run_dir
        try:
            draw_figure([run]).savefig(run / "curves.png")
        except OSError as error:  # why the run ended is to be read
            self.say(f"Warning: no curves.png: {error}")


def _given(name: str, value: Any) -> str:
    """Return a flag as it is given."""
    if isinstance(value, bool):
        return flag(name) if value else flag(f"no_{name}")
    return f"{flag(name)} {' '.join(value) if isinstance(value, tuple) else value}"


def format_steps(number: int) -> str:
    """Return a number of steps as text, such as "1 step"."""
    return f"{number} step" if number == 1 else f"{number} steps"


def count_targets(data: Data) -> int:
    """Return how many targets one example has: of a text, its tokens; of values, one."""
    targets = data.first_batch(torch.device("cpu")).targets
    return 1 if targets.is_floating_point() else targets.numel()


def flops_per_example(job: Job) -> float:
    """Return the floating-point operations of one example, forward and backward.

    Six for each weight and token, and twelve for each channel, block and pair of tokens (PaLM,
    appendix B).
    """
    config, model = job.config, unwrap_ddp(job.model)
    weights = sum(p.numel() for p in model.parameters())
    attention = 12 * len(find_blocks(model)) * config.d_model * config.seq_len
    return float(count_targets(job.data) * (6 * weights + attention * (config.model == "gpt")))


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this rank has used: of the accelerator, or of the process."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.accelerator.max_memory_allocated(device))


def read_records(run: Path) -> list[Record]:
    """Read metrics.jsonl, but for what a killed run has half written.

    Raises:
        UsageError: There is none, or it cannot be read.
    """
    with convert_to_usage_error(f"{run}: no run there", OSError, ValueError):
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]


def draw_figure(runs: list[Path]) -> Any:
    """Return a picture of losses, and of loss scales where a run has one; a cross is a skip."""
    from matplotlib.figure import Figure

    records = {run.name: read_records(run) for run in runs}
    scaled = any("loss_scale" in row for rows in records.values() for row in rows)
    size, ratios = ((8, 5), (3, 1)) if scaled else ((8, 3.5), (1,))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    panels = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    losses, scales = panels[0], panels[-1]
    if scaled:
        scales.set_yscale("log", base=2)
        scales.set_ylabel("loss scale")
    losses.set_ylabel("loss (nats)")
    scales.set_xlabel("step")
    for number, (name, rows) in enumerate(records.items()):
        # Runs that lie on each other stay in sight: each is thinner than the one below it.
        width = 1.0 + 2.0 * (len(runs) - 1 - number)
        skips = [row for row in rows if not row.get("taken", True)]
        crossed = "loss_scale" if any("loss_scale" in row for row in rows) else "loss"
        for key, shown, label, style in (
            ("loss", rows, "training", {"alpha": 0.4}),
            ("validation_loss", rows, "held out", {"marker": "o", "ms": 2 + width}),
            ("loss_scale", rows, "scale", {"drawstyle": "steps-pre"}),
            (crossed, skips, "skipped", {"ls": "", "marker": "x", "ms": 5 + width}),
        ):
            points = [(row["step"], row[key]) for row in shown if row.get(key) is not None]
            panel = scales if key == "loss_scale" else losses
            if points:
                (line,) = panel.plot(*zip(*points, strict=True), **style)
                line.set(color=f"C{number}", lw=width, label=f"{name}, {label}")
    for panel in panels:
        panel.margins(y=0.15)  # a cross is drawn around its point
        if panel.lines:
            panel.legend(fontsize="small")
    return figure
