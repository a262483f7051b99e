"""What a run is asked to do: one dataclass, which tyro makes the command line of."""

import contextlib
import importlib
import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from distamp import Precision
from distamp.comm_hooks import WIRE_FORMATS

# What --precision may be called beside the levels' own names.
_LEVELS = {"fp32": "O0", "fp16": "O1", "bf16": "bf16"}
# gloo counts milliseconds in 32 bits.
_LONGEST_S = 2_000_000.0


class UsageError(Exception):
    """What a user asked for cannot be done; one sentence says what can."""


def require(holds: object, sentence: str) -> None:
    """Raise `UsageError` unless something holds."""
    if not holds:
        raise UsageError(sentence)


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
    """Send gradients between ranks as fp16, bf16 or int8, or auto: the fastest of them."""
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
    peak_tflops: float | None = None
    """Of one device, for the utilisation (MFU). Default: known of NVIDIA's A100 to B200."""

    @property
    def level(self) -> Precision:
        """The dtypes of ``--precision``, and what goes with them."""
        return Precision.of(_LEVELS.get(self.precision, self.precision))

    def check(self, world: int) -> None:
        """Refuse what no machine could run.

        Raises:
            UsageError: Naming the flag, what was given and what is allowed.
        """
        above = "layers heads width block batch accumulate tp lr steps log_every eval_every"
        above += " eval_examples save_every init_scale growth_interval timeout max_time"
        for name in above.split():
            self._require(getattr(self, name) > 0, name, "more than 0")
        for name in ("warmup", "weight_decay", "clip", "keep", "workers", "replicate", "seed"):
            self._require(getattr(self, name) >= 0, name, "0 or more")
        for name in ("lr", "weight_decay", "clip", "init_scale"):
            self._require(math.isfinite(getattr(self, name)), name, "finite")
        for name in ("dropout", "ema"):
            self._require(0 <= getattr(self, name) < 1, name, "at least 0 and below 1")
        self._require(0 <= self.final_lr <= 1, "final_lr", "between 0 and 1")
        self._require(self.seed < 2**32, "seed", "below 2^32")
        self._require(self.timeout <= _LONGEST_S, "timeout", f"at most {_LONGEST_S:g}")
        peak = self.peak_tflops
        self._require(peak is None or peak > 0, "peak_tflops", "more than 0")
        self._require(self.shard > 0 or self.shard == -1, "shard", "more than 0, or -1")
        self._require(self.width % self.heads == 0, "width", f"a multiple of --heads {self.heads}")
        wires = [*WIRE_FORMATS, "auto"]
        self._require(self.hook is None or self.hook in wires, "hook", f"one of {wires}")
        named = all("=" in pair for pair in self.model_args)
        require(named, f"--model-args {' '.join(self.model_args)}: each must be name=value")
        self._check_ranks(world)

    def _check_ranks(self, world: int) -> None:
        replicate, shard, tp = self.layout(world)
        if min(replicate, shard) < 1 or replicate * shard * tp != world:
            given = f"--replicate {self.replicate} --shard {self.shard} --tp {self.tp}"
            many = f"the number of ranks, which is {world} (torchrun --nproc-per-node)"
            raise UsageError(f"{given}: their product must be {many}")
        alone = self.hook and (world == 1 or tp > 1)
        require(not alone, f"--hook {self.hook}: it needs several ranks, and no --tp")
        if self.model == "gpt":
            self._require(self.heads % tp == 0, "heads", f"a multiple of --tp {tp}")
        share = replicate * shard * self.accumulate
        self._require(
            self.batch % share == 0,
            "batch",
            f"a multiple of --replicate x --shard x --accumulate = {share}"
            f" (say {-(-self.batch // share) * share})",
        )

    def layout(self, world: int) -> tuple[int, int, int]:
        """Return how many copies of the model there are, ranks that shard one, and tensor ranks.

        A product that is not ``world`` cannot be had.
        """
        rest = world // self.tp
        shard = rest // max(1, self.replicate) if self.shard == -1 else self.shard
        return self.replicate or rest // shard, shard, self.tp

    def _require(self, holds: bool, name: str, allowed: str) -> None:
        if not holds:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {getattr(self, name)}: it must be {allowed}")

    def write(self, path: Path) -> None:
        """Write the flags as JSON, for `read_config`."""
        whole = path.with_suffix(".partial")
        whole.write_text(json.dumps(asdict(self), indent=1, default=str) + "\n", encoding="utf-8")
        whole.replace(path)


def read_config(run: Path) -> Config:
    """Read the flags of a run.

    Raises:
        UsageError: There is no run in that folder.
    """
    path = run / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name for field in fields(Config)}
        values = {name: value for name, value in found.items() if name in known}
        for name in ("run_dir", "resume", "tokenizer"):
            values[name] = None if values.get(name) is None else Path(values[name])
        return Config(**{**values, "model_args": tuple(values["model_args"])})
    except OSError as error:
        raise UsageError(f"{run}: no run there ({error.strerror}: {path})") from None
    except (ValueError, TypeError, KeyError):
        raise UsageError(f"{path}: it is not the config.json of a run") from None


def checkpoints_of(run: Path) -> list[Path]:
    """Return the whole checkpoints of a run, the newest first: torch writes .metadata last."""
    return sorted((p.parent for p in run.glob("checkpoints/step-*/.metadata")), reverse=True)


def checkpoint_of(resume: Path) -> tuple[Path, Path]:
    """Return the folder of the run, and the checkpoint, that ``--resume`` names.

    Raises:
        UsageError: There is no whole one.
    """
    resume = resume.absolute()
    run = resume.parents[1] if resume.name.startswith("step-") else resume
    whole = [path for path in checkpoints_of(run) if resume in (run, path)]
    what = "no whole checkpoint there" if resume.is_dir() else "no such run"
    require(whole, f"--resume {resume}: {what}")
    return run, whole[0]


def parse(args: Sequence[str] | None = None) -> Config:
    """Read the command line; where a run is resumed, its flags are the defaults.

    A run that torchrun has started again goes on from its own checkpoint.

    Args:
        args: None: those of the process.

    Raises:
        UsageError: The run to go on from is not there.
        SystemExit: Of tyro, which has printed why.
    """
    # Every rank reads the same flags; the first of each machine speaks.
    with contextlib.ExitStack() as quiet:
        if not _speaks():
            quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        world = int(os.environ.get("WORLD_SIZE", "1"))
        given = tyro.cli(Config, args=args)
        resume, again = given.resume, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if (given.auto_resume or again) and checkpoints_of(given.run_dir):
            resume = given.run_dir
        if resume is not None:
            run, _ = checkpoint_of(resume)
            old = replace(read_config(run), run_dir=run, overwrite=False, auto_resume=False)
            given = replace(tyro.cli(Config, args=args, default=old), resume=resume)
        given.check(world)
        return given


def _speaks() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def refusing(body: Callable[[], None]) -> int:
    """Run the body of a program; return its exit code, which is 2 if the user asked too much.

    Every rank finds the same fault. The first of each machine prints it and ends, upon which
    torchrun sends the others SIGTERM; they wait for that, so that nobody is cut off.
    """
    try:
        body()
    except UsageError as error:
        if _speaks():
            print(f"error: {error}", file=sys.stderr, flush=True)
    except SystemExit as done:
        if not done.code:
            return 0
    else:
        return 0
    if not _speaks():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
        time.sleep(10)
    return 2


def arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Turn ``name=value`` into keyword arguments; a value is JSON, or else text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            found[name] = json.loads(text)
        except json.JSONDecodeError:
            found[name] = text
    return found


def load_own(flag: str, name: str) -> Any:
    """Import ``module:name``, also from the folder in which the run was started.

    Raises:
        UsageError: If it is not there.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{flag} {name}: {error}") from None
