"""fp32 masters on simulated devices: as on the CPU, in DataParallel, moved between devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp import DistGradScaler
from distamp.scaler import MasterParameters
from tests.scaler.masters import half_mlp
from tests.scaler.steps import INF
from tests.scaler.test_masters import trained_under

CLIPS = (None, 0.01)
SCHEDULES = [("late", 0), ("random", 17)]
CASES = [
    (n, "AdamW fused" if n == "DDP" else "Adam foreach", clip)
    for n in ("alone", "DDP")
    for clip in CLIPS
]


@pytest.mark.parametrize(("layout", "kind", "clip"), CASES)
def test_masters_train_as_on_the_cpu(sim, sim2, ranks1, ranks2, layout, kind, clip):
    there, here = (sim, ranks1) if layout == "alone" else (sim2, ranks2)
    group = "none" if layout == "alone" else "default"
    expected = here.run(trained_under, layout, kind, clip, group=group)
    for schedule, seed in SCHEDULES:
        found = there.run(
            trained_under, layout, kind, clip, group=group, schedule=schedule, seed=seed
        )
        for mine, theirs in zip(found, expected, strict=True):
            assert mine["steps"] == theirs["steps"] == [True, False, True, True]
            assert mine["scale"] == theirs["scale"]
            # Norms are added up in another order, which clipping carries into the last bits.
            tolerance = {"rtol": 0, "atol": 0} if clip is None else {"rtol": 1e-3, "atol": 1e-6}
            torch.testing.assert_close(mine["values"], theirs["values"], **tolerance)


def _goes_on(devices: tuple[str, str]) -> list[list[Tensor]]:
    """Three steps on one device, a checkpoint, and three more on each of two."""

    def start(device: str) -> Any:
        model = half_mlp().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        masters = MasterParameters(optimizer)
        scaler = DistGradScaler(
            torch.device(device).type, init_scale=256.0, growth_interval=2, fp16_grads="master"
        )
        return model, optimizer, masters, scaler

    def train(model: Any, optimizer: Any, masters: Any, scaler: Any, steps: range) -> None:
        device = next(model.parameters()).device
        for step in steps:
            optimizer.zero_grad()
            x = torch.full((2, 8), 1.0 + step, dtype=torch.float16).to(device)
            loss = model(x).float().square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    first = start(devices[0])
    train(*first, range(3))
    states = [each.state_dict() for each in first]
    second = start(devices[1])
    for each, state in zip(second, states, strict=True):
        each.load_state_dict(state)
    for each in (first, second):
        train(*each, range(3, 6))
    return [
        [t.detach().float().cpu() for t in (*each[0].parameters(), *each[2].parameters())]
        for each in (first, second)
    ]


@pytest.mark.parametrize("devices", [("sim:0", "sim:2"), ("sim:1", "cpu"), ("cpu", "sim:3")])
def test_masters_go_on_from_a_checkpoint_of_another_device(sim, devices):
    first, second = sim.one(_goes_on, devices)
    assert all(map(torch.equal, first, second))


def _on_a_side_stream(zero: str) -> list[Tensor]:
    """Masters made on the default stream and stepped on the user's own, gradients zeroed there."""
    model = half_mlp().to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    MasterParameters(optimizer)
    scaler = DistGradScaler("sim", init_scale=256.0, fp16_grads="master")
    side = torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for step in range(4):
            _zero(zero, model, optimizer)
            x = torch.full((2, 8), 1.0 + step, dtype=torch.float16, device="sim")
            scaler.scale(model(x).float().square().mean()).backward()
            scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
    torch.accelerator.current_stream().wait_stream(side)
    return [p.detach().float().cpu() for p in model.parameters()]


def _zero(how: str, model: nn.Module, optimizer: Any) -> None:
    if how == "model":
        model.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=how == "none")


@pytest.mark.parametrize("zero", ["none", "in place", "model"])
def test_masters_step_on_a_stream_of_the_user_s_own(sim, zero):
    expected = sim.one(_on_a_side_stream, zero, schedule="eager")
    for schedule, seed in [("late", 0), ("late_others", 0), ("random", 23)]:
        found = sim.one(_on_a_side_stream, zero, schedule=schedule, seed=seed)
        assert all(map(torch.equal, found, expected))


def _in_data_parallel(zero: str, several: bool) -> list[Tensor]:
    """A float16 model whose replicas lie on two devices, or which lies on one."""
    net = half_mlp().to("sim:0")
    model = nn.DataParallel(net, [0, 1]) if several else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    MasterParameters(optimizer)
    scaler = DistGradScaler("sim", init_scale=256.0, growth_interval=2, fp16_grads="master")
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        _zero(zero, model, optimizer)
        x = torch.randn(8, 8, generator=generator).half().to("sim:0")
        loss = model(x).float().square().mean() * (INF if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().float().cpu() for p in net.parameters()]


@pytest.mark.parametrize("zero", ["none", "in place", "model"])
def test_masters_of_a_model_in_data_parallel(sim, zero):
    expected = sim.one(_in_data_parallel, zero, False)
    for schedule, seed in SCHEDULES:
        found = sim.one(_in_data_parallel, zero, True, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
