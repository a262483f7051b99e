"""What a run is asked to do: typed settings, read from the command line by tyro."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from launch.errors import UsageError

__all__ = ["Config", "ModelConfig", "parse"]

Precision = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model. A checkpoint goes only into a model of the same shape."""

    layers: int = 2
    """Transformer blocks."""
    heads: int = 3
    """Attention heads; must divide the width."""
    width: int = 96
    """Channels of the residual stream."""
    block: int = 64
    """Bytes of context."""
    dropout: float = 0.0
    """Probability that a channel is dropped while training."""

    @property
    def parameters(self) -> int:
        """How many parameters a model of this shape has, without building it."""
        per_layer = 12 * self.width**2 + 13 * self.width
        return self.layers * per_layer + (2 * 256 + self.block + 2) * self.width


@dataclass(frozen=True)
class Config:
    """Train a byte-level GPT on text, in mixed precision, on as many ranks as torchrun starts."""

    data: Path | None = None
    """A text file, or a folder of them; when not given, the Python standard library's source."""
    run_dir: Path | None = None
    """Where results go. Default: the folder resumed from, or else runs/latest."""
    resume: Path | None = None
    """Go on from this run's folder (or checkpoint file)."""
    overwrite: bool = False
    """Start again in a folder that already holds a run."""
    device: str = "auto"
    """auto, cpu, cuda, ...: auto is the accelerator if there is one."""
    precision: Precision = "fp32"
    """What autocast computes in; fp16 also scales the loss."""

    steps: int = 400
    """Steps of the whole run, skipped ones included."""
    batch: int = 32
    """Sequences per step, over all ranks and microbatches."""
    accumulate: int = 1
    """Microbatches per step."""
    lr: float = 4e-3
    """Peak learning rate."""
    warmup: int = 50
    """Taken steps until the peak."""
    final_lr: float = 0.1
    """Learning rate at the end of the cosine, as a part of the peak."""
    weight_decay: float = 0.1
    """AdamW's, on matrices alone."""
    clip: float = 1.0
    """Largest norm of the gradients; 0 leaves them as they are."""
    seed: int = 0
    """Fixes the initial weights, the order of the data and dropout."""

    init_scale: float = 65536.0
    """Loss scale at the start (fp16)."""
    growth_interval: int = 2000
    """Clean steps until the loss scale doubles (fp16)."""
    schedule: Literal["dynamic", "headroom"] = "dynamic"
    """How the loss scale moves (fp16): torch's rule, or ahead of overflows."""

    evaluate_every: int = 50
    """Steps between two validations."""
    validation_windows: int = 256
    """Sequences of the validation split that each validation reads."""
    checkpoint_every: int = 100
    """Steps between two checkpoints."""

    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def folder(self) -> Path:
        """The folder this run writes to."""
        if self.run_dir is not None:
            return self.run_dir
        if self.resume is not None:
            return self.resume if self.resume.is_dir() else self.resume.parent
        return Path("runs/latest")

    def check(self, world_size: int) -> None:
        """Refuse what no machine could run.

        Raises:
            UsageError: Naming the flag, what was given and what is allowed.
        """
        positive = ("steps", "batch", "accumulate", "lr", "evaluate_every", "checkpoint_every")
        for name in (*positive, "validation_windows", "init_scale", "growth_interval"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        for name in ("layers", "heads", "width", "block"):
            _require(getattr(self.model, name) > 0, name, getattr(self.model, name), "more than 0")
        for name in ("warmup", "weight_decay", "clip"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(0 <= self.final_lr <= 1, "final_lr", self.final_lr, "between 0 and 1")
        _require(
            0 <= self.model.dropout < 1, "dropout", self.model.dropout, "at least 0 and below 1"
        )
        _require(
            self.model.width % self.model.heads == 0,
            "width",
            self.model.width,
            f"a multiple of --heads {self.model.heads}",
        )
        share = world_size * self.accumulate
        _require(
            self.batch % share == 0,
            "batch",
            self.batch,
            f"a multiple of ranks x --accumulate = {world_size} x {self.accumulate}"
            f" (say {-(-self.batch // share) * share})",
        )


def _require(holds: bool, name: str, given: object, allowed: str) -> None:
    if not holds:
        raise UsageError(f"--{name.replace('_', '-')} {given}: it must be {allowed}")


def parse(args: Sequence[str] | None, *, quiet: bool) -> Config:
    """Read the command line.

    Args:
        args: The arguments; ``sys.argv[1:]`` when None.
        quiet: Print no help (another rank does).

    Raises:
        UsageError: With tyro's own message as one line.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                Config,
                prog="launch/train.py",
                args=args,
                console_outputs=not quiet,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as ended:
        if not ended.code:
            raise
        raise UsageError(_one_line(said.getvalue())) from None


def _one_line(box: str) -> str:
    """Take the message, and the close match if there is one, out of tyro's framed error."""
    # The first row is a title; rules are drawn in ASCII where the terminal has no better.
    parts: list[list[str]] = [[]]
    for row in (row.strip("│ ") for row in box.splitlines()[1:]):
        if re.match(r"[╰─]|---", row):
            parts.append([])
        elif row:
            parts[-1].append(row)
    message, *more = (" ".join(part) for part in parts if part)
    for part in more:
        if meant := re.match(r"Perhaps you meant:\s+(\S+)", part):
            message += f"; perhaps you meant {meant[1]}"
    return f"{message} (--help lists every flag)"
