"""Models that are moved to another device between two steps, and optimizers that step elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distamp import DistGradScaler
from distamp.scaler import MasterParameters
from tests.ranks import RankError
from tests.scaler.masters import half_mlp

SCHEDULES = [("late", 0), ("late_others", 0), ("random", 37)]


def _steps(model: nn.Module, optimizer: Any, scaler: Any, clip: bool, steps: range) -> list[bool]:
    """Whether each step was taken; every third of them overflows."""
    first = next(model.parameters())
    taken = []
    for step in steps:
        optimizer.zero_grad()
        x = torch.full((2, first.shape[1]), 1.0 + step).to(first.device, first.dtype)
        loss = model(x).float().square().mean() * (float("inf") if step % 3 == 1 else 1.0)
        scaler.scale(loss).backward()
        if clip:
            scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        taken.append(scaler.stepped(optimizer))
        scaler.update()
    return taken


def _moved(devices: tuple[str, str], settings: dict[str, bool], clip: bool) -> Any:
    """Three steps on one device and three on another, the optimizer's state with them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(devices[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **settings)
    kind = torch.device(devices[0]).type
    scaler = DistGradScaler(kind, init_scale=64.0, growth_interval=2)
    taken = _steps(model, optimizer, scaler, clip, range(3))
    model.to(devices[1])
    optimizer.load_state_dict(optimizer.state_dict())
    taken += _steps(model, optimizer, scaler, clip, range(3, 6))
    counts = scaler.step_counts(optimizer)
    weights = [p.detach().cpu() for p in model.parameters()]
    return weights, taken, scaler.get_scale(), (counts.taken, counts.skipped)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_a_model_goes_on_on_another_device(sim, settings, clip):
    expected = sim.one(_moved, ("cpu", "cpu"), settings, clip)
    assert expected[3] == (4, 2)
    for schedule, seed in SCHEDULES:
        found = sim.one(_moved, ("sim:0", "sim:2"), settings, clip, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def _moved_with_masters() -> None:
    model = half_mlp().to("sim:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    MasterParameters(optimizer)
    scaler = DistGradScaler("sim", init_scale=64.0, fp16_grads="master")
    model.to("sim:2")
    _steps(model, optimizer, scaler, False, range(1))


def test_a_model_that_left_its_masters_behind_is_refused_with_the_fix(sim):
    fix = "gradients on sim:2 and its masters are on sim:0.*Move the model first"
    with pytest.raises(RankError, match=fix):
        sim.one(_moved_with_masters)


class _OnHost(torch.optim.Optimizer):
    """SGD whose weights and state lie on the host: gradients come there, weights go back."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        parameters = self.param_groups[0]["params"]
        pin = parameters[0].device.type != "cpu"
        for p in parameters:
            state = self.state[p]
            if not state:
                state["weight"] = p.detach().cpu().clone()
                state["gradient"] = torch.empty(p.shape, pin_memory=pin)
            state["gradient"].copy_(p.grad, non_blocking=True)
        if pin:
            torch.accelerator.current_stream().synchronize()
        for p in parameters:
            state = self.state[p]
            p.copy_(state["weight"].sub_(state["gradient"], alpha=0.1))


def _stepped_on_the_host(device: str, clip: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    optimizer = _OnHost(model.parameters())
    scaler = DistGradScaler(device, init_scale=64.0, growth_interval=2)
    taken = _steps(model, optimizer, scaler, clip, range(6))
    return [p.detach().cpu() for p in model.parameters()], taken, scaler.get_scale()


@pytest.mark.parametrize("clip", [False, True])
def test_an_optimizer_whose_state_is_on_the_host(sim, clip):
    expected = sim.one(_stepped_on_the_host, "cpu", clip)
    for schedule, seed in SCHEDULES:
        found = sim.one(_stepped_on_the_host, "sim", clip, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
