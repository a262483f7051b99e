"""What a run is asked to do: typed settings, and which values no machine could run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from distamp.comm_hooks import WIRE_FORMATS, WireFormat
from distamp.precision import Precision
from launch.errors import UsageError
from launch.places import run_of

__all__ = ["Config", "Shape"]

# A month; gloo counts milliseconds in 32 bits.
_LONGEST_S = 2_000_000.0
# --precision chooses among the levels whose weights are fp32.
_LEVELS = {"fp32": "O0", "fp16": "O1", "bf16": "bf16"}

Wire = Literal["fp16", "bf16", "int8", "auto"]

# The strings below the fields are what --help prints; launch/help.py says in which group.


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
    """gpt, digits (images), hf:NAME (a type of the installed transformers, such as hf:gpt2), or
    module:factory (your own)."""
    model_args: tuple[str, ...] = ()
    """Settings of the config of hf:NAME, or arguments of module:factory."""
    data: str | None = None
    """Text (a file or folder), images (a folder for each class), or digits. Default: the source of
    Python's standard library, or digits."""
    run_dir: Path | None = None
    """Where results go. Default: the folder resumed from, or else runs/latest."""
    resume: Path | None = None
    """Go on from this run's folder, or one checkpoint in it, with its flags; those given win."""
    auto_resume: bool = False
    """Go on from the run in the run's own folder, if there is one."""
    overwrite: bool = False
    """Start again in a folder that already holds a run."""
    config: Path | None = None
    """The config.json of another run, whose flags count where none are given beside it."""
    device: str = "auto"
    """cpu, cuda, ...; auto is the accelerator if there is one."""
    precision: Literal["fp32", "fp16", "bf16"] | None = None
    """What autocast computes in; fp16 scales the loss too. Short for --opt-level O0, O1, bf16.
    Default: fp32."""
    opt_level: str | None = None
    """O0, O1, O2, O3, bf16, bf16-O2 or bf16-O3 (docs/levels.md), in the place of --precision."""
    keep_batchnorm_fp32: bool | None = None
    """Whether batch norms stay in fp32 in a model that is cast. Default: the level's."""
    master_weights: bool | None = None
    """Whether AdamW steps fp32 copies of a model that is cast. Default: the level's."""
    loss_scale: str | None = None
    """A number, or dynamic. Default: the level's."""

    strategy: str | None = None
    """none, dp, ddp, fsdp1, fsdp2, hsdp, fsdp2+tp, zero1, oss, sharded_ddp or fairscale_fsdp.
    Default: ddp on several ranks, none on one."""
    replicas: int | None = None
    """Devices of this process that share each batch (dp). Default: every accelerator, or 2."""
    shards: int | None = None
    """Ranks that share one copy of the model (hsdp). Default: those of one machine, or 2."""
    tp: int = 2
    """Ranks that share each layer (fsdp2+tp)."""
    gather_fp32: bool = False
    """Gather weights in fp32, not in what the region computes in (fsdp2, hsdp, fsdp2+tp)."""
    adamw: Literal["fused", "foreach", "loop"] | None = None
    """torch's implementation of AdamW. Default: the fastest that the strategy can use."""
    comm_hook: Wire | None = None
    """Send gradients in this format, or the fastest (int8: ddp and zero1)."""
    backend: Literal["gloo", "nccl"] | None = None
    """What gradients travel over. Default: NCCL between GPUs, gloo between CPUs."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others before it gives up."""
    compile: bool = False
    """Compile each block with torch.compile."""
    checkpoint_activations: Literal["none", "full", "selective"] = "none"
    """Compute a block's activations again in its backward pass; selective keeps products."""

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
    eps: float | None = None
    """AdamW's. Default: 1e-8, or 1e-3 where its state is fp16 (O3), which has no 1e-8."""
    clip: float = 1.0
    """Largest norm of the gradients; 0 leaves them as they are."""
    seed: int = 0
    """Fixes the initial weights, the order of the data and dropout."""
    allow_nan: bool = False
    """Go on when the loss is not finite; else that ends the run before the next checkpoint."""
    max_minutes: float | None = None
    """Save and stop after so long, as when preempted. Default: no limit."""

    init_scale: float = 65536.0
    """A dynamic loss scale at the start."""
    growth_interval: int = 2000
    """Clean steps until a dynamic loss scale doubles."""

    evaluate_every: int = 50
    """Steps between two validations."""
    validation_windows: int = 256
    """Sequences or images held out that each validation reads."""
    checkpoint_every: int = 100
    """Steps between two checkpoints."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay; 0 writes none."""
    log_every: int = 1
    """Steps between two records; between them no step waits for the device or another rank."""
    report: bool = False
    """Write which module computed in which precision in the first step."""
    profile: bool = False
    """Write a trace of a few steps of each rank, once it has warmed up."""
    tensorboard: bool = False
    """Write the records for TensorBoard too."""
    wandb: bool = False
    """Write the records for Weights & Biases too: offline, unless WANDB_MODE says otherwise."""

    shape: Shape = field(default_factory=Shape)

    @property
    def wire(self) -> WireFormat | None:
        """The format that gradients are to be sent in; None if none is, or "auto" will choose."""
        return WIRE_FORMATS.get(self.comm_hook or "")

    @property
    def folder(self) -> Path:
        """The folder this run writes to."""
        if self.run_dir is not None:
            return self.run_dir
        found = None if self.resume is None else run_of(self.resume)
        return found or Path("runs/latest")

    @property
    def level(self) -> Precision:
        """The level of precision to train at, with what overrides it.

        Raises:
            UsageError: There is no such level, it is named twice, or an override contradicts it.
        """
        if self.opt_level is not None and self.precision is not None:
            raise UsageError(
                f"--precision {self.precision}: it is short for --opt-level"
                f" {_LEVELS[self.precision]}, and --opt-level {self.opt_level} is given too; pass"
                " one of them"
            )
        try:
            return Precision.of(
                self.opt_level or _LEVELS[self.precision or "fp32"],
                keep_batchnorm_fp32=self.keep_batchnorm_fp32,
                master_weights=self.master_weights,
                loss_scale=self.loss_scale,
            )
        except ValueError as error:
            raise UsageError(f"{self.level_flag}: {error}") from None

    @property
    def level_flag(self) -> str:
        """The flag that names the level, as it was given or is by default."""
        if self.opt_level is not None:
            return f"--opt-level {self.opt_level}"
        return f"--precision {self.precision or 'fp32'}"

    @property
    def level_name(self) -> str:
        """The level's name; one that has two has that of ``--precision``."""
        short = {level: name for name, level in _LEVELS.items()}
        return short.get(self.level.level, self.level.level)

    def check(self) -> None:
        """Refuse what no machine could run.

        Raises:
            UsageError: Naming the flag, what was given and what is allowed.
        """
        for name in ("lr", "weight_decay", "clip", "eps", "timeout", "max_minutes"):
            value = getattr(self, name)
            _require(value is None or math.isfinite(value), name, value, "finite")
        positive = ("steps", "batch", "accumulate", "lr", "evaluate_every", "checkpoint_every")
        more = ("validation_windows", "init_scale", "growth_interval", "timeout", "log_every")
        for name in (*positive, *more):
            _require(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        for name in ("eps", "max_minutes"):
            value = getattr(self, name)
            _require(value is None or value > 0, name, value, "more than 0")
        for name in ("layers", "heads", "width", "block", "patch", "image_size"):
            _require(getattr(self.shape, name) > 0, name, getattr(self.shape, name), "more than 0")
        for name in ("warmup", "weight_decay", "clip", "keep_checkpoints"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "at least 0 and below 2^32")
        _require(self.timeout <= _LONGEST_S, "timeout", self.timeout, f"at most {_LONGEST_S:g}")
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

    def check_batch(self, dp_world_size: int) -> None:
        """Refuse a batch that cannot be divided among those who read it.

        Raises:
            UsageError: Naming a batch that can.
        """
        share = dp_world_size * self.accumulate
        _require(
            self.batch % share == 0,
            "batch",
            self.batch,
            f"a multiple of ranks that read it x --accumulate = {dp_world_size} x {self.accumulate}"
            f" (say {-(-self.batch // share) * share})",
        )


def _require(holds: bool, name: str, given: object, allowed: str) -> None:
    if not holds:
        raise UsageError(f"--{name.replace('_', '-')} {given}: it must be {allowed}")
