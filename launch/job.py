"""A model, its precision and its ranks, as the flags ask for them: to be trained, or to be used."""

from dataclasses import dataclass, field

import torch
from torch import nn

from distamp import cast_model, initialize
from distamp.levels import Amp
from distamp.scaler import DynamicLossScale
from launch.config import Config
from launch.data import Data
from launch.model import build, draw
from launch.optim import WeightAverage, make_optimizers
from launch.parallel import Layout, parallelize, prepare_blocks, wrap
from launch.program import convert_to_usage_error


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: Steps done, skipped ones included.
        position: Examples read, over all ranks: the whole state of the data.
        skipped: Steps that were skipped.
    """

    step: int = 0
    position: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Job:
    """What every part of a run works with.

    Attributes:
        config: Its flags.
        data: Its examples.
        device: Where this rank computes.
        layout: The ranks.
        model: As it is called: in DDP, or sharded.
        amp: The model, its optimizers, and what distamp keeps of them.
        average: Of the weights.
        progress: How far it is.
    """

    config: Config
    data: Data
    device: torch.device
    layout: Layout
    model: nn.Module
    amp: Amp
    average: WeightAverage
    progress: Progress = field(default_factory=Progress)

    @property
    def microbatch_size(self) -> int:
        """Examples that this rank reads at once."""
        return self.config.global_batch_size // (
            self.layout.data_world_size * self.config.accumulate
        )


def cast(model: nn.Module, config: Config) -> nn.Module:
    """Cast a model as the level says.

    Raises:
        UsageError: A pattern of the level's file matches no module.
    """
    with convert_to_usage_error(f"--precision {config.precision}", ValueError):
        return cast_model(model, config.level)


def make_model(config: Config, data: Data, layout: Layout, device: torch.device) -> nn.Module:
    """Build the model, cast and sharded, with its weights.

    Of one that is built on the meta device, no rank ever has all of them.
    """
    model = build(config, data)
    is_empty = any(p.is_meta for p in model.parameters())
    if not is_empty:
        model.to(device)
    if not layout.is_sharded or not config.level.master_weights:
        cast(model, config)
    prepare_blocks(model, config)
    parallelize(model, config, layout, device)
    if is_empty:
        draw(model, config.seed, device)
    return model


def start(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], config: Config, layout: Layout
) -> Amp:
    """Initialize distamp for a model that is cast and wrapped.

    Raises:
        UsageError: distamp refuses it; with the reason.
    """
    level, hook = config.level, None if config.comm_hook == "none" else config.comm_hook
    is_dynamic = level.loss_scale == "dynamic"
    two_levels = hook and layout.mesh is not None and layout.replicate > 1 and layout.shard > 1
    flags = f"--precision {config.precision} --comm-hook {config.comm_hook}"
    with convert_to_usage_error(flags, ValueError, RuntimeError):
        return initialize(
            model,
            optimizers,
            level,
            init_scale=config.init_scale if is_dynamic else None,
            loss_scale=DynamicLossScale(growth_interval=config.growth_interval)
            if is_dynamic
            else None,
            # A scale that is too large is found by skips in a row.
            max_consecutive_skips=None if level.scales else 3,
            comm_hook=hook,
            replicas=layout.mesh["replicate"].get_group() if layout.mesh and two_levels else None,
        )


def try_start(config: Config, data: Data, device: torch.device) -> list[str]:
    """Refuse on one process a model, an optimizer or a precision that the run would refuse.

    A model on the meta device gets memory but no weights. DDP, FSDP2 and hooks need the ranks of
    the run, so this function leaves out their refusals.

    Raises:
        UsageError: The run would be refused. The message has the reason.

    Returns:
        The steps of the start that were done, as phrases for the user.
    """
    model = build(config, data)
    is_sharded = config.shard not in (0, 1) or config.tp > 1
    # FSDP's fp32 shards are the masters of a run whose weights are cut over ranks.
    has_own_masters = is_sharded and bool(config.level.master_weights)
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device=device)
    cast(model, config)
    prepare_blocks(model, config)
    optimizers = make_optimizers(model, config)
    done = [f"built the model {config.model}", f"made the optimizer {config.optimizer}"]
    if not has_own_masters:
        start(model, optimizers, config.model_copy(update={"comm_hook": "none"}), Layout())
        done.append(f"called initialize at precision {config.precision}")
    return done


def make_job(
    config: Config, data: Data, layout: Layout, device: torch.device, *, trains: bool = True
) -> Job:
    """Make a job from its flags; one that does not train has no optimizer, and needs no data.

    Raises:
        UsageError: There is no such model or optimizer, or distamp refuses it; with the reason.
    """
    inner = make_model(config, data, layout, device)
    # After sharding, which makes other parameters; before masters, which the optimizers then hold.
    optimizers = make_optimizers(inner, config) if trains else []
    # After the cast, as DDP's buckets have the dtypes that it finds; before a hook, which it calls.
    model = wrap(inner, layout, data, device) if trains else inner
    amp = start(model, optimizers, config, layout)
    # After the masters, of which it is the average.
    average = WeightAverage(amp, config.ema if trains else 0.0)
    return Job(config, data, device, layout, model, amp, average)
