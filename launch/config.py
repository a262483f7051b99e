"""The flags of launch/train.py: pydantic models, from which cyclopts makes the command line."""

import json
import math
import os
import re
import sys
import tomllib
from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from pydantic import AfterValidator, BaseModel, Field, NonNegativeInt, PositiveInt

from distamp import PrecisionLevel
from distamp.errors import ConfigError
from distamp.precision_level import LEVELS
from launch.folder import find_checkpoint, find_run_dir, list_checkpoints, started_by_this_torchrun
from launch.program import (
    UnknownNameError,
    UsageError,
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
_SECONDS_PER_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0}
# Flags that describe the built-in model, and that no other model reads.
_GPT_FLAGS = ("layers", "heads", "d_model", "dropout")


# -- types of values -------------------------------------------------------------------------------


def _absolute_path(value: str) -> str:
    """Return an existing path as an absolute one, also behind ``hf:``, and any other value as is.

    The run can then be read from any folder.
    """
    prefix = "hf:" if value.startswith("hf:") else ""
    path = Path(value.removeprefix(prefix)).expanduser()
    if not path.exists():
        return value
    return f"{prefix}{path.absolute()}"


def _check_optimizer(value: str) -> str:
    """Accept the names of the built-in optimizers, and ``module:Class``."""
    names = ("adamw", "sgd", "muon")
    if value in names:
        return value
    if not re.fullmatch(".+:.+", value):
        choices = ", ".join(names)
        message = f"there is no such optimizer. Choose {choices}, or module:Class."
        raise UnknownNameError(message, names)
    return _absolute_path(value)


def _check_level(value: str) -> str:
    """Return the name of a precision level from any of its names, or the path of its file."""
    if value.endswith(".toml"):
        return _absolute_path(value)
    try:
        return PrecisionLevel.from_name(value).name
    except ConfigError:
        choices = ", ".join(LEVELS)
        message = f"there is no such precision level. Choose {choices}, or FILE.toml."
        raise UnknownNameError(message, LEVELS) from None


def _check_model(value: str) -> str:
    """Accept the built-in model, a model of transformers, and a function of the user."""
    if value == "gpt":
        return value
    if not re.fullmatch(r"\w.*:.+", value):
        name = value.strip(":") or "TYPE"
        raise ValueError(
            "the built-in model is called gpt, and every other model has a colon in its name. "
            f"Write hf:{name} for a model type or a folder of transformers, or module:function "
            "for your own model."
        )
    return _absolute_path(value)


def _check_pair(value: str) -> str:
    """Accept ``name=value``."""
    if not re.fullmatch(".+=.*", value, re.DOTALL):
        name = value.strip("=") or "name"
        raise ValueError(f"the value is missing. Write {name}=VALUE.")
    return value


def to_seconds(duration: str) -> float:
    """Convert a duration such as ``90s``, ``10m`` or ``2h`` to seconds; ``none`` is infinite."""
    if duration == "none":
        return math.inf
    number, unit = duration[:-1], duration[-1]
    return float(number) * _SECONDS_PER_UNIT[unit]


def _make_duration_check(flag_name: str, limit: float = math.inf) -> AfterValidator:
    """Return a check for a positive duration with a unit, or ``none`` if there is no limit.

    Args:
        flag_name: The flag that takes the duration.
        limit: The longest duration in seconds.
    """

    def check(value: str) -> str:
        if value == "none" and limit == math.inf:
            return value
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([smh]?)", value)
        if match is None:
            raise ValueError("this is not a duration. Write one such as 90s, 10m or 2h.")
        if not match[2]:
            former = _FORMER_UNITS[flag_name]
            alternative = "m" if former == "s" else "s"
            raise ValueError(
                f"the unit is missing. Write {value}{former} for {_UNIT_NAMES[former]}, which a "
                f"plain number meant before, or {value}{alternative} for "
                f"{_UNIT_NAMES[alternative]}."
            )
        if not 0 < to_seconds(value) <= limit:
            upper = "" if limit == math.inf else f" and at most {limit:.0f}s"
            raise ValueError(f"a duration must be longer than 0s{upper}.")
        return value

    return AfterValidator(check)


PathOrName = Annotated[str, AfterValidator(_absolute_path)]
AbsolutePath = Annotated[Path, AfterValidator(Path.absolute)]
ModelName = Annotated[str, AfterValidator(_check_model)]
LevelName = Annotated[str, AfterValidator(_check_level)]
OptimizerName = Annotated[str, AfterValidator(_check_optimizer)]
Pair = Annotated[str, AfterValidator(_check_pair)]
Pairs = Annotated[tuple[Pair, ...], Parameter(consume_multiple=True)]
# gloo counts milliseconds in 32 bits.
WaitTime = Annotated[str, _make_duration_check("timeout", limit=2e6)]
RunTime = Annotated[str, _make_duration_check("max_time")]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
ShardCount = Annotated[int, Field(ge=-1)]
TokenDtype = Literal["uint16", "uint32"]
CommHook = Literal["none", "fp16", "bf16", "int8"]
Checkpointing = Literal["none", "all", "selective"]
Schedule = Literal["cosine", "wsd", "linear", "constant"]
NonfiniteReaction = Literal["skip", "report"]
MismatchReaction = Literal["warn", "raise"]


# -- flags -----------------------------------------------------------------------------------------


def option(default: Any, text: str, foreign_names: str = "") -> Any:
    """Declare a flag with its default, its help and its names in other programs."""
    return Field(default, description=text, json_schema_extra={"foreign_names": foreign_names})


def _group(model: type[BaseModel]) -> type[BaseModel]:
    """Make the fields of a model flags without a prefix, under its docstring as the heading."""
    title = (model.__doc__ or "").rstrip(".")
    group = Group.create_ordered(title)
    return Parameter("*", group=group)(model)


@_group
class _Model(BaseModel, frozen=True):
    """The model."""

    model: ModelName = option(
        "gpt",
        "Model to train: gpt, hf:TYPE or hf:FOLDER (transformers), or your own module:function.",
    )
    model_args: Pairs = option(
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

    data: PathOrName | None = option(
        None,
        "Data to train on: a text, a folder of texts, a .bin of tokens, or your own "
        "module:function. The source of Python's standard library if the flag is left out.",
    )
    tokenizer: AbsolutePath | None = option(
        None, "A tokenizer.json. Each byte of the text is a token if the flag is left out."
    )
    token_dtype: TokenDtype = option("uint16", "Integer type of the tokens in a .bin file.")
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
    shard: ShardCount = option(
        1,
        "Number of ranks that share the weights of a copy: FSDP2, or HSDP if there are several "
        "copies. -1 means all ranks.",
        "strategy fsdp",
    )
    tp: PositiveInt = option(1, "Number of ranks that share each weight matrix.", "tensor_parallel")
    comm_hook: CommHook = option(
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
    init_scale: PositiveFloat = option(65536.0, "Loss scale at the start, in fp16 and fp16-O2.")
    growth_interval: PositiveInt = option(
        2000, "Number of steps without overflow after which the loss scale doubles."
    )
    compile: bool = option(False, "Compile each block with torch.compile.")
    activation_checkpointing: Checkpointing = option(
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
    lr: PositiveFloat = option(4e-3, "Highest learning rate of the schedule.", "learning_rate")
    schedule: Schedule = option(
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
    min_lr_ratio: Fraction = option(
        0.1, "Learning rate at the end of the schedule, as a fraction of --lr.", "min_lr"
    )
    weight_decay: NonNegativeFloat = option(
        0.1, "Weight decay of the matrices. Biases and norm weights do not decay.", "wd"
    )
    beta1: Decay = option(0.9, "First beta of AdamW, or the momentum of sgd.", "momentum")
    beta2: Decay = option(0.95, "Second beta of AdamW.", "betas")
    eps: NonNegativeFloat = option(
        0.0, "Epsilon of AdamW. 0 chooses 1e-8, or 1e-3 at level fp16-O3.", "epsilon"
    )
    max_grad_norm: NonNegativeFloat = option(
        1.0,
        "Clip gradients whose total norm is larger than this. 0 turns clipping off.",
        "grad_clip max_norm gradient_clip clip_grad_norm",
    )
    skip_norm_above: NonNegativeFloat = option(
        0.0,
        "Skip a step on every rank if the total norm of its gradients is larger than this. 0 "
        "skips no step.",
        "spike",
    )
    on_nonfinite: NonfiniteReaction = option(
        "skip",
        "Reaction to inf or NaN in a gradient: skip the step, or also report the operation that "
        "produced it first.",
        "detect_anomaly check_nan",
    )
    check_update: bool = option(
        False,
        "Check the weights that each step has written for inf and NaN. --rewind-every turns this "
        "on, too.",
    )
    check_replicas_every: NonNegativeInt = option(
        100,
        "Number of steps between two comparisons of the weights and the optimizer state that ranks "
        "should hold alike. 0 compares nothing.",
    )
    on_mismatch: MismatchReaction = option(
        "warn", "Reaction to replicas that differ: warn and go on, or end or rewind the run."
    )
    rewind_every: NonNegativeInt = option(
        0,
        "Number of steps between two copies of the run in host memory, to which all ranks go back "
        "if weights have inf or NaN, replicas differ, or too many steps are skipped. 0 ends the "
        "run instead.",
    )
    max_rewinds: PositiveInt = option(3, "Number of times that a run may go back before it ends.")
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
    seed: Seed = option(0, "Seed of the weights, of the order of the data, and of dropout.")
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
    peak_tflops: NonNegativeFloat = option(
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
        """The precision level of ``--precision``.

        Raises:
            UsageError: Its file cannot be read.
        """
        if not self.precision.endswith(".toml"):
            return PrecisionLevel.from_name(self.precision)
        with convert_to_usage_error(f"--precision {self.precision}", OSError, ValueError):
            return _read_level(Path(self.precision))

    @property
    def resumes_in_place(self) -> bool:
        """True if the run in ``--run-dir`` is resumed, so that its results stay."""
        if self.resume is None:
            return False
        return find_run_dir(self.resume).resolve() == self.run_dir.resolve()

    @property
    def world_size(self) -> int:
        """The number of ranks of torchrun, or the smallest one for a dry run without torchrun."""
        if "WORLD_SIZE" in os.environ:
            return int(os.environ["WORLD_SIZE"])
        return self.smallest_world_size() if self.dry_run else 1

    @property
    def has_all_ranks(self) -> bool:
        """True if every rank of the run has a process. A dry run without torchrun has only one."""
        return "WORLD_SIZE" in os.environ or self.world_size == 1

    def smallest_world_size(self) -> int:
        """Return the smallest number of ranks that these flags could be for."""
        replicate = self.replicate
        if replicate == 0:
            needs_replicas = self.comm_hook != "none" and abs(self.shard) == 1
            replicate = 2 if needs_replicas else 1
        return replicate * abs(self.shard) * self.tp

    def mesh_shape(self, world_size: int) -> tuple[int, int, int]:
        """Return the sizes of the mesh: replicas, shards of a replica, tensor-parallel ranks.

        Their product differs from ``world_size`` if the flags do not fit.
        """
        data_ranks = world_size // self.tp
        shard = self.shard
        if shard == -1:
            shard = data_ranks // max(1, self.replicate)
        replicate = self.replicate or data_ranks // max(1, shard)
        return replicate, shard, self.tp

    def require_consistent(self, world_size: int) -> None:
        """Refuse flags that contradict each other or this number of ranks.

        Raises:
            UsageError: The message names the flags, and the values that are allowed.
        """
        replicate, shard, tp = self.mesh_shape(world_size)
        require(
            min(replicate, shard) > 0 and replicate * shard * tp == world_size,
            f"--replicate {self.replicate or replicate} --shard {self.shard} --tp {tp}: the "
            f"product of these flags must be the number of ranks, which is {world_size}. "
            "torchrun --nproc-per-node sets that number.",
        )
        if self.comm_hook != "none":
            require(
                world_size > 1 and tp == 1,
                f"--comm-hook {self.comm_hook}: a hook needs several ranks and does not work with "
                "--tp. Leave it out.",
            )
        if self.model == "gpt":
            self._require_gpt_shape()
        ranks_and_microbatches = replicate * shard * self.accumulate
        batch_size = self.global_batch_size
        if batch_size % ranks_and_microbatches != 0:
            enough = math.ceil(batch_size / ranks_and_microbatches) * ranks_and_microbatches
            raise UsageError(
                f"--global-batch-size {batch_size}: it must be a multiple of --replicate x "
                f"--shard x --accumulate = {ranks_and_microbatches}, such as {enough}"
            )

    def _require_gpt_shape(self) -> None:
        pairs = " ".join(self.model_args)
        require(not pairs, f"--model-args {pairs}: gpt takes --layers, --heads, --d-model")
        require(
            self.d_model % self.heads == 0,
            f"--d-model {self.d_model}: it must be a multiple of --heads {self.heads}",
        )
        require(
            self.heads % self.tp == 0,
            f"--heads {self.heads}: it must be a multiple of --tp {self.tp}",
        )


def _read_level(path: Path) -> PrecisionLevel:
    """Read the file of a precision level, which may have a table with precisions of modules."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    if entries.keys() | {"modules"} != {"level", "modules"}:
        contents = ", ".join(entries) or "nothing"
        raise ValueError(
            f"the file contains {contents}. It must contain level, and may contain a table "
            "[modules] that gives the modules of a pattern another precision."
        )
    modules = entries.get("modules", {})
    return PrecisionLevel.from_name(entries["level"], module_precision=modules)


# -- saved flags -----------------------------------------------------------------------------------


def _upgrade(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of a saved run with present names and with units."""
    flags_now = {RENAMED_FLAGS.get(name, name): value for name, value in saved.items()}
    for name, unit in _FORMER_UNITS.items():
        value = flags_now.get(name)
        if isinstance(value, int | float):
            flags_now[name] = f"{value:.12g}{unit}" if math.isfinite(value) else "none"
    return flags_now


def read_config(run_dir: Path) -> Config:
    """Read the flags of a run.

    Raises:
        UsageError: There is no run in that folder.
    """
    fault = f"{run_dir}: no run there, or none of this version"
    with convert_to_usage_error(fault, OSError, ValueError):
        saved = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        flags = _upgrade(saved) if isinstance(saved, dict) else saved
        config = Config.model_validate(flags)
    # The run has copies of these files, so the originals may be gone.
    copies: dict[str, Any] = {}
    if config.tokenizer is not None:
        copies["tokenizer"] = run_dir / "tokenizer.json"
    if config.precision.endswith(".toml"):
        copies["precision"] = str(run_dir / "precision.toml")
    return config.model_copy(update=copies)


# -- the command line ------------------------------------------------------------------------------


def collect_flags(
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
    # Flags that the user left out get their values from the run that is resumed.
    return dict(ChainMap(*(group.model_dump(exclude_unset=True) for group in groups)))


COMMAND = make_app("launch/train.py", collect_flags)


def _foreign_names() -> dict[str, str]:
    """Return the names of flags in other programs, with the flag that has that meaning here."""
    fields: dict[str, Any] = Config.model_fields
    present_names = {}
    for name, field in fields.items():
        for foreign_name in field.json_schema_extra["foreign_names"].split():
            present_names[foreign_name] = name
    return present_names


def parse(args: Sequence[str] | None = None) -> Config:
    """Read the command line. Flags of a resumed run are the defaults.

    A run that torchrun has restarted resumes from its newest checkpoint.

    Args:
        args: The words of the command line. None takes the words of this process.

    Raises:
        UsageError: A flag cannot be read, the run to resume does not exist, or the folder has
            another run.
    """
    flags = run_app(COMMAND, args, _foreign_names(), RENAMED_FLAGS)
    if flags is None:  # --help has been printed
        sys.exit()
    config = Config(**flags)
    resume = config.resume
    resumes_itself = config.auto_resume or started_by_this_torchrun(config.run_dir)
    if resumes_itself and list_checkpoints(config.run_dir):
        resume = config.run_dir
    if resume is not None:
        config = _resume(resume, flags)
    if config.model != "gpt":
        _refuse_gpt_flags(config, flags)
    # A run that was killed before its first checkpoint starts again in its folder.
    if resumes_itself:
        config = config.model_copy(update={"overwrite": True})
    config.require_consistent(config.world_size)
    _ = config.level  # A level file that cannot be read is refused here.
    has_run = (config.run_dir / "metrics.jsonl").exists()
    require(
        config.resumes_in_place or config.overwrite or not has_run,
        f"--run-dir {config.run_dir}: the folder has a run. Resume it with --resume "
        f"{config.run_dir}, or replace it with --overwrite.",
    )
    return config


def _resume(path: Path, flags: Mapping[str, Any]) -> Config:
    """Return the flags of a saved run, with the flags of the command line in their place."""
    run_dir, checkpoint = find_checkpoint(path, "--resume ")
    merged = read_config(run_dir).model_dump()
    saved_optimizer = merged["optimizer"]
    merged |= {"overwrite": False, "auto_resume": False, "run_dir": run_dir}
    merged |= {**flags, "resume": checkpoint}
    config = Config(**merged)
    require(
        config.optimizer == saved_optimizer,
        f"--optimizer {config.optimizer}: the run in {run_dir} can be resumed only with "
        f"--optimizer {saved_optimizer}, which it was saved with.",
    )
    return config


def _refuse_gpt_flags(config: Config, flags: Mapping[str, Any]) -> None:
    unread = [f"{flag(name)} {flags[name]}" for name in _GPT_FLAGS if name in flags]
    listed = " ".join(unread)
    require(
        not unread,
        f"{listed}: only the built-in gpt reads this, and --model is {config.model}. Leave it "
        "out, or give arguments of your model by --model-args name=value.",
    )
