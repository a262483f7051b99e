"""What torch's wrappers do besides a plain step: accumulate, save shards and load them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler
from distamp.comm_hooks import register
from tests.place import device_type, here
from tests.ranks import mesh

SCHEDULES = [("late", 0), ("late_others", 0), ("random", 29)]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


def _wrapped(how: str) -> nn.Module:
    net = _net().to(here())
    if how == "DDP":
        return DistributedDataParallel(net)
    if how == "FSDP1":
        return FullyShardedDataParallel(net, device_id=here(), use_orig_params=True)
    return fully_shard(net, mesh=mesh((2,), ("shard",), device=device_type()))


def _full(model: nn.Module) -> list[Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [p.detach().cpu().clone() for p in model.parameters()]
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu()
        for p in model.parameters()
    ]


def _backward(how: str, model: Any, scaler: Any, step: int, bad: bool) -> None:
    """Two backward passes, of which the first is not exchanged."""
    for micro in range(2):
        last = micro == 1
        if how == "FSDP2":
            model.set_requires_gradient_sync(last)
        x = torch.full((2, 8), 1.0 + dist.get_rank() + micro + step).to(here())
        # The overflow lies in what only one rank has seen when it accumulates.
        factor = float("inf") if bad and not last else 1.0
        if last or how == "FSDP2":
            scaler.scale(model(x).square().mean() * factor).backward()
        else:
            with model.no_sync():
                scaler.scale(model(x).square().mean() * factor).backward()


def _accumulated(how: str, hook: bool) -> Any:
    model = _wrapped(how)
    scaler = DistGradScaler(device_type(), init_scale=64.0)
    if hook:
        scaler.attach(register(model, "fp16"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    taken = []
    for step in range(4):
        _backward(how, model, scaler, step, bad=step == 1 and dist.get_rank() == 1)
        scaler.step(optimizer)
        taken.append(scaler.stepped(optimizer))
        scaler.update()
        optimizer.zero_grad()
    return _full(model), taken, scaler.get_scale()


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("how", ["DDP", "FSDP1", "FSDP2"])
def test_gradients_add_up_as_on_the_cpu(sim2, ranks2, how, hook):
    expected = ranks2.run(_accumulated, how, hook)
    assert expected[0][1:] == ([True, False, True, True], 32.0)
    for schedule, seed in SCHEDULES:
        found = sim2.run(_accumulated, how, hook, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _saved(folder: str) -> None:
    parts = _parts()
    _train(*parts, range(3))
    model, optimizer, scaler = parts
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save(scaler.state_dict(), f"{folder}/scaler.pt")
    dist.barrier()


def _loaded(folder: str) -> Any:
    model, optimizer, scaler = _parts()
    names = ("model", "optimizer")
    states = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    scaler.load_state_dict(torch.load(f"{folder}/scaler.pt"))
    _train(model, optimizer, scaler, range(3, 6))
    return _full(model), scaler.get_scale()


def _straight() -> Any:
    parts = _parts()
    _train(*parts, range(6))
    return _full(parts[0]), parts[2].get_scale()


def _parts() -> Any:
    model = _wrapped("FSDP2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return model, optimizer, DistGradScaler(device_type(), init_scale=64.0, growth_interval=2)


def _train(model: Any, optimizer: Any, scaler: Any, steps: range) -> None:
    for step in steps:
        x = torch.full((2, 8), 1.0 + dist.get_rank() + step).to(here())
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("saved_on", ["sim", "cpu"])
def test_shards_go_on_on_another_device(sim2, ranks2, tmp_path, saved_on):
    before, after = (sim2, ranks2) if saved_on == "sim" else (ranks2, sim2)
    before.run(_saved, str(tmp_path / "checkpoint"))
    expected = ranks2.run(_straight)
    found = after.run(_loaded, str(tmp_path / "checkpoint"))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
