"""The scalers whose states are kept, and how one trains on from a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from distamp import DistGradScaler
from distamp.scaler import HysteresisSchedule, StaticSchedule

__all__ = ["AFTER", "BEFORE", "SAMPLES", "train"]

INF = float("inf")
# Gradients before a state was taken, and those that show how it went on.
BEFORE = (0.25, 3.0, INF, 0.25, 0.25, 0.5, INF, 0.25)
AFTER = (0.25, 0.25, INF, INF, 0.25, 0.25, 0.25, 0.25)


def _torch(**settings: Any) -> Callable[[], Any]:
    return lambda: torch.amp.GradScaler("cpu", **settings)


def _ours(**settings: Any) -> Callable[[], Any]:
    return lambda: DistGradScaler("cpu", **settings)


SAMPLES: dict[str, Callable[[], Any]] = {
    "torch": _torch(init_scale=1024.0, growth_interval=3),
    "torch fresh": _torch(),
    "torch disabled": _torch(enabled=False),
    "default": _ours(),
    "dynamic": _ours(init_scale=1024.0, growth_interval=3),
    "bounded": _ours(init_scale=1024.0, growth_interval=3, min_scale=256.0, max_scale=2048.0),
    "hysteresis": _ours(
        init_scale=1024.0, schedule=HysteresisSchedule(growth_interval=3, hysteresis=3)
    ),
    "hysteresis, consecutive": _ours(
        init_scale=1024.0,
        schedule=HysteresisSchedule(growth_interval=3, hysteresis=2, consecutive=True),
    ),
    "static": _ours(init_scale=128.0, schedule=StaticSchedule()),
    "disabled": _ours(enabled=False),
}


def train(scaler: Any, gradients: Sequence[float]) -> list[list[float]]:
    """Parameter and scale after a step with each of these gradients."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    trace = []
    for gradient in gradients:
        optimizer.zero_grad()
        if scaler.is_enabled() or gradient != INF:
            scaler.scale((parameter * gradient).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        trace.append([parameter.item(), scaler.get_scale()])
    return trace
