"""A model and its precision, as the flags ask for them: to be trained, or of a finished run."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distamp import cast_model, initialize
from distamp.initialize import Amp
from distamp.scaler import DynamicSchedule
from launch.checkpoint import load_weights
from launch.config import Config, read_config
from launch.data import Data
from launch.folder import checkpoint_of
from launch.model import build, draw, is_empty
from launch.parallel import Layout, parallelize, pick_device, prepare_blocks
from launch.usage import UsageError


def make_model(config: Config, data: Data, layout: Layout, device: torch.device) -> nn.Module:
    """Build the model, cast and sharded, and draw its weights; no rank ever has all of them."""
    built = build(config, data)
    model = copy.deepcopy(built) if is_empty(built) else built.to(device)
    if layout.shard * layout.tp == 1 or not config.level.master_weights:
        cast_model(model, config.level)
    prepare_blocks(model, config)
    parallelize(model, config, layout, device)
    if is_empty(built):
        draw(model, built, config.seed, device)
    return model


def make_amp(model: nn.Module, optimizers: list[Optimizer], config: Config, layout: Layout) -> Amp:
    """Set up mixed precision by distamp's one call.

    Raises:
        UsageError: distamp refuses it; with its reason.
    """
    how: dict[str, Any] = {}
    if config.level.loss_scale == "dynamic":
        schedule = DynamicSchedule(growth_interval=config.growth_interval)
        how = {"init_scale": config.init_scale, "schedule": schedule}
    if config.hook:
        how |= {"comm_hook": config.hook, "replicas": layout.replicas}
    try:
        return initialize(model, optimizers, config.level, **how)
    except (ValueError, RuntimeError) as error:
        hook = f" --hook {config.hook}" if config.hook else ""
        raise UsageError(f"--precision {config.precision}{hook}: {error}") from None


@dataclass(frozen=True)
class Trained:
    """The model of a finished run, on one process, and what it was trained on."""

    config: Config
    data: Data
    model: nn.Module
    amp: Amp
    device: torch.device


def load_run(path: Path, load: Callable[[Config], Data]) -> Trained:
    """Read a run's flags and its newest checkpoint, with the weights' average if it has one.

    Args:
        path: The folder of a run, or one checkpoint.
        load: From the run's flags to the data.

    Raises:
        UsageError: There is no such run, or it is damaged.
    """
    run, checkpoint = checkpoint_of(path)
    config = replace(
        read_config(run),
        replicate=0,
        shard=1,
        tp=1,
        hook=None,
        accumulate=1,
        compile=False,
        checkpoint_blocks="none",
    )
    data, device = load(config), pick_device(config)
    model = make_model(config, data, Layout(), device)
    amp = make_amp(model, [], config, Layout())
    load_weights(checkpoint, amp)
    return Trained(config, data, model, amp, device)
