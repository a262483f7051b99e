"""torch's defaults for a whole process, which users set for models, reach no tensor of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distamp import DistGradScaler
from distamp.scaler import HysteresisSchedule, MasterParameters
from tests.ranks import RankPool
from tests.scaler.steps import INF

DEFAULTS = ["float64", "bfloat16", "float16", "meta", "inference off"]


@contextlib.contextmanager
def _default(name: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        if name == "meta":
            stack.enter_context(torch.device("meta"))
        elif name == "inference off":
            stack.enter_context(torch.inference_mode(False))
        else:
            torch.set_default_dtype(getattr(torch, name))
            stack.callback(torch.set_default_dtype, before)
        yield


SETTINGS: dict[str, dict[str, Any]] = {
    "dynamic": {"growth_interval": 1},
    "hysteresis": {"schedule": HysteresisSchedule(hysteresis=2)},
    "master": {"fp16_grads": "master"},
}


def _train(how: str, fused: bool, settings: str) -> list[Any]:
    masters = settings == "master"
    dtype = torch.float16 if masters else torch.float32
    parameter = torch.nn.Parameter(torch.ones(2, dtype=dtype, device="cpu"))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=fused)
    if masters:
        MasterParameters(optimizer)
    scaler = DistGradScaler("cpu", init_scale=1024.0, **SETTINGS[settings])
    seen: list[Any] = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for gradient in (0.25, INF if rank == 0 else 0.25, 0.25):
        optimizer.zero_grad()
        weights = torch.full((2,), gradient, dtype=torch.float32, device="cpu")
        scaler.scale((parameter.float() * weights).sum()).backward()
        if how == "unscale":
            scaler.unscale_(optimizer)
        elif how == "clip":
            seen.append(scaler.clip_grad_norm_(optimizer, 100.0).item())
        scaler.step(optimizer)
        scaler.update()
        seen += [parameter.tolist(), scaler.get_scale(), scaler.stepped(optimizer)]
        seen.append(scaler.found_inf(optimizer).dtype)
    return seen


def _under(name: str, how: str, fused: bool, settings: str) -> list[str]:
    with _default(name):
        return [str(value) for value in _train(how, fused, settings)]


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("how", ["step", "unscale", "clip"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_training_goes_as_without_them(name: str, how: str, fused: bool, settings: str) -> None:
    expected = [str(value) for value in _train(how, fused, settings)]
    assert _under(name, how, fused, settings) == expected


def _on_ranks(name: str) -> list[list[str]]:
    return [
        _under(name, how, fused, settings)
        for how in ("step", "clip")
        for fused in (False, True)
        for settings in SETTINGS
    ]


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_same_where_ranks_agree(pair: RankPool, name: str) -> None:
    expected = pair.run(_on_ranks, "inference off")
    assert pair.run(_on_ranks, name) == expected
