"""At which level of precision a run trains: from flags to distamp's one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distamp import initialize
from distamp.initialize import Amp
from distamp.precision import Precision
from distamp.scaler import DynamicSchedule
from launch.config import Config
from launch.errors import UsageError
from launch.parallel import ParallelizedModel

__all__ = ["amp_for", "described", "eps_for", "stepped_in", "trial"]

_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def amp_for(parallel: ParallelizedModel, config: Config) -> Amp:
    """Set up a parallelized model for the level that the flags ask for.

    Raises:
        UsageError: distamp refuses it; with distamp's reason.
    """
    level = config.level
    try:
        return initialize(
            parallel.model,
            parallel.optimizer,
            level,
            comm_hook=config.comm_hook,
            replicas=parallel.replicas,
            **_scale(config),
        )
    except (ValueError, RuntimeError) as error:
        hook = "" if config.comm_hook is None else f" --comm-hook {config.comm_hook}"
        raise UsageError(f"{config.level_flag}{hook}: {error}") from None


def trial(config: Config, device: torch.device) -> Amp:
    """Set up a model of one weight in the place of the run's, to see what distamp refuses.

    Raises:
        UsageError: With distamp's reason.
    """
    level = config.level
    weight = nn.Linear(1, 1, bias=False, device=device)
    optimizer = torch.optim.AdamW(weight.parameters(), eps=eps_for(config))
    try:
        amp = initialize(weight, optimizer, level, **_scale(config))
    except ValueError as error:
        raise UsageError(f"{config.level_flag}: {error}") from None
    wire = config.wire
    if wire is not None and wire.payload.itemsize >= level.reduce.itemsize:
        raise UsageError(
            f"--comm-hook {config.comm_hook}: gradients at {config.level_flag} are"
            f" {_SHORT[level.reduce]} already, and this takes no fewer bytes; leave it out, or take"
            " a level whose gradients are fp32"
        )
    return amp


def _scale(config: Config) -> dict[str, Any]:
    """Return the settings of a loss scale that moves.

    Raises:
        UsageError: They are given for one that does not.
    """
    constant = config.level.loss_scale
    if constant != "dynamic":
        for name in ("init_scale", "growth_interval"):
            if getattr(config, name) != getattr(Config, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} {getattr(config, name)}: the loss scale at"
                    f" {config.level_flag} is the constant {constant:g}; pass --loss-scale dynamic"
                    " too, or leave it out"
                )
        return {}
    try:
        schedule = DynamicSchedule(growth_interval=config.growth_interval)
    except ValueError as error:
        raise UsageError(f"the loss scale's settings: {error}") from None
    return {"init_scale": config.init_scale, "schedule": schedule}


def eps_for(config: Config) -> float:
    """Return AdamW's ``eps``: torch's own, unless its state is in a dtype that has no such."""
    if config.eps is not None:
        return config.eps
    # Above 2.4e-4, the root of fp16's smallest second moment: what is below becomes 0 there.
    return 1e-3 if torch.tensor(1e-8, dtype=stepped_in(config.level)) == 0 else 1e-8


def stepped_in(level: Precision) -> torch.dtype:
    """Return the dtype of what the optimizer steps, of its gradients and of its moments."""
    return torch.float32 if level.master_weights else level.param


def described(config: Config) -> str:
    """Say in a few words what is computed and stepped in which precision."""
    level = config.level
    parts = [config.level_flag.split()[-1]]
    if level.casts_model:
        parts.append(f"{_SHORT[level.param]} parameters")
        parts.append("fp32 masters" if level.master_weights else "no fp32 masters")
    if level.scales:
        scale = "" if level.loss_scale == "dynamic" else f" at {level.loss_scale:g}"
        parts.append(f"the loss scaled{scale} by DistGradScaler")
    return ", ".join(parts)
