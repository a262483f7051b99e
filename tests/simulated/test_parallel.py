"""Several devices in one process: DataParallel and parallel_apply, torch's and ours, in threads."""

from __future__ import annotations

import concurrent.futures
import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distamp
from distamp.autocast import DataParallel, parallel_apply

SCHEDULES = [("late", 0), ("random", 3)]


class _Watched(nn.Linear):
    """Notes where each of its replicas ran and what came out."""

    seen: list[tuple[str, torch.dtype]]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen.append((str(x.device), y.dtype))
        return y


def _net(device: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(_Watched(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    net[0].seen = []
    return net


def _region(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else distamp.autocast("sim", dtype=dtype)


class _RegionInside(nn.DataParallel):
    """torch's own, which takes no region along: one that is captured outside is entered inside."""

    def replicate(self, module: nn.Module, device_ids: Any) -> list[nn.Module]:
        replicas = super().replicate(module, device_ids)
        for replica in replicas:
            replica.forward = distamp.propagate(replica.forward)
        return replicas


def _trained(cls: Any, devices: list[int], dtype: torch.dtype | None) -> Any:
    net = _net("sim:0")
    model = net if cls is None else cls(net, devices)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    scaler = distamp.DistGradScaler("sim", init_scale=64.0)
    generator = torch.Generator().manual_seed(1)
    scales = []
    for step in range(4):
        x = torch.randn(8, 8, generator=generator).to("sim:0")
        with _region(dtype):
            y = model(x)
        optimizer.zero_grad()
        loss = y.float().square().mean() * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [p.detach().cpu() for p in net.parameters()], scales, sorted(set(net[0].seen), key=str)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_replicas_compute_in_the_region_and_train_as_one_model(sim, count, dtype):
    devices = list(range(count))
    alone, scales, _ = sim.one(_trained, None, devices, None)  # In fp32.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is None else {"rtol": 2e-2, "atol": 2e-3}
    for schedule, seed in SCHEDULES:
        found = sim.one(_trained, DataParallel, devices, dtype, schedule=schedule, seed=seed)
        torch.testing.assert_close(found[0], alone, **tolerance)
        assert found[1] == scales == [64.0, 32.0, 32.0, 32.0]
        assert found[2] == [(f"sim:{i}", dtype or torch.float32) for i in devices]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_torch_s_own_trains_with_our_scaler(sim, count, dtype):
    alone, scales, _ = sim.one(_trained, None, [0], None)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is None else {"rtol": 2e-2, "atol": 2e-3}
    for schedule, seed in SCHEDULES:
        found = sim.one(
            _trained, _RegionInside, list(range(count)), dtype, schedule=schedule, seed=seed
        )
        torch.testing.assert_close(found[0], alone, **tolerance)
        assert found[1] == scales
        assert found[2] == [(f"sim:{i}", dtype or torch.float32) for i in range(count)]


def _applied(apply: Any, count: int, dtype: torch.dtype) -> Any:
    modules = [_net(f"sim:{i}") for i in range(count)]
    inputs = [torch.full((2, 8), 1.0, device=f"sim:{i}") for i in range(count)]
    if apply is not parallel_apply:  # torch's own takes no region along
        for module in modules:
            module.forward = distamp.autocast("sim", dtype=dtype)(module.forward)
    with _region(dtype):
        outputs = apply(modules, inputs, devices=list(range(count)))
    return [(str(y.device), y.dtype) for y in outputs], [y.float().cpu() for y in outputs]


@pytest.mark.parametrize("apply", [parallel_apply, nn.parallel.parallel_apply])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parallel_apply_computes_in_the_region_on_every_device(sim, apply, count, dtype):
    for schedule, seed in SCHEDULES:
        where, values = sim.one(_applied, apply, count, dtype, schedule=schedule, seed=seed)
        assert where == [(f"sim:{i}", dtype) for i in range(count)]
        assert all(torch.equal(values[0], each) for each in values)


def _in_threads() -> Any:
    """Four threads, each with a region, a stream, a device, a model and a scaler of its own."""

    def work(number: int) -> Any:
        device = f"sim:{number % 2}"
        torch.accelerator.set_device_index(number % 2)
        stream = torch.Stream(device)
        dtype = torch.float16 if number < 2 else torch.bfloat16
        generator = torch.Generator().manual_seed(number)
        with stream:
            model = nn.Linear(8, 4).to(device)
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
            scaler = distamp.DistGradScaler("sim", init_scale=64.0)
            for step in range(4):
                with distamp.autocast("sim", dtype=dtype):
                    y = model(torch.full((2, 8), 1.0 + step, device=device))
                seen = y.dtype
                scaler.scale(y.float().square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            return str(seen), [p.detach().cpu() for p in model.parameters()]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(work, range(4)))
    return together, [work(number) for number in range(4)]


def test_threads_with_devices_of_their_own_do_not_meddle(sim):
    for schedule, seed in [("late", 0), ("eager", 0), ("random", 9)]:
        together, one_by_one = sim.one(_in_threads, schedule=schedule, seed=seed)
        assert [kind for kind, _ in together] == [kind for kind, _ in one_by_one]
        for (_, mine), (_, alone) in zip(together, one_by_one, strict=True):
            assert all(map(torch.equal, mine, alone))
