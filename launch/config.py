"""What a run is asked to do: one dataclass, which tyro makes the command line of."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from distamp import Precision
from distamp.comm_hooks import WIRE_FORMATS
from launch.folder import began_here, checkpoint_of, checkpoints_of, run_of
from launch.usage import UsageError, flag, near, read_flags, require

# What --precision may be called beside the levels' own names.
_LEVELS = {"fp32": "O0", "fp16": "O1"}
# What each flag may be. gloo counts the milliseconds of --timeout in 32 bits.
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "more than 0": (
        lambda value: value > 0,
        "layers heads width block batch accumulate tp lr init_scale growth_interval steps"
        " log_every eval_every eval_examples save_every timeout max_time",
    ),
    "0 or more": (
        lambda value: value >= 0,
        "workers replicate warmup weight_decay clip keep seed peak_tflops",
    ),
    "more than 0, or -1": (lambda value: value > 0 or value == -1, "shard"),
    "at least 0 and below 1": (lambda value: 0 <= value < 1, "dropout ema"),
    "between 0 and 1": (lambda value: 0 <= value <= 1, "final_lr"),
    "finite": (math.isfinite, "lr weight_decay clip init_scale"),
    "below 2^32": (lambda value: value < 2**32, "seed"),
    "at most 2000000": (lambda value: value <= 2e6, "timeout"),
    f"{', '.join(WIRE_FORMATS)}, auto or None": (
        lambda value: value in (None, *WIRE_FORMATS, "auto"),
        "hook",
    ),
    "adamw, sgd, muon or module:Class": (
        lambda value: value in ("adamw", "sgd", "muon") or ":" in value,
        "optimizer",
    ),
    "gpt, hf:NAME or module:function": (
        lambda value: value == "gpt" or 0 < value.find(":") < len(value) - 1,
        "model",
    ),
    "of name=value": (lambda value: all("=" in pair for pair in value), "model_args"),
}


@dataclass(frozen=True)
class Config:
    """Train a model in mixed precision, on as many ranks as torchrun starts."""

    model: str = "gpt"
    """gpt, hf:TYPE or hf:FOLDER (of transformers; a folder's weights if it has any), or
    module:function, which is called with the data and returns a module."""
    model_args: tuple[str, ...] = ()
    """name=value, ...: settings of the config of hf:, or arguments of module:function."""
    layers: int = 2
    """Transformer blocks (gpt)."""
    heads: int = 4
    """Attention heads (gpt)."""
    width: int = 96
    """Channels of the residual stream (gpt)."""
    dropout: float = 0.0
    """Probability that a channel is dropped while training (gpt)."""

    data: str | None = None
    """A text file, a folder of texts, a .bin of tokens or a folder with train.bin and val.bin, or
    module:function, which returns (train, held out, number of classes): two datasets of pairs.
    Default: the source of Python's standard library."""
    tokenizer: Path | None = None
    """A tokenizer.json of Hugging Face's tokenizers. Default: every byte is a token."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Of a .bin."""
    block: int = 64
    """Tokens of context."""
    batch: int = 32
    """Examples in a step, over all ranks and microbatches."""
    accumulate: int = 1
    """Microbatches in a step."""
    workers: int = 0
    """Processes that read ahead, on each rank; for datasets that are slow to read."""

    replicate: int = 0
    """Copies of the model; 0: as many as the ranks make of --shard and --tp. Alone, this is DDP."""
    shard: int = 1
    """Ranks that share one copy's weights (FSDP2; with --replicate, HSDP); -1: all."""
    tp: int = 1
    """Ranks that share each matrix (tensor parallel)."""
    precision: Literal["fp32", "bf16", "fp16", "O0", "O1", "O2", "O3", "bf16-O2", "bf16-O3"] = (
        "fp32"
    )
    """A level of docs/levels.md; fp32 is O0, fp16 is O1."""
    hook: str | None = None
    """Send gradients between ranks as fp16, bf16 or int8; auto: fp16, int8 or none, by speed."""
    compile: bool = False
    """Compile each block."""
    checkpoint_blocks: Literal["none", "all", "selective"] = "none"
    """Compute activations of blocks again in the backward pass; selective keeps the products."""
    device: str = "auto"
    """cpu, cuda, ...; auto: the accelerator if there is one."""
    timeout: float = 600.0
    """Seconds that ranks wait for each other."""

    optimizer: str = "adamw"
    """adamw, sgd, muon (matrices of blocks; AdamW the rest), or module:Class."""
    lr: float = 4e-3
    """Learning rate at its peak."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """After the warm-up: a cosine, a plateau with a decay in the last fifth, a line, or nothing."""
    warmup: int = 50
    """Taken steps until the peak."""
    final_lr: float = 0.1
    """Where the schedule ends, as a part of the peak."""
    weight_decay: float = 0.1
    """On matrices alone."""
    clip: float = 1.0
    """Largest norm of the gradients; 0: do not clip."""
    ema: float = 0.0
    """Decay of an average of the weights, which sample and evaluate then use; 0: none."""
    init_scale: float = 65536.0
    """The loss scale at the start, where it moves (fp16, O2)."""
    growth_interval: int = 2000
    """Clean steps until the loss scale doubles."""

    steps: int = 400
    """Steps of the whole run, skipped ones included."""
    seed: int = 0
    """Fixes the initial weights, the order of the data and dropout."""
    log_every: int = 1
    """Steps between two records; between them no step waits for the device."""
    eval_every: int = 50
    """Steps between two evaluations."""
    eval_examples: int = 256
    """Held-out examples that each evaluation reads."""
    save_every: int = 100
    """Steps between two checkpoints."""
    keep: int = 2
    """How many of the newest checkpoints stay; 0: write none."""
    async_save: bool = False
    """Write checkpoints while training goes on."""
    run_dir: Path = Path("runs/latest")
    """Where results go."""
    overwrite: bool = False
    """Start again in a folder that has a run."""
    resume: Path | None = None
    """Go on from this run, or from one of its checkpoints; its flags count where none are given."""
    auto_resume: bool = False
    """Go on from --run-dir if it has a checkpoint, else start there."""
    max_time: float = math.inf
    """Minutes after which to save and end."""
    tensorboard: bool = False
    """Write the records for TensorBoard too."""
    peak_tflops: float = 0.0
    """Of one device, for the utilisation (MFU): 312 of an A100, 989 of an H100; 0: do not say."""

    @property
    def level(self) -> Precision:
        """The dtypes of ``--precision``, and what goes with them."""
        return Precision.of(_LEVELS.get(self.precision, self.precision))

    @property
    def goes_on(self) -> bool:
        """Whether the run in ``--run-dir`` goes on, and keeps what it has."""
        return self.resume is not None and run_of(self.resume).resolve() == self.run_dir.resolve()

    def check(self, world: int) -> None:
        """Refuse what no machine could run.

        Raises:
            UsageError: Naming the flag, what was given and what is allowed.
        """
        for allowed, (holds, names) in _ALLOWED.items():
            for name in names.split():
                self._require(holds(getattr(self, name)), name, allowed)
        gpt = self.model == "gpt"
        whole = not gpt or self.width % self.heads == 0
        self._require(whole, "width", f"a multiple of --heads {self.heads}")
        replicate, shard, tp = self.layout(world)
        copies = f"--replicate {self.replicate} " if self.replicate else ""
        given = f"{copies}--shard {self.shard} --tp {self.tp}"
        product = f"{given}: their product must be the number of ranks, which is {world}"
        fits = min(replicate, shard) > 0 and replicate * shard * tp == world
        require(fits, f"{product} (torchrun --nproc-per-node)")
        alone = self.hook and (world == 1 or tp > 1)
        self._require(not alone, "hook", "None on one rank, and with --tp")
        self._require(not gpt or self.heads % tp == 0, "heads", f"a multiple of --tp {tp}")
        share = replicate * shard * self.accumulate
        multiple = f"a multiple of --replicate x --shard x --accumulate = {share}"
        rounded = -(-self.batch // share) * share
        self._require(self.batch % share == 0, "batch", f"{multiple} (say {rounded})")

    def layout(self, world: int) -> tuple[int, int, int]:
        """Return how many copies of the model there are, ranks that shard one, and tensor ranks.

        A product that is not ``world`` cannot be had.
        """
        rest = world // self.tp
        shard = rest // max(1, self.replicate) if self.shard == -1 else self.shard
        return self.replicate or rest // max(1, shard), shard, self.tp

    def _require(self, holds: bool, name: str, allowed: str) -> None:
        if not holds:
            value = getattr(self, name)
            given = " ".join(value) if isinstance(value, tuple) else value
            hint = near(value, allowed.replace(",", "").split()) if isinstance(value, str) else ""
            raise UsageError(f"{flag(name)} {given}: it must be {allowed}{hint}")

    def to_json(self) -> str:
        """Return the flags for `read_config`."""
        return json.dumps(asdict(self), indent=1, default=str) + "\n"


def read_config(run: Path) -> Config:
    """Read the flags of a run.

    Raises:
        UsageError: There is no run in that folder.
    """
    path = run / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values = {each.name: found[each.name] for each in fields(Config)}
        for name in ("run_dir", "resume", "tokenizer"):
            values[name] = None if values[name] is None else Path(values[name])
        return Config(**{**values, "model_args": tuple(values["model_args"])})
    except OSError as error:
        raise UsageError(f"{run}: no run there ({error.strerror}: {path})") from None
    except (ValueError, TypeError, KeyError):
        raise UsageError(f"{path}: it is not the config.json of a run") from None


def parse(args: Sequence[str] | None = None) -> Config:
    """Read the command line; where a run is resumed, its flags are the defaults.

    A run that torchrun has started again goes on from its own checkpoint.

    Args:
        args: None: those of the process.

    Raises:
        UsageError: It cannot be read, or the run to go on from is not there.
    """
    prog = "launch/train.py"
    given: Config = read_flags(Config, prog, args)
    again = given.auto_resume or began_here(given.run_dir)
    resume = given.run_dir if again and checkpoints_of(given.run_dir) else given.resume
    if resume is not None:
        run, _ = checkpoint_of(resume, "--resume ")
        old = replace(read_config(run), run_dir=run, overwrite=False, auto_resume=False)
        given = read_flags(Config, prog, args, default=old)
    # A run that was killed before its first checkpoint starts again.
    given = replace(given, resume=resume, overwrite=given.overwrite or again)
    given.check(int(os.environ.get("WORLD_SIZE", "1")))
    return given
