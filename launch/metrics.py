"""What a run shows and leaves to look at: progress, JSON lines, TensorBoard, a picture."""

import json
import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from launch.config import Config
from launch.data import Data
from launch.folder import begin, write_whole
from launch.model import blocks_of
from launch.parallel import Layout, on_first
from launch.usage import UsageError

Record = dict[str, Any]


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
        self._config = config
        self._device = device
        self._main = layout.rank == 0
        peak = layout.world * (config.peak_tflops or math.inf) * 1e12
        self._utilisation = flops_per_example(model, config, data) / peak
        self._targets, self._of_text = data.targets, data.of_text
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
        self.start_clock(step)

    def _open(self, step: int) -> None:
        config, path = self._config, self._config.run_dir / "metrics.jsonl"
        self._lock = begin(config.run_dir, step if config.goes_on else None)
        # What came after the checkpoint comes again.
        kept = read_records(config.run_dir) if config.goes_on and path.exists() else []
        lines = [json.dumps(row) + "\n" for row in kept if row["step"] <= step]
        write_whole(config.run_dir / "config.json", config.to_json())
        write_whole(path, "".join(lines))
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if config.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UsageError("--tensorboard: pip install -e '.[tensorboard]'") from None
            self._board = SummaryWriter(str(config.run_dir / "tensorboard"), purge_step=step + 1)

    def say(self, line: str) -> None:
        """Print a line, once."""
        self._bar.console.print(line, markup=False)

    def note(self, record: Record) -> None:
        """Write a record of a step or an evaluation."""
        if not self._main:
            return
        if "loss" in record:
            record = {**record, **self._speed(record["step"])}
            shown = f"loss {record['loss']:.4f}"
            self._bar.update(self._task, completed=record["step"], description=shown)
        else:
            found = [
                f"{key.replace('_', ' ')} {record[key]:.4f}" for key in record if key != "step"
            ]
            self.say("  ".join([f"step {record['step']:>6}", *found]))
        # JSON has no NaN; a skipped step's norm is one.
        finite = {key: value if math.isfinite(value) else None for key, value in record.items()}
        self._file.write(json.dumps(finite) + "\n")
        if self._board is not None:
            for key in record.keys() - {"step"}:
                self._board.add_scalar(key, record[key], record["step"])

    def start_clock(self, step: int) -> None:
        """Begin to measure speed, after a step and all that was due."""
        self._began, self._last = time.monotonic(), step

    def _speed(self, step: int) -> Record:
        seconds = max(1e-9, time.monotonic() - self._began)
        examples = (step - self._last) * self._config.batch / seconds
        found = {"tokens_per_second": round(examples * self._targets, 1)}
        if self._utilisation:
            found["mfu"] = round(examples * self._utilisation, 4)
        return found

    def summarize(self, ended: bool, step: int, skipped: int) -> None:
        """Say how a run went, and what can be done with it."""
        run = self._config.run_dir
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
            self.say(f"stopped as asked; go on with --resume {run}")
        self.say(f"Results are in {run}")
        if self._of_text:
            # `make` activates no environment: the interpreter is named as it is called from here.
            python = os.path.relpath(sys.executable)
            python = "python" if python.startswith("..") else python
            self.say(f'For text from it:\n  {python} -m launch.sample {run} --prompt "def "')

    def close(self) -> None:
        """Write what is left, and draw the curves."""
        self._bar.stop()
        if self._board is not None:
            self._board.close()
        if self._main:
            self._file.close()
            self._lock.close()
            draw([self._config.run_dir], self._config.run_dir / "curves.png")


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
    """Draw the losses of runs over each other, and their loss scales; a cross is a skipped step."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 5), height_ratios=(3, 1), layout="constrained"
    )
    for number, run in enumerate(runs):
        rows = read_records(run)
        skipped = [row for row in rows if not row.get("taken", True)]
        held_out = {"label": f"{run.name}, held out", "ms": 3}
        for axes, name, shown, style, more in (
            (top, "loss", rows, "-", {"lw": 0.8, "alpha": 0.5}),
            (top, "validation_loss", rows, "o-", held_out),
            (bottom, "loss_scale", rows, "-", {"drawstyle": "steps-pre"}),
            (bottom, "loss_scale", skipped, "x", {}),
        ):
            found = [row for row in shown if row.get(name) is not None]
            steps, values = [row["step"] for row in found], [row[name] for row in found]
            axes.plot(steps, values, style, color=f"C{number}", **more)
    bottom.set_yscale("log", base=2)
    bottom.set(xlabel="step", ylabel="loss scale")
    top.set_ylabel("loss (nats)")
    top.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
