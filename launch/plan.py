"""What a run comes to before anything is built: its device, data, model size and memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from launch import strategies
from launch.blocks import check_blocks
from launch.config import Config
from launch.data import Data, load_data
from launch.device import check_backend, check_precision, pick_device
from launch.errors import UsageError
from launch.folder import Origin
from launch.levels import trial
from launch.memory import ModelSize, Needs, check_memory, needs, return_freed_memory
from launch.models import Recipe, count_parameters, recipe_for, sketch_model
from launch.parallel import units
from launch.ranks import Ranks
from launch.reporting import check_trackers
from launch.sketch import Sketch
from launch.strategy_checks import check_strategy

__all__ = ["Plan", "check_same_run", "plan"]


@dataclass(frozen=True)
class Plan:
    """What will be trained, checked on this rank.

    Attributes:
        sketch: Where the model can be built without its memory.
        needed: Bytes that this rank will need.
    """

    config: Config
    device: torch.device
    recipe: Recipe
    data: Data
    sketch: Sketch | None
    size: ModelSize
    needed: Needs


def plan(given: Config | UsageError, ranks: Ranks) -> Plan:
    """Return what the command line asks for; every rank calls this.

    Raises:
        UsageError: On every rank, if any rank finds that it cannot be done.
    """
    with ranks.together():
        if isinstance(given, UsageError):
            raise given
        made = _plan(given, ranks)
    with ranks.together():
        if len(set(ranks.gather(made.data.digest))) > 1:
            raise UsageError(f"--data: the ranks do not read the same from {made.data.name}")
    return made


def _plan(config: Config, ranks: Ranks) -> Plan:
    device = pick_device(config.device, ranks)
    check_backend(config.backend)
    if ranks.is_main:
        check_trackers(config)
    check_strategy(config, ranks, device)
    how, strategy = strategies.chosen(config, ranks)
    check_blocks(config, how)
    check_precision(device, config)
    trial(config, device)
    recipe = recipe_for(config)
    data = load_data(config, recipe.kind)
    data.check(config)
    sketched = recipe.meta or strategy.from_meta
    sketch = sketch_model(recipe, data, config.seed) if sketched else None
    size = _size(sketch, recipe, data)
    shares = strategies.shares(config, ranks, sketched=sketch is not None)
    needed = needs(size, config.level, shares, _gathered_in(config))
    check_memory(size, config, device, ranks, needed, how)
    return_freed_memory(needed, device)
    return Plan(config, device, recipe, data, sketch, size, needed)


def _size(sketch: Sketch | None, recipe: Recipe, data: Data) -> ModelSize:
    """Return how large the model will be; of one that cannot be sketched, as much as is known."""
    if sketch is None:
        return ModelSize(count_parameters(recipe, data))
    blocks = [sum(p.numel() for p in block.parameters()) for _, _, block in units(sketch.model)]
    largest = max((p.numel() for p in sketch.model.parameters()), default=0)
    outside = sketch.parameters - sum(blocks)
    return ModelSize(sketch.parameters, max(blocks, default=0), outside, largest)


def _gathered_in(config: Config) -> torch.dtype:
    level = config.level
    return level.compute if level.autocasts and not config.gather_fp32 else level.param


def check_same_run(origin: Origin, planned: Plan) -> None:
    """Refuse a checkpoint of another model or other data, or one with nothing left to do.

    Raises:
        UsageError: Naming what differs.
    """
    config, recipe, data = planned.config, planned.recipe, planned.data
    where, saved = f"--resume {origin.run}", origin.manifest
    for name in {**recipe.shape, **saved["model"]}:
        ours, theirs = recipe.shape.get(name), saved["model"].get(name)
        if ours != theirs:
            raise UsageError(
                f"{where}: it belongs to another model, with {name} {theirs} where this run has"
                f" {ours}; pass --{name.replace('_', '-')} {theirs}"
            )
    if saved["data"]["digest"] != data.digest:
        raise UsageError(
            f"{where}: it was trained on other data ({saved['data']['name']}) than"
            f" {data.name} holds now; pass the same --data"
        )
    done = saved["progress"]["step"]
    if done >= config.steps and origin.asked:
        raise UsageError(f"{where}: all its {done} steps are done; pass a --steps above {done}")
