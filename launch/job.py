"""The model, optimizers and data of a run, from its flags."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from distamp import cast_model, initialize
from distamp.levels import Amp
from distamp.scaler import DynamicLossScale
from launch.config import Config
from launch.data import Data
from launch.model import build_model, init_weights
from launch.optim import WeightAverage, make_optimizers
from launch.parallel import Layout, prepare_blocks, shard_model, wrap_in_ddp
from launch.program import convert_to_usage_error


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        step: Number of steps, with skipped steps.
        position: Number of examples that all ranks have read. It is the whole state of the data.
        skipped: Number of skipped steps.
    """

    step: int = 0
    position: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Job:
    """The objects that every part of a run works with.

    Attributes:
        config: The flags.
        data: The examples.
        device: The device of this rank.
        layout: The ranks.
        model: The model to call: inside DDP, or sharded.
        amp: The model and its optimizers, as distamp initialized them.
        average: The moving average of the weights.
        progress: The progress of the run.
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
        """Number of examples that this rank reads at once."""
        return self.config.global_batch_size // (
            self.layout.data_world_size * self.config.accumulate
        )


def make_job(
    config: Config, data: Data, layout: Layout, device: torch.device, *, for_training: bool = True
) -> Job:
    """Make the model, the optimizers and distamp's state from the flags of a run.

    The order of these steps matters. Sharding replaces the parameters, so the optimizers come after
    it. `initialize` replaces the parameters of the optimizers by master weights, so it comes after
    the optimizers. DDP makes its buckets in the dtypes of the parameters, so it comes after the
    cast; and a communication hook needs DDP, so `initialize` comes after DDP.

    Args:
        config: The flags.
        data: The data. Training reads the first example.
        layout: The ranks.
        device: The device of this rank.
        for_training: False makes a model for evaluation, without optimizers and without DDP.

    Raises:
        UsageError: There is no such model or optimizer, or distamp refuses the combination.
    """
    model = make_model(config, data, layout, device)
    optimizers: list[Optimizer] = []
    decay = 0.0
    if for_training:
        optimizers = make_optimizers(model, config)
        model = wrap_in_ddp(model, layout, data, device)
        decay = config.ema
    amp = initialize_amp(model, optimizers, config, layout)
    average = WeightAverage(amp, decay)
    return Job(config, data, device, layout, model, amp, average)


def make_model(config: Config, data: Data, layout: Layout, device: torch.device) -> nn.Module:
    """Build the model with its weights, cast and sharded.

    No rank ever holds all weights of a sharded model that is built on the meta device.
    """
    model = build_model(config, data)
    is_meta = any(p.is_meta for p in model.parameters())
    if not is_meta:
        model.to(device)
    # A sharded model with master weights stays in fp32: the shards of FSDP2 are the masters.
    if not layout.is_sharded or not config.level.master_weights:
        cast_to_level(model, config)
    prepare_blocks(model, config)
    shard_model(model, config, layout, device)
    if is_meta:
        init_weights(model, config.seed, device)
    return model


def cast_to_level(model: nn.Module, config: Config) -> nn.Module:
    """Cast a model to the dtypes of ``--precision``.

    Raises:
        UsageError: A pattern of the level's file matches no module.
    """
    with convert_to_usage_error(f"--precision {config.precision}", ValueError):
        return cast_model(model, config.level)


def initialize_amp(
    model: nn.Module, optimizers: list[Optimizer], config: Config, layout: Layout
) -> Amp:
    """Call distamp's `initialize` for a model that is cast and wrapped.

    Raises:
        UsageError: distamp refuses the model, the optimizers or the flags.
    """
    init_scale = None
    loss_scale = None
    if config.level.loss_scale == "dynamic":
        init_scale = config.init_scale
        loss_scale = DynamicLossScale(growth_interval=config.growth_interval)
    # At a level with a loss scale, skipped steps in a row lower a scale that is too large.
    max_consecutive_skips = None if config.level.scales else 3
    comm_hook = None if config.comm_hook == "none" else config.comm_hook
    subject = f"--precision {config.precision} --comm-hook {config.comm_hook}"
    with convert_to_usage_error(subject, ValueError, RuntimeError):
        return initialize(
            model,
            optimizers,
            config.level,
            init_scale=init_scale,
            loss_scale=loss_scale,
            max_consecutive_skips=max_consecutive_skips,
            check_update=config.check_update or config.rewind_every > 0,
            check_replicas_every=config.check_replicas_every or None,
            on_mismatch=config.on_mismatch,
            comm_hook=comm_hook,
            replicas=_replica_group(config, layout),
        )


def _replica_group(config: Config, layout: Layout) -> ProcessGroup | None:
    """Return the ranks that hold the same shard, which the hook of an HSDP model averages over."""
    if config.comm_hook == "none" or layout.mesh is None:
        return None
    if layout.replicate == 1 or layout.shard == 1:
        return None
    return layout.mesh["replicate"].get_group()


def try_start(config: Config, data: Data, device: torch.device) -> list[str]:
    """Build and initialize the model on one process, so that a dry run finds refusals.

    A model on the meta device gets memory but no weights. DDP, FSDP2 and hooks need the ranks of
    the run, so this function leaves out their refusals.

    Raises:
        UsageError: The run would be refused. The message has the reason.

    Returns:
        The steps of the start that were done, as phrases for the user.
    """
    model = build_model(config, data)
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device=device)
    cast_to_level(model, config)
    prepare_blocks(model, config)
    optimizers = make_optimizers(model, config)
    done = [f"built the model {config.model}", f"made the optimizer {config.optimizer}"]
    # The fp32 shards of FSDP2 are the master weights of a sharded model, and one process has none.
    is_sharded = config.shard not in (0, 1) or config.tp > 1
    if not is_sharded or not config.level.master_weights:
        without_hook = config.model_copy(update={"comm_hook": "none"})
        initialize_amp(model, optimizers, without_hook, Layout())
        done.append(f"called initialize at precision {config.precision}")
    return done
