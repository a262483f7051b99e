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

__all__ = ["Config", "Shape", "parse", "read"]

Precision = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True)
class Shape:
    """The shape of the launcher's own models. A checkpoint goes only into one of the same shape."""

    layers: int = 2
    """Transformer blocks (gpt, digits)."""
    heads: int = 3
    """Attention heads; must divide the width (gpt, digits)."""
    width: int = 96
    """Channels of the residual stream (gpt, digits)."""
    block: int = 64
    """Bytes of context (text)."""
    dropout: float = 0.0
    """Probability that a channel is dropped while training (gpt, digits)."""
    patch: int = 2
    """Pixels along a side of each patch (digits)."""
    image_size: int = 32
    """Pixels along a side, to which images of a folder are resized."""


@dataclass(frozen=True)
class Config:
    """Train a model on text or images, in mixed precision, on as many ranks as torchrun starts."""

    model: str = "gpt"
    """gpt, digits (an image classifier), hf:NAME (a model type of the installed transformers, such
    as hf:gpt2), or module:factory (your own)."""
    model_args: tuple[str, ...] = ()
    """name=value ...: for hf:NAME, settings of its config; for module:factory, its arguments."""
    data: str | None = None
    """A file or folder of text, a folder with a folder of images for each class, or digits. When
    not given: for text the Python standard library's source, for images scikit-learn's digits."""
    run_dir: Path | None = None
    """Where results go. Default: the folder resumed from, or else runs/latest."""
    resume: Path | None = None
    """Go on from this run's folder, or from one checkpoint in it."""
    auto_resume: bool = False
    """Go on from the run in the run's own folder, if there is one."""
    overwrite: bool = False
    """Start again in a folder that already holds a run."""
    device: str = "auto"
    """auto, cpu, cuda, ...: auto is the accelerator if there is one."""
    precision: Precision = "fp32"
    """What autocast computes in; fp16 also scales the loss."""

    strategy: str | None = None
    """How the model is spread: none, dp, ddp, fsdp1, fsdp2, hsdp, fsdp2+tp, zero1, oss,
    sharded_ddp or fairscale_fsdp. Default: ddp on several ranks, none on one."""
    replicas: int | None = None
    """Devices of this process that share each batch (dp). Default: every accelerator, or 2."""
    shards: int | None = None
    """Ranks that share one copy of the model (hsdp). Default: those of one machine, or 2."""
    tp: int = 2
    """Ranks that share each layer (fsdp2+tp)."""
    adamw: Literal["fused", "foreach", "loop"] | None = None
    """torch's implementation of AdamW. Default: the fastest that the strategy can use."""
    comm_hook: Literal["fp16", "fp16_plain", "bf16", "int16"] | None = None
    """Send gradients in this format (ddp, zero1, fsdp1, fsdp2, hsdp)."""
    backend: Literal["gloo", "nccl"] | None = None
    """What gradients travel over. Default: NCCL between GPUs, gloo between CPUs."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others before it gives up."""

    steps: int = 400
    """Steps of the whole run, skipped ones included."""
    batch: int = 32
    """Sequences or images per step, over all ranks and microbatches."""
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
    """Sequences or images held out that each validation reads."""
    checkpoint_every: int = 100
    """Steps between two checkpoints."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    report: bool = False
    """Write which module computed in which precision in the first step."""

    shape: Shape = field(default_factory=Shape)

    @property
    def folder(self) -> Path:
        """The folder this run writes to."""
        if self.run_dir is not None:
            return self.run_dir
        if self.resume is not None:
            # One checkpoint lies two folders below its run.
            is_run = self.resume.parent.name != "checkpoints"
            return self.resume if is_run else self.resume.parent.parent
        return Path("runs/latest")

    def check(self) -> None:
        """Refuse what no machine could run.

        Raises:
            UsageError: Naming the flag, what was given and what is allowed.
        """
        positive = ("steps", "batch", "accumulate", "lr", "evaluate_every", "checkpoint_every")
        more = ("validation_windows", "init_scale", "growth_interval", "timeout")
        for name in (*positive, *more, "keep_checkpoints"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        for name in ("layers", "heads", "width", "block", "patch", "image_size"):
            _require(getattr(self.shape, name) > 0, name, getattr(self.shape, name), "more than 0")
        for name in ("warmup", "weight_decay", "clip"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(0 <= self.final_lr <= 1, "final_lr", self.final_lr, "between 0 and 1")
        _require(
            0 <= self.shape.dropout < 1, "dropout", self.shape.dropout, "at least 0 and below 1"
        )
        _require(
            self.shape.width % self.shape.heads == 0,
            "width",
            self.shape.width,
            f"a multiple of --heads {self.shape.heads}",
        )
        for pair in self.model_args:
            _require("=" in pair, "model_args", pair, "name=value")

    def check_batch(self, readers: int) -> None:
        """Refuse a batch that cannot be divided among those who read it.

        Raises:
            UsageError: Naming a batch that can.
        """
        share = readers * self.accumulate
        _require(
            self.batch % share == 0,
            "batch",
            self.batch,
            f"a multiple of ranks that read it x --accumulate = {readers} x {self.accumulate}"
            f" (say {-(-self.batch // share) * share})",
        )


def _require(holds: bool, name: str, given: object, allowed: str) -> None:
    if not holds:
        raise UsageError(f"--{name.replace('_', '-')} {given}: it must be {allowed}")


def parse(args: Sequence[str] | None, *, quiet: bool = False) -> Config:
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


def read(args: Sequence[str] | None, *, quiet: bool = False) -> Config | UsageError:
    """Parse, and return what is wrong in the place of raising it: ranks are to say it together."""
    try:
        return parse(args, quiet=quiet)
    except UsageError as error:
        return error


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
