"""What a run says of itself: what it is about to train, and what differs from the run before."""

from __future__ import annotations

from typing import Any

import torch

from launch import strategies
from launch.command_line import differences
from launch.config import Config
from launch.data import Data
from launch.device import slowdown
from launch.folder import Origin
from launch.levels import described, eps_for
from launch.models import MODELS
from launch.ranks import Ranks

__all__ = ["changes", "facts", "settings", "warnings"]

# The settings that decide which numbers a run comes to.
_NUMBERS = (
    *("steps", "batch", "accumulate", "lr", "warmup", "final_lr"),
    *("weight_decay", "clip", "seed", "growth_interval", "schedule", "comm_hook", "eps"),
    *("keep_batchnorm_fp32", "master_weights", "loss_scale"),
)


def settings(config: Config, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Return what a checkpoint says of the run that wrote it."""
    found = {"precision": config.level_name}
    found |= {name: getattr(config, name) for name in _NUMBERS}
    where = {"ranks": ranks.world_size, "strategy": strategies.chosen(config, ranks)[0]}
    return {**found, **where, "device": device.type}


def facts(
    config: Config, parameters: int, data: Data, ranks: Ranks, device: torch.device
) -> dict[str, str]:
    """Say in a few rows what is about to be trained."""
    how = strategies.chosen(config, ranks)[1].says
    many = how if ranks.world_size == 1 else f"{ranks.world_size} ranks, {how}"
    train, held_out = data.sizes()
    examples = "sequences" if data.kind == "text" else "images"
    return {
        "Model": f"{config.model}, {parameters / 1e6:.2f} M parameters",
        data.kind.capitalize(): f"{data.name}, {train} and {held_out} held out",
        "Device": f"{device.type}, {many}",
        "Precision": described(config),
        "Steps": f"{config.steps} of {config.batch} {examples}",
    }


def changes(origin: Origin, config: Config, ranks: Ranks, device: torch.device) -> str:
    """Say where a resumed run goes on, and which settings differ from what it was started with."""
    ours, theirs = settings(config, ranks, device), origin.manifest["settings"]
    where = ("ranks", "strategy", "device")
    if origin.flags is not None:
        differ = differences(origin.flags, config)
        differ += _differ({n: theirs.get(n) for n in where}, {n: ours[n] for n in where})
    else:  # what an older checkpoint does not name was as it is by default: None
        differ = _differ({name: theirs.get(name) for name in ours}, ours)
    going_on = f"Going on from {origin.run} at step {origin.step}"
    return f"{going_on}, with other settings: {', '.join(differ)}" if differ else going_on


def _differ(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [f"{name} {before[name]} -> {now[name]}" for name in now if now[name] != before[name]]


def warnings(config: Config, device: torch.device) -> list[str]:
    """Return what is to be known of a run before it starts."""
    found = []
    if (slower := slowdown(device, config.level.compute)) > 3:
        found.append(
            f"This {device.type} multiplies matrices {slower:.0f} times slower in"
            f" {config.level_name} than in fp32\n"
        )
    selective = config.checkpoint_activations == "selective"
    if config.compile and selective and config.model not in MODELS:
        found.append(
            "--compile with --checkpoint-activations selective: a block must change no tensor in"
            " place (torch.relu_), which would be done twice\n"
        )
    if config.eps is None and (eps := eps_for(config)) != 1e-8:
        found.append(f"AdamW has eps={eps:g}: its state is fp16 at {config.level_flag}\n")
    return found
