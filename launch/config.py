"""What a run is asked to do: one dataclass, which tyro makes the command line of."""

import contextlib
import functools
import importlib
import inspect
import io
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import tyro

from distamp import Precision
from distamp.comm_hooks import WIRE_FORMATS

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


class UsageError(Exception):
    """What a user asked for cannot be done; one sentence says what can."""


def require(holds: object, sentence: str) -> None:
    """Raise `UsageError` unless something holds."""
    if not holds:
        raise UsageError(sentence)


def flag(name: str) -> str:
    """Return the flag of an attribute."""
    return f"--{name.replace('_', '-')}"


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
        near = -(-self.batch // share) * share
        self._require(self.batch % share == 0, "batch", f"{multiple} (say {near})")

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


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole, or as it was before."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


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


def checkpoints_of(run: Path) -> list[Path]:
    """Return the whole checkpoints of a run, the newest first: torch writes .metadata last."""
    return sorted((p.parent for p in run.glob("checkpoints/step-*/.metadata")), reverse=True)


def checkpoint_of(resume: Path, flag: str = "") -> tuple[Path, Path]:
    """Return the folder of a run, and its newest checkpoint or the one that is named.

    Raises:
        UsageError: There is no whole one.
    """
    resume = resume.absolute()
    run = resume.parents[1] if resume.name.startswith("step-") else resume
    whole = [path for path in checkpoints_of(run) if resume in (run, path)]
    what = "no whole checkpoint there" if resume.is_dir() else "no such run"
    require(whole, f"{flag}{resume}: {what}")
    return run, whole[0]


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
    again = given.auto_resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    resume = given.run_dir if again and checkpoints_of(given.run_dir) else given.resume
    if resume is not None:
        run, _ = checkpoint_of(resume, "--resume ")
        old = replace(read_config(run), run_dir=run, overwrite=False, auto_resume=False)
        given = read_flags(Config, prog, args, default=old)
    # A run that was killed before its first checkpoint starts again.
    given = replace(given, resume=resume, overwrite=given.overwrite or again)
    given.check(int(os.environ.get("WORLD_SIZE", "1")))
    return given


def read_flags(f: Any, prog: str, args: Sequence[str] | None = None, **default: Any) -> Any:
    """Call ``f`` with what the command line says, by tyro; ``--help`` prints, and ends.

    Args:
        f: A class or a function.
        prog: What the program is called.
        args: None: those of the process.
        default: ``default=`` an instance, whose values count where no flag is given.

    Raises:
        UsageError: A flag or a value cannot be read.
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            found, unknown = tyro.cli(
                f,
                prog=prog,
                args=args,
                return_unknown_args=True,
                console_outputs=_speaks(),
                **default,
            )
    except SystemExit as done:
        if not done.code:
            raise
        # tyro draws a box around it, with a rule below what is wrong.
        lines = [line.strip("│ ") for line in box.getvalue().splitlines()[1:]]
        fault = " ".join(itertools.takewhile(lambda line: "──" not in line, lines))
        raise UsageError(fault.removeprefix("Error parsing ")) from None
    if unknown:
        hint = near(unknown[0], map(flag, inspect.signature(f).parameters))
        raise UsageError(f"{unknown[0]}: no such flag or value{hint}")
    return found


def near(name: str, known: Iterable[str]) -> str:
    """Return a question after what is known and written alike, or nothing."""
    return "".join(f"; did you mean {each}?" for each in get_close_matches(name, known, 1))


def program(name: str, main: Callable[..., None]) -> int:
    """Run a function as ``python -m NAME``, its arguments as flags; return the exit code."""

    @functools.wraps(main)
    def later(*args: Any, **flags: Any) -> Callable[[], None]:
        return functools.partial(main, *args, **flags)

    return refusing(lambda: read_flags(later, f"python -m {name}")())


def refusing(body: Callable[[], None]) -> int:
    """Run the body of a program; return its exit code, which is 2 if the user asked too much.

    Every rank finds the same fault. The first of each machine prints it and ends, upon which
    torchrun sends the others SIGTERM; they wait for that, so that nobody is cut off.
    """
    try:
        body()
        return 0
    except UsageError as error:
        if _speaks():
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    time.sleep(10)
    return 2


def _speaks() -> bool:
    """Whether this is the first rank of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Turn ``name=value`` into keyword arguments; a value is JSON, or else text."""
    found: dict[str, Any] = dict(pair.split("=", 1) for pair in pairs)
    for name, text in found.items():
        with contextlib.suppress(ValueError):
            found[name] = json.loads(text)
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
