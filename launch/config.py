"""What a run is asked to do: models of pydantic's, of which cyclopts makes the command line."""

import json
import math
import os
import re
import sys
import tomllib
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    NonNegativeInt,
    PositiveInt,
)

from distamp import PrecisionLevel
from distamp.errors import ConfigError
from distamp.precision_level import LEVELS
from launch.folder import find_checkpoint, find_run_dir, list_checkpoints, started_by_this_torchrun
from launch.program import (
    UnknownNameError,
    convert_to_usage_error,
    flag,
    make_app,
    require,
    run_app,
)

# Flags that had another name before 0.1.0. Runs of that time have the old names in config.json.
RENAMED_FLAGS = {
    "block": "seq_len",
    "width": "d_model",
    "batch": "global_batch_size",
    "clip": "max_grad_norm",
    "hook": "comm_hook",
    "checkpoint_blocks": "activation_checkpointing",
    "keep": "keep_checkpoints",
    "check": "dry_run",
    "final_lr": "min_lr_ratio",
    "skip_above": "skip_norm_above",
}
# Flags that took a plain number before 0.1.0, with the unit of that number.
_FORMER_UNITS = {"timeout": "s", "max_time": "m"}
_UNIT_NAMES = {"s": "seconds", "m": "minutes"}
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
# Flags that describe the built-in model, and that no other model reads.
_GPT_FLAGS = ("layers", "heads", "d_model", "dropout")


def _absolute(name: str) -> str:
    """Return a path that is there, also behind ``hf:``, as any folder reads it; others as given."""
    kind = "hf:" if name.startswith("hf:") else ""
    path = Path(name.removeprefix(kind)).expanduser()
    return f"{kind}{path.absolute()}" if path.exists() else name


def _one_of(noun: str, names: Collection[str], pattern: str, form: str) -> AfterValidator:
    """Allow some names, and values that match a pattern, which a message calls ``form``."""

    def check(value: str) -> str:
        if value in names:
            return value
        if not re.fullmatch(pattern, value):
            choices = ", ".join([*names, form])
            raise UnknownNameError(f"there is no such {noun}. Choose {choices}.", names)
        return _absolute(value)

    return AfterValidator(check)


def _level_name(value: str) -> str:
    """Return the name of the level that a flag gives by any of its names, or a file's path."""
    if value.endswith(".toml"):
        return _absolute(value)
    try:
        return PrecisionLevel.from_name(value).name
    except ConfigError:
        choices = ", ".join([*LEVELS, "or FILE.toml"])
        sentence = f"there is no such precision level. Choose {choices}."
        raise UnknownNameError(sentence, LEVELS) from None


def _check_model(value: str) -> str:
    """Allow the built-in model, a model of transformers and the user's own."""
    if value == "gpt":
        return value
    if not re.fullmatch(r"\w.*:.+", value):
        name = value.strip(":") or "TYPE"
        raise ValueError(
            "the built-in model is called gpt, and every other model has a colon in its name. "
            f"Write hf:{name} for a model type or a folder of transformers, or module:function "
            "for your own model."
        )
    return _absolute(value)


def _check_pair(value: str) -> str:
    """Allow ``name=value``."""
    if not re.fullmatch(".+=.*", value, re.DOTALL):
        raise ValueError(f"the value is missing. Write {value.strip('=') or 'name'}=VALUE.")
    return value


def to_seconds(duration: str) -> float:
    """Convert a duration such as ``90s``, ``10m`` or ``2h`` to seconds; ``none`` is infinite."""
    if duration == "none":
        return math.inf
    return float(duration[:-1]) * _SECONDS[duration[-1]]


def _duration(flag_name: str, limit: float = math.inf) -> AfterValidator:
    """Allow a positive duration with a unit, up to a limit; and ``none`` if there is no limit.

    Args:
        flag_name: The flag that takes the duration.
        limit: In seconds.
    """

    def check(value: str) -> str:
        if value == "none" and limit == math.inf:
            return value
        number = re.fullmatch(r"(\d+\.?\d*|\.\d+)([smh]?)", value)
        if number is None:
            raise ValueError("this is not a duration. Write one such as 90s, 10m or 2h.")
        if not number[2]:
            former = _FORMER_UNITS[flag_name]
            other = "m" if former == "s" else "s"
            raise ValueError(
                f"the unit is missing. Write {value}{former} for {_UNIT_NAMES[former]}, which a "
                f"plain number meant before, or {value}{other} for {_UNIT_NAMES[other]}."
            )
        if not 0 < to_seconds(value) <= limit:
            upper = "" if limit == math.inf else f" and at most {limit:.0f}s"
            raise ValueError(f"a duration must be longer than 0s{upper}.")
        return value

    return AfterValidator(check)


Name = Annotated[str, AfterValidator(_absolute)]
ModelName = Annotated[str, AfterValidator(_check_model)]
LevelName = Annotated[str, AfterValidator(_level_name)]
OptimizerName = Annotated[
    str, _one_of("optimizer", ["adamw", "sgd", "muon"], ".+:.+", "or module:Class")
]
Pair = Annotated[str, AfterValidator(_check_pair)]
# gloo counts milliseconds in 32 bits.
WaitTime = Annotated[str, _duration("timeout", limit=2e6)]
RunTime = Annotated[str, _duration("max_time")]
Finite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FiniteOrNone = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def option(default: Any, text: str, elsewhere: str = "") -> Any:
    """Declare a flag: its default, its line of help, and its names in other programs."""
    return Field(default, description=text, json_schema_extra={"elsewhere": elsewhere})


def _group(model: type[BaseModel]) -> type[BaseModel]:
    """Have the fields of a model be flags without a prefix, listed under its docstring."""
    title = (model.__doc__ or "").rstrip(".")
    return Parameter("*", group=Group.create_ordered(title))(model)


@_group
class _Model(BaseModel, frozen=True):
    """The model."""

    model: ModelName = option(
        "gpt",
        "Model to train: gpt, hf:TYPE or hf:FOLDER (transformers), or your own module:function.",
    )
    model_args: Annotated[tuple[Pair, ...], Parameter(consume_multiple=True)] = option(
        (), "Settings of an hf: config, or arguments of your module:function, as name=value."
    )
    layers: PositiveInt = option(
        2, "Number of transformer blocks. Only gpt reads this flag.", "n_layer num_layers depth"
    )
    heads: PositiveInt = option(
        4, "Number of attention heads. Only gpt reads this flag.", "n_head num_heads"
    )
    d_model: PositiveInt = option(
        96, "Channels of the hidden states. Only gpt reads this flag.", "n_embd hidden_size dim"
    )
    dropout: Decay = option(
        0.0, "Fraction of activations to drop during training. Only gpt reads this flag."
    )


@_group
class _Data(BaseModel, frozen=True):
    """The data."""

    data: Name | None = option(
        None,
        "Data to train on: a text, a folder of texts, a .bin of tokens, or your own "
        "module:function. The source of Python's standard library if the flag is left out.",
    )
    tokenizer: Annotated[Path, AfterValidator(Path.absolute)] | None = option(
        None, "A tokenizer.json. Each byte of the text is a token if the flag is left out."
    )
    token_dtype: Literal["uint16", "uint32"] = option(
        "uint16", "Integer type of the tokens in a .bin file."
    )
    seq_len: PositiveInt = option(
        64,
        "Number of tokens in an example.",
        "block_size context sequence_length max_length",
    )
    global_batch_size: PositiveInt = option(
        32,
        "Number of examples in a step, summed over all ranks and microbatches.",
        "batch_size bs",
    )
    accumulate: PositiveInt = option(
        1,
        "Number of microbatches whose gradients are added up in a step.",
        "gradient_accumulation_steps grad_accum accum",
    )
    workers: NonNegativeInt = option(
        0,
        "Number of processes on each rank that read data ahead.",
        "num_workers dataloader_workers",
    )


@_group
class _Ranks(BaseModel, frozen=True):
    """The ranks."""

    replicate: NonNegativeInt = option(
        0, "Number of copies of the model. 0 makes as many as --shard and --tp allow."
    )
    shard: Annotated[int, Field(ge=-1)] = option(
        1,
        "Number of ranks that share the weights of a copy: FSDP2, or HSDP if there are several "
        "copies. -1 means all ranks.",
        "strategy fsdp",
    )
    tp: PositiveInt = option(1, "Number of ranks that share each weight matrix.", "tensor_parallel")
    comm_hook: Literal["none", "fp16", "bf16", "int8"] = option(
        "none",
        "Format in which ranks send gradients. none leaves them uncompressed.",
        "compression",
    )
    device: str = option(
        "auto", "Device type, such as cpu or cuda. auto takes the accelerator if there is one."
    )
    timeout: WaitTime = option(
        "10m", "Time that ranks wait for each other before the run fails, such as 90s, 10m or 2h."
    )


@_group
class _Precision(BaseModel, frozen=True):
    """Precision and memory."""

    precision: LevelName = option(
        "fp32",
        "Precision level: fp32, fp16, bf16, fp8, fp8-rowwise, fp16-O2, fp16-O3, bf16-O2 or "
        "bf16-O3, or a FILE.toml that sets the precision of single modules.",
        "opt_level amp dtype mixed_precision fp16 bf16 half",
    )
    check_precision: bool = option(
        True, "Compare the precisions of the first step with those that the level promises."
    )
    init_scale: Finite = option(65536.0, "Loss scale at the start, in fp16 and fp16-O2.")
    growth_interval: PositiveInt = option(
        2000, "Number of steps without overflow after which the loss scale doubles."
    )
    compile: bool = option(False, "Compile each block with torch.compile.")
    activation_checkpointing: Literal["none", "all", "selective"] = option(
        "none",
        "Recompute activations in the backward pass to save memory. selective keeps the results "
        "of matrix products and attention.",
        "gradient_checkpointing",
    )


@_group
class _Optimizer(BaseModel, frozen=True):
    """The optimizer."""

    optimizer: OptimizerName = option(
        "adamw",
        "Optimizer: adamw, sgd, muon (for the matrices of blocks, with adamw for all other "
        "parameters), or your own module:Class.",
        "optim",
    )
    lr: Finite = option(4e-3, "Highest learning rate of the schedule.", "learning_rate")
    schedule: Literal["cosine", "wsd", "linear", "constant"] = option(
        "cosine",
        "Shape of the learning rate after the warm-up. wsd stays constant and falls in the last "
        "fifth of the run.",
        "scheduler lr_scheduler lr_schedule",
    )
    warmup: NonNegativeInt = option(
        50,
        "Number of steps in which the learning rate rises to --lr. Skipped steps do not count.",
        "warmup_steps warmup_iters",
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = option(
        0.1, "Learning rate at the end of the schedule, as a fraction of --lr.", "min_lr"
    )
    weight_decay: FiniteOrNone = option(
        0.1, "Weight decay of the matrices. Biases and norm weights do not decay.", "wd"
    )
    beta1: Decay = option(0.9, "First beta of AdamW, or the momentum of sgd.", "momentum")
    beta2: Decay = option(0.95, "Second beta of AdamW.", "betas")
    eps: FiniteOrNone = option(
        0.0, "Epsilon of AdamW. 0 chooses 1e-8, or 1e-3 at level fp16-O3.", "epsilon"
    )
    max_grad_norm: FiniteOrNone = option(
        1.0,
        "Clip gradients whose total norm is larger than this. 0 turns clipping off.",
        "grad_clip max_norm gradient_clip clip_grad_norm",
    )
    skip_norm_above: FiniteOrNone = option(
        0.0,
        "Skip a step on every rank if the total norm of its gradients is larger than this. 0 "
        "skips no step.",
        "spike",
    )
    on_nonfinite: Literal["skip", "report"] = option(
        "skip",
        "Reaction to inf or NaN in a gradient: skip the step, or also report the operation that "
        "produced it first.",
        "detect_anomaly check_nan",
    )
    ema: Decay = option(
        0.0,
        "Decay of a moving average of the weights, which sample and evaluate use. 0 keeps no "
        "average.",
    )


@_group
class _Run(BaseModel, frozen=True):
    """The run."""

    steps: PositiveInt = option(
        400,
        "Number of the last step. Skipped steps and steps before --resume count.",
        "epochs num_epochs max_steps max_iters iterations iters",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = option(
        0, "Seed of the weights, of the order of the data, and of dropout."
    )
    log_every: PositiveInt = option(
        1, "Number of steps between two records of the metrics.", "log_interval logging_steps"
    )
    eval_every: PositiveInt = option(
        50, "Number of steps between two evaluations.", "eval_interval eval_steps"
    )
    eval_examples: PositiveInt = option(
        256, "Number of held-out examples in an evaluation.", "eval_iters"
    )
    save_every: PositiveInt = option(100, "Number of steps between two checkpoints.", "save_steps")
    keep_checkpoints: NonNegativeInt = option(
        2, "Number of the newest checkpoints to keep. 0 writes no checkpoint."
    )
    async_save: bool = option(False, "Write checkpoints in the background.")
    run_dir: Path = option(
        Path("runs/latest"),
        "Folder for the results of the run.",
        "output_dir out_dir out logdir save_dir",
    )
    overwrite: bool = option(False, "Start again in a folder that has a run, and replace that run.")
    resume: Path | None = option(
        None, "Folder of a run, or one of its checkpoints, to resume with the flags of that run."
    )
    auto_resume: bool = option(
        False, "Resume if --run-dir has a checkpoint, and start a new run if it has none."
    )
    max_time: RunTime = option(
        "none",
        "Time after which the run saves a checkpoint and ends, such as 90s, 10m or 2h. none sets "
        "no limit.",
    )
    tensorboard: bool = option(False, "Also write the metrics for TensorBoard.", "wandb")
    peak_tflops: FiniteOrNone = option(
        0.0,
        "Peak of one device in TFLOP/s, from which MFU is computed: 312 for an A100, 989 for an "
        "H100. 0 leaves MFU out.",
    )
    dry_run: bool = option(
        False, "Do everything that comes before the first step, report what was checked, and end."
    )


class Config(
    _Run, _Optimizer, _Precision, _Ranks, _Data, _Model, frozen=True, ser_json_inf_nan="constants"
):
    """Train a model in mixed precision, on as many ranks as torchrun starts."""

    @cached_property
    def level(self) -> PrecisionLevel:
        """The dtypes of ``--precision``, and what goes with them.

        Raises:
            UsageError: Its file cannot be read.
        """
        if not self.precision.endswith(".toml"):
            return PrecisionLevel.from_name(self.precision)
        with convert_to_usage_error(f"--precision {self.precision}", OSError, ValueError):
            given = tomllib.loads(Path(self.precision).read_text(encoding="utf-8"))
            if given.keys() | {"modules"} != {"level", "modules"}:
                raise ValueError(
                    f"it has {', '.join(given) or 'nothing'}; it is a level and, where patterns "
                    "are to have a precision of their own, a table [modules]"
                )
            return PrecisionLevel.from_name(
                given["level"], module_precision=given.get("modules", {})
            )

    @property
    def resumes_in_place(self) -> bool:
        """Whether the run in ``--run-dir`` goes on, and keeps what it has."""
        return (
            self.resume is not None
            and find_run_dir(self.resume).resolve() == self.run_dir.resolve()
        )

    def layout(self, world: int) -> tuple[int, int, int]:
        """Return how many copies of the model there are, ranks that shard one, and tensor ranks.

        A product that is not ``world`` cannot be had.
        """
        rest = world // self.tp
        shard = rest // max(1, self.replicate) if self.shard == -1 else self.shard
        return self.replicate or rest // max(1, shard), shard, self.tp

    @property
    def world(self) -> int:
        """The number of ranks: those of torchrun, or the fewest of a dry run without torchrun."""
        fewest = self.smallest_world() if self.dry_run else 1
        return int(os.environ.get("WORLD_SIZE", fewest))

    @property
    def has_all_ranks(self) -> bool:
        """Whether every rank of the run has a process; a dry run without torchrun has one."""
        return "WORLD_SIZE" in os.environ or self.world == 1

    def smallest_world(self) -> int:
        """Return the fewest ranks that these flags could be for."""
        copies = self.replicate or (2 if self.comm_hook != "none" and abs(self.shard) == 1 else 1)
        return copies * abs(self.shard) * self.tp

    def require_consistent(self, world: int) -> None:
        """Refuse what does not fit together, or this number of ranks.

        Raises:
            UsageError: Naming the flag, what was given and what is allowed.
        """
        replicate, shard, tp = self.layout(world)
        require(
            min(replicate, shard) > 0 and replicate * shard * tp == world,
            f"--replicate {self.replicate or replicate} --shard {self.shard} --tp {tp}: their "
            f"product must be the number of ranks, which is {world} (torchrun --nproc-per-node)",
        )
        fits = self.comm_hook == "none" or (world > 1 and tp == 1)
        require(fits, f"--comm-hook {self.comm_hook}: it must be none on one rank, and with --tp")
        if self.model == "gpt":
            require(
                not self.model_args,
                f"--model-args {' '.join(self.model_args)}: gpt takes --layers, --heads, --d-model",
            )
            d_model, heads = f"--d-model {self.d_model}", f"--heads {self.heads}"
            require(self.d_model % self.heads == 0, f"{d_model}: it must be a multiple of {heads}")
            require(self.heads % tp == 0, f"{heads}: it must be a multiple of --tp {tp}")
        share = replicate * shard * self.accumulate
        require(
            self.global_batch_size % share == 0,
            f"--global-batch-size {self.global_batch_size}: it must be a multiple of --replicate x "
            f"--shard x --accumulate = {share}, such as "
            f"{math.ceil(self.global_batch_size / share) * share}",
        )


def _upgrade(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of a saved run with present names and with units."""
    flags_now = {RENAMED_FLAGS.get(name, name): value for name, value in saved.items()}
    for name, unit in _FORMER_UNITS.items():
        value = flags_now.get(name)
        if isinstance(value, int | float):
            flags_now[name] = f"{value:.12g}{unit}" if math.isfinite(value) else "none"
    return flags_now


def read_config(run: Path) -> Config:
    """Read the flags of a run.

    Raises:
        UsageError: There is no run in that folder.
    """
    with convert_to_usage_error(
        f"{run}: no run there, or none of this version", OSError, ValueError
    ):
        saved = json.loads((run / "config.json").read_text(encoding="utf-8"))
        config = Config.model_validate(_upgrade(saved) if isinstance(saved, dict) else saved)
    # Copies that the run has made, so that it needs nothing else.
    tokenizer = config.tokenizer and run / "tokenizer.json"
    has_rules = config.precision.endswith(".toml")
    precision = str(run / "precision.toml") if has_rules else config.precision
    return config.model_copy(update={"tokenizer": tokenizer, "precision": precision})


def flags(
    *,
    model: _Model = _Model(),
    data: _Data = _Data(),
    ranks: _Ranks = _Ranks(),
    precision: _Precision = _Precision(),
    optimizer: _Optimizer = _Optimizer(),
    run: _Run = _Run(),
) -> dict[str, Any]:
    """Train a model in mixed precision, on as many ranks as torchrun starts."""
    groups = (model, data, ranks, precision, optimizer, run)
    return dict(ChainMap(*(group.model_dump(exclude_unset=True) for group in groups)))


COMMAND = make_app("launch/train.py", flags)


def parse(args: Sequence[str] | None = None) -> Config:
    """Read the command line; where a run is resumed, its flags are the defaults.

    A run that torchrun has started again goes on from its own checkpoint.

    Args:
        args: None: those of the process.

    Raises:
        UsageError: It cannot be read, the run to go on from is not there, or another is in the way.
    """
    known: dict[str, Any] = Config.model_fields
    elsewhere = {
        theirs: name
        for name, field in known.items()
        for theirs in field.json_schema_extra["elsewhere"].split()
    }
    given = run_app(COMMAND, args, elsewhere, RENAMED_FLAGS)
    if given is None:  # --help has been printed
        sys.exit()
    config = Config(**given)
    again = config.auto_resume or started_by_this_torchrun(config.run_dir)
    resume = config.run_dir if again and list_checkpoints(config.run_dir) else config.resume
    if resume is not None:
        run, checkpoint = find_checkpoint(resume, "--resume ")
        old = read_config(run).model_dump() | {"overwrite": False, "auto_resume": False}
        config = Config(**{**old, "run_dir": run, **given, "resume": checkpoint})
        hint = f"{run} goes on with --optimizer {old['optimizer']} alone"
        require(config.optimizer == old["optimizer"], f"--optimizer {config.optimizer}: {hint}")
    unread = [name for name in _GPT_FLAGS if name in given and config.model != "gpt"]
    require(
        not unread,
        f"{' '.join(f'{flag(name)} {given[name]}' for name in unread)}: only the built-in gpt "
        f"reads this, and --model is {config.model}. Leave it out, or give arguments of your "
        "model by --model-args name=value.",
    )
    # A run that was killed before its first checkpoint starts again.
    config = config.model_copy(update={"overwrite": config.overwrite or again})
    config.require_consistent(config.world)
    _ = config.level  # its file is read now, so that it is refused now
    free = (
        config.resumes_in_place
        or config.overwrite
        or not (config.run_dir / "metrics.jsonl").exists()
    )
    hint = f"--resume {config.run_dir} goes on with it, --overwrite starts again"
    require(free, f"--run-dir {config.run_dir}: it has a run; {hint}")
    return config
