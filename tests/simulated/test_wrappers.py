"""Two ranks on simulated devices, beside two on the CPU: wrappers, hooks, stages, levels."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp import DistGradScaler
from distamp.comm_hooks import register
from distamp.precision import LEVELS
from distamp.scaler import MasterParameters
from tests.place import device_type, here
from tests.ranks import mesh
from tests.scaler.masters import half_mlp
from tests.scaler.steps import INF
from tests.simulated.pools import SCHEDULES, SimPool, under_schedules


def _wrapped(how: str, net: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    net = net.to(here())
    if how == "DDP":
        return DistributedDataParallel(net, bucket_cap_mb=0.002)
    if how == "FSDP1":
        return FullyShardedDataParallel(net, device_id=here(), use_orig_params=True)
    return fully_shard(net, mesh=mesh((2,), ("shard",), device=device_type()))


def _full(model: nn.Module) -> list[Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [p.detach().cpu().clone() for p in model.parameters()]
    every: list[Any] = list(model.parameters())
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu() for p in every]


def _input(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((2, 8), 1.0 + dist.get_rank() + step).to(here(), dtype)


def accumulates(how: str) -> Any:
    """Two backward passes with a hook; the first is not exchanged, and overflows on one rank."""
    model = _wrapped(how)
    scaler = DistGradScaler(device_type(), init_scale=64.0)
    scaler.attach(register(model, "fp16"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    taken = []
    for step in range(4):
        for last in (False, True):
            if how == "FSDP2":
                model.set_requires_gradient_sync(last)
            bad = step == 1 and dist.get_rank() == 1 and not last
            with contextlib.nullcontext() if last or how == "FSDP2" else model.no_sync():
                loss = model(_input(step + last)).square().mean()
                scaler.scale(loss * (INF if bad else 1.0)).backward()
        scaler.step(optimizer)
        taken.append(scaler.stepped(optimizer))
        scaler.update()
        optimizer.zero_grad()
    assert (taken, scaler.get_scale()) == ([True, False, True, True], 32.0)
    return _full(model)


def uneven_inputs(wire: str) -> Any:
    """Two epochs with a hook, in the second of which rank 1 overflows once."""
    rank, model = dist.get_rank(), _wrapped("DDP")
    scaler = DistGradScaler(device_type(), init_scale=1024.0)
    scaler.attach(register(model, wire))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    for epoch in range(2):
        with Join([model, scaler]):
            for number in range((2, 5)[rank]):
                bad = (epoch, number, rank) == (1, 1, 1)
                loss = model(_input(number)).square().mean() * (INF if bad else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return _full(model), scaler.get_scale()


def masters_under_ddp() -> Any:
    model = _wrapped("DDP", half_mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    masters = MasterParameters(optimizer)
    scaler = DistGradScaler(device_type(), init_scale=64.0, fp16_grads="master")
    for step in range(4):
        optimizer.zero_grad()
        bad = step == 1 and dist.get_rank() == 1
        loss = model(_input(step, torch.float16)).float().square().mean()
        scaler.scale(loss * (INF if bad else 1.0)).backward()
        scaler.clip_grad_norm_(optimizer, 0.01)
        scaler.step(optimizer)
        assert scaler.stepped(optimizer) is (step != 1)
        scaler.update()
    return [master.detach().cpu() for _, master in masters.pairs()], scaler.get_scale()


def stages_that_add_parameters() -> Any:
    """Two stages of a pipeline, of which one scales a loss; each adds parameters between clips."""
    rank, found = dist.get_rank(), []
    parameters = [nn.Parameter(torch.ones(n + rank, device=here())) for n in (3, 5, 5)]
    optimizer = torch.optim.SGD(parameters[:1], lr=1.0)
    scaler = DistGradScaler(device_type(), init_scale=64.0, growth_interval=2)
    for step in range(9):
        if step in (3, 6):
            optimizer.add_param_group({"params": [parameters[step // 3]]})
        bad, scale = step == 4, scaler.get_scale() if step else 64.0
        if rank:
            scaler.scale(torch.ones((), device=here()))
        for parameter in parameters[: 1 + step // 3]:
            parameter.grad = torch.full_like(parameter, INF if bad and not rank else scale)
        norm = scaler.clip_grad_norm_(optimizer, 1.0, sharded=lambda _: True).item()
        assert norm == pytest.approx(INF if bad else math.sqrt(7 + 11 * (step // 3)), rel=1e-6)
        scaler.step(optimizer)
        assert scaler.stepped(optimizer) is not bad
        scaler.update()
        found.append(scaler.get_scale())
    return found, [p[0].item() for p in parameters]


def level(name: str) -> Any:
    """Six steps by `distamp.initialize`, of which one overflows: the weights, and who stepped."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(here())
    model = DistributedDataParallel(distamp.cast_model(net, name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    amp, taken = distamp.initialize(model, optimizer, name), []
    for step in range(6):
        amp.zero_grad()
        x = torch.linspace(-1, 1, 128).view(8, 16).add(step).to(here())
        with amp.autocast():
            loss = amp.model(x).float().square().mean()
        # Where no loss is scaled nothing is skipped.
        bad = dist.get_rank() and step == 2 and LEVELS[name].loss_scale != 1.0
        amp.backward(loss * (INF if bad else 1.0))
        amp.clip_grad_norm_(1.0)
        taken.append(bool(amp.step()))
    return [p.detach().float().cpu() for p in model.parameters()], taken


JOBS: dict[Callable[..., Any], list[str]] = {
    accumulates: ["DDP", "FSDP1", "FSDP2"],
    uneven_inputs: ["fp16", "int8"],
    masters_under_ddp: [""],
    stages_that_add_parameters: [""],
    level: list(LEVELS),
}
CASES = [(job, argument) for job, every in JOBS.items() for argument in every]
# The CPU has autocast lists of its own, which shows in half precision in the last place.
TOLERANCE = {level: (3e-2, 3e-3), masters_under_ddp: (1e-3, 1e-6)}


@pytest.mark.parametrize(
    ("job", "argument", "schedule", "seed"),
    under_schedules(CASES),
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_two_ranks_do_a_job_as_on_the_cpu(sim2, ranks2, job, argument, schedule, seed):
    arguments = [argument] if argument else []
    expected = ranks2.run(job, *arguments)
    found = sim2.run(job, *arguments, schedule=schedule, seed=seed)
    relative, absolute = TOLERANCE.get(job, (1e-5, 1e-6))
    torch.testing.assert_close(found, expected, rtol=relative, atol=absolute)


class _Spread(nn.Module):
    """A layer on one device and one on another."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 50).to(first), nn.Linear(50, 6).to(second)

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
    optimizer, taken = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(6):
        loss = model(_input(step)).square().mean() * (INF if step == 2 and rank else 1.0)
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


def _offloaded(level: str) -> Any:
    """One step where parameters rest on the CPU and compute on the device."""
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).to(here())
    over = mesh((2,), ("shard",), device="sim")
    model = fully_shard(net, mesh=over, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"init_scale": 64.0} if level == "O1" else {}
    amp = distamp.initialize(model, optimizer, level, **settings)
    with amp.autocast():
        out = amp.model(_input(1))
    amp.backward(out.float().square().mean())
    return out.dtype, bool(amp.clip_grad_norm_(1.0) > 0), bool(amp.step())


@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float16), ("bf16", torch.bfloat16)])
def test_a_level_runs_where_offloaded_parameters_compute(sim2, level, dtype):
    assert sim2.run(_offloaded, level) == [(dtype, True, True)] * 2


@pytest.mark.usefixtures("sim2")
def test_a_group_of_the_device_alone():
    """As after init_process_group("nccl"): no gloo, so what ranks compare goes by the device."""
    with contextlib.closing(SimPool(2, backend="sim:simccl")) as pool:
        first, second = pool.run(stages_that_add_parameters)
        assert first[0] == second[0]
        assert first[0][-1] == 512.0
