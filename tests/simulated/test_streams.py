"""Tensors that one stream or device makes and another uses: what the scaler and hooks keep."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from distamp import DistGradScaler
from distamp.comm_hooks import register

SCHEDULES = [("late", 0), ("late_others", 0), ("random", 31)]


# -- hooks ----------------------------------------------------------------------------------------


class _Spread(nn.Module):
    """A layer on one device and one on another."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(23, 50).to(first), nn.Linear(50, 6).to(second)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)).to(self.b.weight.device))


def _hooked_over_two_devices(wire: str) -> Any:
    """DDP over a module on two devices of each rank, a hook, and a scaler joined with it."""
    rank = dist.get_rank()
    first, second = torch.device("sim", 2 * rank), torch.device("sim", 2 * rank + 1)
    torch.accelerator.set_device_index(first.index)
    model = DistributedDataParallel(_Spread(first, second), bucket_cap_mb=0.002)
    scaler = DistGradScaler("sim", init_scale=2.0**8, growth_interval=2)
    scaler.attach(register(model, wire))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    taken = []
    for step in range(6):
        x = torch.randn(4, 23, generator=generator).to(first)
        loss = model(x).square().mean() * (float("inf") if step == 2 and rank else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        taken.append(scaler.stepped(optimizer))
        scaler.update()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()], taken, scaler.get_scale()


@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_a_joined_hook_over_devices_of_one_process(sim2, wire):
    expected = sim2.run(_hooked_over_two_devices, wire, schedule="eager")
    assert expected[0][1:] == ([True, True, False, True, True, True], 512.0)
    torch.testing.assert_close(expected[0], expected[1], rtol=0, atol=0)
    for schedule, seed in SCHEDULES:
        found = sim2.run(_hooked_over_two_devices, wire, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


# -- the scaler between streams -------------------------------------------------------------------


def _two_streams(device: str, settings: dict[str, bool]) -> Any:
    """Backward on one stream and the step on another, while the first asks for memory anew."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    optimizers = [
        torch.optim.AdamW(net[0].parameters(), lr=0.05, **settings),
        torch.optim.SGD(net[2].parameters(), lr=0.05, momentum=0.9, **settings),
    ]
    scaler = DistGradScaler(device, init_scale=64.0, growth_interval=2)
    on_device = device != "cpu"
    main = torch.accelerator.current_stream() if on_device else None
    side = torch.Stream(device) if on_device else None
    for step in range(6):
        x = torch.full((2, 8), 1.0 + step).to(device)
        loss = net(x).square().mean() * (float("inf") if step == 3 else 1.0)
        scaler.scale(loss).backward()
        if side is not None:
            side.wait_stream(main)
        with side or contextlib.nullcontext():
            scaler.clip_grad_norm_(optimizers[1], 0.3)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        _ask_for_memory(device)
        if side is not None:
            main.wait_stream(side)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        _ask_for_memory(device)
    return [p.detach().cpu() for p in net.parameters()], scaler.get_scale()


def _ask_for_memory(device: str) -> None:
    for size in (1,) * 8 + (32, 64, 128, 256):
        torch.full((size,), 777.0, device=device)


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_backward_on_one_stream_and_the_step_on_another(sim, settings):
    expected = sim.one(_two_streams, "cpu", settings)
    for schedule, seed in SCHEDULES:
        found = sim.one(_two_streams, "sim", settings, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


class _Tape(TorchDispatchMode):
    """Remembers ops and their very tensors, and runs them again: as a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        detached = tree_map_only(Tensor, Tensor.detach, (args, result))
        self._calls.append((func, detached[0], kwargs or {}, detached[1]))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _replayed(device: str, replay: bool, change: str) -> Any:
    """Forward, scaling and backward recorded once and replayed; the step is not part of it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, fused=True)
    scaler = DistGradScaler(device, init_scale=64.0, growth_interval=2)
    x, factor = torch.ones(2, 4, device=device), torch.ones((), device=device)

    def backward() -> None:
        scaler.scale(net(x).square().mean() * factor).backward()

    backward()
    optimizer.zero_grad(set_to_none=False)
    tape = _Tape()
    if replay:
        with tape:
            backward()
        optimizer.zero_grad(set_to_none=False)
    scales = []
    for step in range(7):
        x.fill_(1.0 + step)
        factor.fill_(float("inf") if step == 3 else 1.0)
        tape.replay() if replay else backward()
        scaler.step(optimizer)
        scaler.update(16.0 if change == "update" and step == 4 else None)
        if change == "load_state_dict" and step == 4:
            scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0})
        optimizer.zero_grad(set_to_none=False)
        scales.append(scaler.get_scale())
    return [p.detach().cpu() for p in net.parameters()], scales


@pytest.mark.parametrize("change", ["", "update", "load_state_dict"])
def test_a_recorded_backward_pass_is_scaled_by_the_scale_of_its_replay(sim, change):
    expected = sim.one(_replayed, "cpu", False, change)
    assert len(set(expected[1])) > 1
    for schedule, seed in SCHEDULES:
        found = sim.one(_replayed, "sim", True, change, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
