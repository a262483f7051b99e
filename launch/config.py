"""What a run is asked to do: models of pydantic's, of which cyclopts makes the command line."""

import math
import os
import re
import sys
import tomllib
from collections import ChainMap
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from distamp import PrecisionLevel
from distamp.errors import ConfigError
from distamp.precision_level import LEVELS
from launch.folder import began_here, checkpoint_of, checkpoints_of, run_of
from launch.program import UnknownNameError, call, command, refusing, require


def _absolute(name: str) -> str:
    """Return a path that is there, also behind ``hf:``, as any folder reads it; others as given."""
    kind = "hf:" if name.startswith("hf:") else ""
    path = Path(name.removeprefix(kind)).expanduser()
    return f"{kind}{path.absolute()}" if path.exists() else name


def _one_of(names: Collection[str], pattern: str, form: str) -> AfterValidator:
    """Allow some names, and what a pattern matches, which people know as ``form``."""

    def check(value: str) -> str:
        if value in names:
            return value
        if not re.fullmatch(pattern, value):
            raise UnknownNameError(f"it must be {', '.join([*names, form])}", names)
        return _absolute(value)

    return AfterValidator(check)


def _level_name(value: str) -> str:
    """Return the name of the level that a flag gives by any of its names, or a file's path."""
    if value.endswith(".toml"):
        return _absolute(value)
    try:
        return PrecisionLevel.from_name(value).name
    except ConfigError:
        names = [*LEVELS, "FILE.toml"]
        raise UnknownNameError(f"it must be {', '.join(names)}", LEVELS) from None


Name = Annotated[str, AfterValidator(_absolute)]
ModelName = Annotated[str, _one_of(["gpt"], r"\w.*:.+", "hf:NAME or module:function")]
LevelName = Annotated[str, AfterValidator(_level_name)]
OptimizerName = Annotated[str, _one_of(["adamw", "sgd", "muon"], ".+:.+", "or module:Class")]
Pair = Annotated[str, _one_of([], ".+=.*", "name=value")]
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
        "gpt", "gpt, hf:TYPE or hf:FOLDER (transformers), or module:function of yours"
    )
    model_args: Annotated[tuple[Pair, ...], Parameter(consume_multiple=True)] = option(
        (), "name=value ...: of the config of hf:, or of module:function"
    )
    layers: PositiveInt = option(2, "transformer blocks (gpt)", "n_layer num_layers depth")
    heads: PositiveInt = option(4, "attention heads (gpt)", "n_head num_heads")
    width: PositiveInt = option(96, "channels (gpt)", "n_embd hidden_size dim d_model")
    dropout: Decay = option(0.0, "part of the channels dropped while training (gpt)")


@_group
class _Data(BaseModel, frozen=True):
    """The data."""

    data: Name | None = option(
        None, "a text, a folder of texts, a .bin of tokens, or module:function"
    )
    tokenizer: Annotated[Path, AfterValidator(Path.absolute)] | None = option(
        None, "a tokenizer.json; without one, bytes are tokens"
    )
    token_dtype: Literal["uint16", "uint32"] = option("uint16", "of a .bin")
    block: PositiveInt = option(
        64, "tokens of context", "block_size context seq_len sequence_length max_length"
    )
    batch: PositiveInt = option(
        32, "examples in a step, over all ranks and microbatches", "batch_size bs"
    )
    accumulate: PositiveInt = option(
        1, "microbatches in a step", "gradient_accumulation_steps grad_accum accum"
    )
    workers: NonNegativeInt = option(
        0, "processes that read ahead on each rank", "num_workers dataloader_workers"
    )


@_group
class _Ranks(BaseModel, frozen=True):
    """The ranks."""

    replicate: NonNegativeInt = option(0, "copies of the model; 0: what --shard and --tp leave")
    shard: Annotated[int, Field(ge=-1)] = option(
        1, "ranks that share a copy's weights (FSDP2; with copies, HSDP); -1: all", "strategy fsdp"
    )
    tp: PositiveInt = option(1, "ranks that share each matrix", "tensor_parallel")
    hook: Literal["none", "fp16", "bf16", "int8"] = option(
        "none", "send gradients in fewer bytes", "comm_hook compression"
    )
    device: str = option("auto", "cpu, cuda, ...; auto: the accelerator, if there is one")
    # gloo counts its milliseconds in 32 bits.
    timeout: Annotated[float, Field(gt=0, le=2e6)] = option(
        600.0, "seconds that ranks wait for each other"
    )


@_group
class _Precision(BaseModel, frozen=True):
    """Precision and memory."""

    precision: LevelName = option(
        "fp32",
        "level: fp32, fp16, bf16, fp8, fp8-rowwise, fp16-O2, fp16-O3, bf16-O2 or bf16-O3; or "
        "FILE.toml of patterns",
        "opt_level amp dtype mixed_precision fp16 bf16 half",
    )
    check_precision: bool = option(True, "compare what the first step ran in with the level")
    init_scale: Finite = option(65536.0, "loss scale at the start (fp16, fp16-O2)")
    growth_interval: PositiveInt = option(2000, "clean steps until the loss scale doubles")
    compile: bool = option(False, "compile each block")
    checkpoint_blocks: Literal["none", "all", "selective"] = option(
        "none",
        "recompute activations; selective: but for the products",
        "gradient_checkpointing activation_checkpointing",
    )


@_group
class _Optimizer(BaseModel, frozen=True):
    """The optimizer."""

    optimizer: OptimizerName = option(
        "adamw", "adamw, sgd, muon (adamw on what is no matrix), or module:Class", "optim"
    )
    lr: Finite = option(4e-3, "learning rate at its peak", "learning_rate")
    schedule: Literal["cosine", "wsd", "linear", "constant"] = option(
        "cosine",
        "after warm-up; wsd falls in the last fifth",
        "scheduler lr_scheduler lr_schedule",
    )
    warmup: NonNegativeInt = option(50, "taken steps until the peak", "warmup_steps warmup_iters")
    final_lr: Annotated[float, Field(ge=0, le=1)] = option(
        0.1, "where the schedule ends, as a part of the peak", "min_lr"
    )
    weight_decay: FiniteOrNone = option(0.1, "on matrices alone", "wd")
    beta1: Decay = option(0.9, "AdamW's first; the momentum of sgd", "momentum")
    beta2: Decay = option(0.95, "AdamW's second", "betas")
    eps: FiniteOrNone = option(0.0, "AdamW's; 0: 1e-8, and 1e-3 at fp16-O3", "epsilon")
    clip: FiniteOrNone = option(
        1.0,
        "largest norm of the gradients; 0: do not clip",
        "grad_clip max_norm max_grad_norm gradient_clip clip_grad_norm",
    )
    skip_norm_above: FiniteOrNone = option(
        0.0, "skip a step whose norm lies above this, on every rank; 0: none", "spike"
    )
    on_nonfinite: Literal["skip", "report"] = option(
        "skip",
        "at inf or NaN in a gradient; report says where it was born",
        "detect_anomaly check_nan",
    )
    ema: Decay = option(0.0, "decay of an average of the weights, for sample and evaluate")


@_group
class _Run(BaseModel, frozen=True):
    """The run."""

    steps: PositiveInt = option(
        400,
        "steps of the whole run, skipped ones included",
        "epochs num_epochs max_steps max_iters iterations iters",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = option(
        0, "fixes weights, the order of the data, and dropout"
    )
    log_every: PositiveInt = option(1, "steps between two records", "log_interval logging_steps")
    eval_every: PositiveInt = option(
        50, "steps between two evaluations", "eval_interval eval_steps"
    )
    eval_examples: PositiveInt = option(256, "held-out examples of an evaluation", "eval_iters")
    save_every: PositiveInt = option(100, "steps between two checkpoints", "save_steps")
    keep: NonNegativeInt = option(2, "newest checkpoints that stay; 0: write none")
    async_save: bool = option(False, "write checkpoints while training goes on")
    run_dir: Path = option(
        Path("runs/latest"), "where results go", "output_dir out_dir out logdir save_dir"
    )
    overwrite: bool = option(False, "start again in a folder that has a run")
    resume: Path | None = option(None, "a run, or a checkpoint of it, to go on with, and its flags")
    auto_resume: bool = option(False, "go on with --run-dir if it has a checkpoint, else start")
    max_time: PositiveFloat = option(math.inf, "minutes after which to save and end")
    tensorboard: bool = option(False, "write the records for TensorBoard too", "wandb")
    peak_tflops: FiniteOrNone = option(0.0, "of a device, for MFU: A100 312, H100 989; 0: none")
    check: bool = option(False, "say whether these flags can run, and end", "dry_run")


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
        with refusing(f"--precision {self.precision}", OSError, ValueError):
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
    def goes_on(self) -> bool:
        """Whether the run in ``--run-dir`` goes on, and keeps what it has."""
        return self.resume is not None and run_of(self.resume).resolve() == self.run_dir.resolve()

    def layout(self, world: int) -> tuple[int, int, int]:
        """Return how many copies of the model there are, ranks that shard one, and tensor ranks.

        A product that is not ``world`` cannot be had.
        """
        rest = world // self.tp
        shard = rest // max(1, self.replicate) if self.shard == -1 else self.shard
        return self.replicate or rest // max(1, shard), shard, self.tp

    def smallest_world(self) -> int:
        """Return the fewest ranks that these flags could be for."""
        copies = self.replicate or (2 if self.hook != "none" and abs(self.shard) == 1 else 1)
        return copies * abs(self.shard) * self.tp

    def require_possible(self, world: int) -> None:
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
        fits = self.hook == "none" or (world > 1 and tp == 1)
        require(fits, f"--hook {self.hook}: it must be none on one rank, and with --tp")
        if self.model == "gpt":
            require(
                not self.model_args,
                f"--model-args {' '.join(self.model_args)}: gpt takes --layers, --heads, --width",
            )
            width, heads = f"--width {self.width}", f"--heads {self.heads}"
            require(self.width % self.heads == 0, f"{width}: it must be a multiple of {heads}")
            require(self.heads % tp == 0, f"{heads}: it must be a multiple of --tp {tp}")
        share = replicate * shard * self.accumulate
        require(
            self.batch % share == 0,
            f"--batch {self.batch}: it must be a multiple of --replicate x --shard x --accumulate "
            f"= {share} (say {-(-self.batch // share) * share})",
        )


def read_config(run: Path) -> Config:
    """Read the flags of a run.

    Raises:
        UsageError: There is no run in that folder.
    """
    with refusing(f"{run}: no run there, or none of this version", OSError, ValidationError):
        config = Config.model_validate_json((run / "config.json").read_text(encoding="utf-8"))
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


COMMAND = command("launch/train.py", flags)


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
    given = call(COMMAND, args, elsewhere)
    if given is None:  # --help has been printed
        sys.exit()
    config = Config(**given)
    again = config.auto_resume or began_here(config.run_dir)
    resume = config.run_dir if again and checkpoints_of(config.run_dir) else config.resume
    if resume is not None:
        run, checkpoint = checkpoint_of(resume, "--resume ")
        old = read_config(run).model_dump() | {"overwrite": False, "auto_resume": False}
        config = Config(**{**old, "run_dir": run, **given, "resume": checkpoint})
        hint = f"{run} goes on with --optimizer {old['optimizer']} alone"
        require(config.optimizer == old["optimizer"], f"--optimizer {config.optimizer}: {hint}")
    # A run that was killed before its first checkpoint starts again.
    config = config.model_copy(update={"overwrite": config.overwrite or again})
    alone = config.smallest_world() if config.check else 1
    config.require_possible(int(os.environ.get("WORLD_SIZE", alone)))
    _ = config.level  # its file is read now, so that it is refused now
    free = config.goes_on or config.overwrite or not (config.run_dir / "metrics.jsonl").exists()
    hint = f"--resume {config.run_dir} goes on with it, --overwrite starts again"
    require(free, f"--run-dir {config.run_dir}: it has a run; {hint}")
    return config
