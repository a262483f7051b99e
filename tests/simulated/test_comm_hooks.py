"""Communication hooks on the simulated accelerator: what streams may do to them, on real ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, comm_hooks
from distamp.errors import LockstepError
from tests.ranks import mesh

SCHEDULES = [("late", 0), ("late_others", 0), ("random", 1)]
# Relative L2 error of a whole gradient, and how many values of the loss scale are tried.
BOUNDS = {"fp16": 4e-4, "bf16": 4e-3, "int8": 2e-2}


def _device() -> torch.device:
    return torch.device("sim", torch.accelerator.current_device_index())


def _net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    widths = (23, 70, 41, 6)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def _inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, 23, generator=torch.Generator().manual_seed(10 * step + rank))


def _exact(steps: int) -> list[Tensor]:
    """The mean gradients of each step, at the weights of the start, in float64 on the CPU."""
    size, found = dist.get_world_size(), []
    for step in range(steps):
        net = _net(torch.float64)
        for rank in range(size):
            (net(_inputs(step, rank).double()).square().sum() / size).backward()
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    return found


def _wrapped(wrapper: str) -> tuple[nn.Module, dict[str, Any]]:
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        MixedPrecisionPolicy,
        fully_shard,
    )

    size = dist.get_world_size()
    if wrapper == "DDP":
        return DistributedDataParallel(_net().to(_device()), bucket_cap_mb=0.005), {}
    if wrapper == "FSDP1":
        return FullyShardedDataParallel(_net().to(_device()), device_id=_device()), {}
    settings: dict[str, Any] = {}
    options: dict[str, Any] = {}
    net = _net().to(_device())
    if wrapper == "FSDP2, bf16 parameters":
        net = net.to(torch.bfloat16)
        settings["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    if wrapper in ("HSDP", "replicas"):
        whole = mesh((2, size // 2), ("replicate", "shard"), device="sim")
        settings["mesh"] = whole if wrapper == "HSDP" else whole["shard"]
        if wrapper == "replicas":
            options["replicas"] = whole["replicate"].get_group()
    else:
        settings["mesh"] = mesh((size,), ("shard",), device="sim")
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **settings)
    return fully_shard(net, **settings), options


def _gradient(wrapper: str, model: nn.Module) -> Tensor:
    if wrapper == "FSDP1":
        flat = model._flat_param
        parts = [torch.empty_like(flat.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, flat.grad)
        return torch.cat(parts)[: flat._unpadded_unsharded_size.numel()].cpu().double()
    full = (
        p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for p in model.parameters()
    )
    return torch.cat([each.cpu().double().flatten() for each in full])


def _errors(wrapper: str, wire: str, scaled: bool) -> tuple[list[float], str]:
    """The error of each step's gradients; the weights stay."""
    model, options = _wrapped(wrapper)
    hook = comm_hooks.register(model, wire, **options)
    scaler = DistGradScaler("sim", init_scale=2.0**12, enabled=scaled)
    if scaled:
        scaler.attach(hook)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for step, exact in enumerate(_exact(3)):
        sgd.zero_grad()
        given = _inputs(step, dist.get_rank()).to(_device(), next(model.parameters()).dtype)
        scaler.scale(model(given).float().square().sum()).backward()
        factor = scaler.get_scale() if scaled else 1.0
        mine = _gradient(wrapper, model) / factor
        scaler.step(sgd)
        scaler.update()
        found.append(((mine - exact).norm() / exact.norm()).item())
    return found, str(hook.stats())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_ddp_averages_under_every_schedule(sim2, wire, scaled):
    for schedule, seed in SCHEDULES:
        for errors, said in sim2.run(_errors, "DDP", wire, scaled, schedule=schedule, seed=seed):
            assert max(errors) < BOUNDS[wire] * (1.5 if wire == "int8" else 1)
            assert f"as {wire}" in said


@pytest.mark.parametrize("wrapper", ["FSDP1", "FSDP2", "FSDP2, bf16 parameters"])
def test_shards_are_reduced_under_every_schedule(sim2, wrapper):
    bound = 3e-2 if "bf16" in wrapper else BOUNDS["fp16"]
    for schedule, seed in SCHEDULES:
        for errors, _ in sim2.run(_errors, wrapper, "fp16", True, schedule=schedule, seed=seed):
            assert max(errors) < bound


@pytest.mark.parametrize(
    ("wrapper", "wire"),
    [("DDP", "fp16"), ("DDP", "int8"), ("FSDP2", "fp16"), ("HSDP", "fp16"), ("replicas", "fp16")],
)
def test_four_ranks(sim_ranks, wrapper, wire):
    for errors, _ in sim_ranks(4).run(_errors, wrapper, wire, True):
        assert max(errors) < 1.5 * BOUNDS[wire]


# -- what the headers say ---------------------------------------------------------------------


def _overflow(wrapper: str) -> tuple[list[bool], int, int | None]:
    """Which of three steps were taken, of which the second overflows on rank 1; what stats say."""
    model, options = _wrapped(wrapper)
    hook = comm_hooks.register(model, "fp16", **options)
    scaler = DistGradScaler("sim", init_scale=4.0)
    scaler.attach(hook)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    taken = []
    for step in range(3):
        sgd.zero_grad()
        bad = step == 1 and dist.get_rank() == 1
        given = _inputs(step, dist.get_rank()).to(_device())
        scaler.scale(model(given).square().sum() * (float("inf") if bad else 1.0)).backward()
        scaler.step(sgd)
        taken.append(bool(scaler.stepped(sgd)))
        scaler.update()
    stats = hook.stats()
    return taken, stats.nonfinite, stats.largest_exponent


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_an_overflow_is_told_to_scaler_and_stats(sim2, wrapper):
    for schedule in ("late", "late_others"):
        for taken, nonfinite, exponent in sim2.run(_overflow, wrapper, schedule=schedule):
            assert taken == [True, False, True]
            assert nonfinite >= 1
            assert exponent is not None
            assert -20 < exponent < 20


def _out_of_step(wrapper: str) -> str:
    """Rank 1 has counted one exchange more: what the next call raises."""
    model, options = _wrapped(wrapper)
    hook = comm_hooks.register(model, "fp16", **options)
    scaler = DistGradScaler("sim", init_scale=4.0)
    scaler.attach(hook)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    stepped = []
    try:
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                for engine in hook._engines._engines.values():
                    engine.number()
            sgd.zero_grad()
            given = _inputs(step, dist.get_rank()).to(_device())
            scaler.scale(model(given).square().sum()).backward()
            scaler.step(sgd)
            stepped.append(bool(scaler.stepped(sgd)))
            scaler.update()
    except (LockstepError, RuntimeError) as error:
        return f"step {len(stepped)}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_mismatch_raises_at_the_next_call(sim2, wrapper):
    for said in sim2.run(_out_of_step, wrapper, group="fresh"):
        assert "different" in said or "lockstep" in said
        assert said.startswith(("step 2", "step 3"))
