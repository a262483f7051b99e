"""What a run is asked to do: one dataclass, of which the command line is made."""

import argparse
import inspect
import json
import math
import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from distamp import Precision
from distamp.comm_hooks import WIRE_FORMATS
from distamp.precision import LEVELS
from launch.folder import began_here, checkpoint_of, checkpoints_of, run_of
from launch.usage import Parser, UsageError, flag, near, refusing, require

# What --precision may be called beside the levels' own names.
_LEVELS = {"fp32": "O0", "fp16": "O1"}


@dataclass(frozen=True)
class Allowed:
    """What a flag may be: in words, and as a test."""

    words: str
    test: Callable[[Any], bool]


def _is_level(name: str) -> bool:
    return name in (*_LEVELS, *LEVELS) or name.endswith(".toml")


def one_of(*names: str | None) -> Allowed:
    """Allow these names."""
    words = [str(name) for name in names]
    return Allowed(f"{', '.join(words[:-1])} or {words[-1]}", lambda value: value in names)


def one_of_or_own(*names: str, own: str) -> Allowed:
    """Allow these names, and what is written with a colon."""
    named = one_of(*names, own)
    return Allowed(
        named.words, lambda value: value in names or 0 < value.find(":") < len(value) - 1
    )


ANYTHING = Allowed("", lambda value: True)
POSITIVE = Allowed("more than 0", lambda value: value > 0)
POSITIVE_AND_FINITE = Allowed("more than 0 and finite", lambda value: 0 < value < math.inf)
AT_LEAST_0 = Allowed("0 or more", lambda value: value >= 0)
AT_LEAST_0_AND_FINITE = Allowed("0 or more and finite", lambda value: 0 <= value < math.inf)
BELOW_1 = Allowed("at least 0 and below 1", lambda value: 0 <= value < 1)
UP_TO_1 = Allowed("between 0 and 1", lambda value: 0 <= value <= 1)


def option(default: Any, text: str, allowed: Allowed = ANYTHING, meant: str = "") -> Any:
    """Declare a flag: its default, its line of help, what it may be, and its names elsewhere."""
    return field(default=default, metadata={"text": text, "allowed": allowed, "meant": meant})


@dataclass(frozen=True)
class _Model:
    """The model."""

    model: str = option(
        "gpt",
        "gpt, hf:TYPE or hf:FOLDER (transformers), or module:function of yours",
        one_of_or_own("gpt", own="hf:NAME or module:function"),
    )
    model_args: tuple[str, ...] = option(
        (),
        "name=value ...: of the config of hf:, or of module:function",
        Allowed("of name=value", lambda pairs: all("=" in pair for pair in pairs)),
    )
    layers: int = option(2, "transformer blocks (gpt)", POSITIVE, "n_layer num_layers depth")
    heads: int = option(4, "attention heads (gpt)", POSITIVE, "n_head num_heads")
    width: int = option(96, "channels (gpt)", POSITIVE, "n_embd hidden_size dim d_model")
    dropout: float = option(0.0, "part of the channels dropped while training (gpt)", BELOW_1)


@dataclass(frozen=True)
class _Data:
    """The data."""

    data: str | None = option(
        None, "a text, a folder of texts, a .bin of tokens, or module:function"
    )
    tokenizer: Path | None = option(None, "a tokenizer.json; without one, bytes are tokens")
    token_dtype: str = option("uint16", "of a .bin: uint16 or uint32", one_of("uint16", "uint32"))
    block: int = option(
        64, "tokens of context", POSITIVE, "block_size context seq_len sequence_length max_length"
    )
    batch: int = option(
        32, "examples in a step, over all ranks and microbatches", POSITIVE, "batch_size bs"
    )
    accumulate: int = option(
        1, "microbatches in a step", POSITIVE, "gradient_accumulation_steps grad_accum accum"
    )
    workers: int = option(
        0, "processes that read ahead on each rank", AT_LEAST_0, "num_workers dataloader_workers"
    )


@dataclass(frozen=True)
class _Ranks:
    """The ranks."""

    replicate: int = option(0, "copies of the model; 0: what --shard and --tp leave", AT_LEAST_0)
    shard: int = option(
        1,
        "ranks that share a copy's weights (FSDP2; with copies, HSDP); -1: all",
        Allowed("more than 0, or -1", lambda value: value > 0 or value == -1),
        "strategy fsdp zero",
    )
    tp: int = option(1, "ranks that share each matrix", POSITIVE, "tensor_parallel")
    hook: str | None = option(
        None,
        "send gradients as fp16, bf16 or int8; auto: what is fastest here",
        one_of(*WIRE_FORMATS, "auto", None),
        "comm_hook compression",
    )
    device: str = option("auto", "cpu, cuda, ...; auto: the accelerator, if there is one")
    timeout: float = option(  # gloo counts its milliseconds in 32 bits
        600.0,
        "seconds that ranks wait for each other",
        Allowed("more than 0 and at most 2000000", lambda value: 0 < value <= 2e6),
    )


@dataclass(frozen=True)
class _Precision:
    """Precision and memory."""

    precision: str = option(
        "fp32",
        "fp32, bf16, fp16, O0 to O3, bf16-O2, bf16-O3, or FILE.toml of patterns",
        Allowed(f"{', '.join((*_LEVELS, *LEVELS))} or FILE.toml", _is_level),
        "opt_level amp dtype mixed_precision fp16 bf16 half",
    )
    check_precision: bool = option(True, "do not compare what the first step ran in with the level")
    init_scale: float = option(65536.0, "loss scale at the start (fp16, O2)", POSITIVE_AND_FINITE)
    growth_interval: int = option(2000, "clean steps until the loss scale doubles", POSITIVE)
    compile: bool = option(False, "compile each block")
    checkpoint_blocks: str = option(
        "none",
        "recompute activations: none, all, selective (not the products)",
        one_of("none", "all", "selective"),
        "gradient_checkpointing activation_checkpointing",
    )


@dataclass(frozen=True)
class _Optimizer:
    """The optimizer."""

    optimizer: str = option(
        "adamw",
        "adamw, sgd, muon (adamw on what is no matrix), or module:Class",
        one_of_or_own("adamw", "sgd", "muon", own="module:Class"),
        "optim",
    )
    lr: float = option(4e-3, "learning rate at its peak", POSITIVE_AND_FINITE, "learning_rate")
    schedule: str = option(
        "cosine",
        "after warm-up: cosine, wsd (falls in the last fifth), linear or constant",
        one_of("cosine", "wsd", "linear", "constant"),
        "scheduler lr_scheduler lr_schedule",
    )
    warmup: int = option(50, "taken steps until the peak", AT_LEAST_0, "warmup_steps warmup_iters")
    final_lr: float = option(
        0.1, "where the schedule ends, as a part of the peak", UP_TO_1, "min_lr"
    )
    weight_decay: float = option(0.1, "on matrices alone", AT_LEAST_0_AND_FINITE, "wd")
    beta1: float = option(0.9, "AdamW's first; the momentum of sgd", BELOW_1, "momentum")
    beta2: float = option(0.95, "AdamW's second", BELOW_1, "betas")
    eps: float = option(0.0, "AdamW's; 0: 1e-8, and 1e-3 at O3", AT_LEAST_0_AND_FINITE, "epsilon")
    clip: float = option(
        1.0,
        "largest norm of the gradients; 0: do not clip",
        AT_LEAST_0_AND_FINITE,
        "grad_clip max_norm max_grad_norm gradient_clip clip_grad_norm",
    )
    skip_above: float = option(
        0.0, "skip a step whose norm lies above this, on every rank; 0: none", AT_LEAST_0, "spike"
    )
    on_nonfinite: str = option(
        "skip",
        "at inf or NaN in a gradient: skip, or report, which says where it was born",
        one_of("skip", "report"),
        "detect_anomaly check_nan",
    )
    ema: float = option(0.0, "decay of an average of the weights, for sample and evaluate", BELOW_1)


@dataclass(frozen=True)
class _Run:
    """The run."""

    steps: int = option(
        400,
        "steps of the whole run, skipped ones included",
        POSITIVE,
        "epochs num_epochs max_steps max_iters iterations iters",
    )
    seed: int = option(
        0,
        "fixes weights, the order of the data, and dropout",
        Allowed("0 or more and below 2^32", lambda value: 0 <= value < 2**32),
    )
    log_every: int = option(1, "steps between two records", POSITIVE, "log_interval logging_steps")
    eval_every: int = option(
        50, "steps between two evaluations", POSITIVE, "eval_interval eval_steps"
    )
    eval_examples: int = option(256, "held-out examples of an evaluation", POSITIVE, "eval_iters")
    save_every: int = option(100, "steps between two checkpoints", POSITIVE, "save_steps")
    keep: int = option(2, "newest checkpoints that stay; 0: write none", AT_LEAST_0)
    async_save: bool = option(False, "write checkpoints while training goes on")
    run_dir: Path = option(
        Path("runs/latest"), "where results go", meant="output_dir out_dir out logdir save_dir"
    )
    overwrite: bool = option(False, "start again in a folder that has a run")
    resume: Path | None = option(None, "a run, or a checkpoint of it, to go on with, and its flags")
    auto_resume: bool = option(False, "go on with --run-dir if it has a checkpoint, else start")
    max_time: float = option(math.inf, "minutes after which to save and end", POSITIVE)
    tensorboard: bool = option(False, "write the records for TensorBoard too", meant="wandb")
    peak_tflops: float = option(
        0.0, "of a device, for MFU: A100 312, H100 989; 0: none", AT_LEAST_0
    )
    check: bool = option(False, "say whether these flags can run, and end", meant="dry_run")


@dataclass(frozen=True)
class Config(_Run, _Optimizer, _Precision, _Ranks, _Data, _Model):
    """Train a model in mixed precision, on as many ranks as torchrun starts."""

    @cached_property
    def level(self) -> Precision:
        """The dtypes of ``--precision``, and what goes with them.

        Raises:
            UsageError: Its file cannot be read.
        """
        if not self.precision.endswith(".toml"):
            return Precision.of(_LEVELS.get(self.precision, self.precision))
        with refusing(f"--precision {self.precision}", OSError, ValueError, KeyError):
            given = tomllib.loads(Path(self.precision).read_text(encoding="utf-8"))
            level = _LEVELS.get(given["level"], given["level"])
            return Precision.of(level, precision=given.get("modules", {}))

    @property
    def goes_on(self) -> bool:
        """Whether the run in ``--run-dir`` goes on, and keeps what it has."""
        return self.resume is not None and run_of(self.resume).resolve() == self.run_dir.resolve()

    def require_possible(self, world: int) -> None:
        """Refuse what no machine could run.

        Raises:
            UsageError: Naming the flag, what was given and what is allowed.
        """
        for each in fields(self):
            allowed = each.metadata["allowed"]
            self._require(allowed.test(getattr(self, each.name)), each.name, allowed.words)
        gpt, _ = self.model == "gpt", self.level
        fits = not gpt or self.width % self.heads == 0
        self._require(fits, "width", f"a multiple of --heads {self.heads}")
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

    def smallest_world(self) -> int:
        """Return the fewest ranks that these flags could be for."""
        copies = self.replicate or (2 if self.hook and abs(self.shard) == 1 else 1)
        return copies * abs(self.shard) * self.tp

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
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values = {each.name: values[each.name] for each in fields(Config)}
        for name in ("run_dir", "resume", "tokenizer"):
            values[name] = None if values[name] is None else Path(values[name])
        # Copies that the run has made, so that it needs nothing else.
        if values["tokenizer"] is not None:
            values["tokenizer"] = run / "tokenizer.json"
        if values["precision"].endswith(".toml"):
            values["precision"] = str(run / "precision.toml")
        return Config(**{**values, "model_args": tuple(values["model_args"])})
    except OSError as error:
        raise UsageError(f"{run}: no run there ({error.strerror}: {path})") from None
    except (ValueError, TypeError, KeyError):
        raise UsageError(f"{path}: it is not the config.json of a run") from None


def parser() -> Parser:
    """Return the command line of ``launch/train.py``; what is not given is not in its result."""
    meant = {name: each.name for each in fields(Config) for name in each.metadata["meant"].split()}
    made = Parser("launch/train.py", inspect.getdoc(Config) or "", meant)
    for group in reversed(Config.__bases__):
        titled = made.add_argument_group((group.__doc__ or "").rstrip("."))
        for each in fields(group):
            for name, how in _how(each).items():
                titled.add_argument(name, dest=each.name, default=argparse.SUPPRESS, **how)
    return made


def _how(of: Any) -> dict[str, dict[str, Any]]:
    """Return how argparse reads the flags of an attribute, and what it prints of them."""
    name, text, kind = flag(of.name), of.metadata["text"], of.type
    if kind is bool:
        how = {"action": "store_const", "help": text}
        told, untold = (name, f"--no-{name[2:]}")[:: -1 if of.default else 1]
        hidden = {"action": "store_const", "const": of.default, "help": argparse.SUPPRESS}
        return {told: how | {"const": not of.default}, untold: hidden}
    if kind == tuple[str, ...]:
        return {name: {"nargs": "*", "metavar": "NAME=VALUE", "help": text}}
    kind, *others = get_args(kind) or (kind,)
    default = "" if of.default in (None, math.inf) else f" [{of.default}]"
    read = (lambda word: None if word == "None" else kind(word)) if others else kind
    return {name: {"type": read, "metavar": kind.__name__.upper(), "help": text + default}}


def parse(args: Sequence[str] | None = None) -> Config:
    """Read the command line; where a run is resumed, its flags are the defaults.

    A run that torchrun has started again goes on from its own checkpoint.

    Args:
        args: None: those of the process.

    Raises:
        UsageError: It cannot be read, or the run to go on from is not there.
    """
    given = vars(parser().read(args))
    config = Config(**given)
    again = config.auto_resume or began_here(config.run_dir)
    resume = config.run_dir if again and checkpoints_of(config.run_dir) else config.resume
    if resume is not None:
        run, _ = checkpoint_of(resume, "--resume ")
        old = replace(read_config(run), run_dir=run, overwrite=False, auto_resume=False)
        config = replace(old, **{**given, "resume": resume})
    # A run that was killed before its first checkpoint starts again.
    config = replace(config, overwrite=config.overwrite or again)
    alone = config.smallest_world() if config.check else 1
    config.require_possible(int(os.environ.get("WORLD_SIZE", alone)))
    return _found_from_anywhere(config)


def _found_from_anywhere(config: Config) -> Config:
    """Make paths absolute, so that the run can be read from another folder."""
    paths: dict[str, Any] = {}
    kind, _, folder = config.model.partition(":")
    if config.data is not None and Path(config.data).expanduser().exists():
        paths["data"] = str(Path(config.data).expanduser().absolute())
    if config.tokenizer is not None:
        paths["tokenizer"] = config.tokenizer.expanduser().absolute()
    if config.precision.endswith(".toml"):
        paths["precision"] = str(Path(config.precision).expanduser().absolute())
    if kind == "hf" and Path(folder).expanduser().is_dir():
        paths["model"] = f"hf:{Path(folder).expanduser().absolute()}"
    return replace(config, **paths)
