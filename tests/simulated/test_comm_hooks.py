"""Communication hooks on the simulated accelerator: what streams may do to them, on real ranks."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, comm_hooks
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


def _errors(
    wrapper: str, wire: str, scaled: bool, ranks_per_host: int | None = None
) -> tuple[list[float], str]:
    """The error of each step's gradients; the weights stay."""
    model, options = _wrapped(wrapper)
    options["ranks_per_host"] = ranks_per_host
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
    ("wrapper", "wire"), [("DDP", "fp16"), ("DDP", "int8"), ("FSDP2", "fp16"), ("FSDP2", "bf16")]
)
def test_two_levels(sim_ranks, wrapper, wire):
    for schedule, seed in SCHEDULES:
        found = sim_ranks(4).run(_errors, wrapper, wire, True, 2, schedule=schedule, seed=seed)
        for errors, said in found:
            assert max(errors) < 1.5 * BOUNDS[wire]
            assert "two levels: 2 hosts of 2 ranks" in said


class _Roots(nn.Module):
    """Blocks that are sharded, in a container that is not: each is a root with its own stream."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # More than there are lanes.
        self.blocks = nn.ModuleList(nn.Linear(300, 300, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        # None waits for another.
        parts = [(1 + place) * block(x).square().sum() for place, block in enumerate(self.blocks)]
        return torch.stack(parts).sum()


def _roots(fault: bool) -> float:
    """The worst error of a root's gradients; with a fault they share a lane's memory in flight."""
    from unittest.mock import patch

    from torch.distributed.fsdp import fully_shard

    from distamp.comm_hooks import lanes, torch_compat

    shared = lanes.Lane(0, _device())

    def on_the_root_s_own_stream(_: Any, job: lanes.Job, uses: Any = ()) -> Any:
        return torch_compat.completed(job(shared))

    rank, size = dist.get_rank(), dist.get_world_size()
    model = _Roots().to(_device())
    for each in model.blocks:
        fully_shard(each, mesh=mesh((size,), ("shard",), device="sim"))
    # In two levels: what a rank got from its own host is read again when it adds up.
    comm_hooks.register(model, "fp16", ranks_per_host=2)
    worst = 0.0
    planted = patch.object(lanes.DeviceLanes, "submit", on_the_root_s_own_stream)
    for step in range(3):
        model.zero_grad()
        given = [
            torch.randn(4, 300, generator=torch.Generator().manual_seed(10 * step + each))
            for each in range(size)
        ]
        # Else FSDP2 reduces all roots' gradients at the end, one root after another.
        x = given[rank].to(_device()).requires_grad_()
        with planted if fault else contextlib.nullcontext():
            model(x).backward()
        exact = _Roots().double()
        for each in given:
            (exact(each.double()) / size).backward()
        for mine, true in zip(model.parameters(), exact.parameters(), strict=True):
            found = mine.grad.full_tensor().cpu().double()
            error = float((found - true.grad).norm() / true.grad.norm())
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def test_roots_never_share_a_buffer_in_flight(sim_ranks):
    for schedule, seed in SCHEDULES:
        for worst in sim_ranks(4).run(_roots, False, schedule=schedule, seed=seed):
            assert worst < BOUNDS["fp16"]
    assert max(sim_ranks(4).run(_roots, True)) > 100 * BOUNDS["fp16"]


def _beside(count: int) -> tuple[bool, bool]:
    """Whether a bucket is averaged where the host waits for the next one alone, and that one."""
    from unittest.mock import patch

    from distamp.comm_hooks import lanes
    from tests.simulated.device import peek

    with patch.object(lanes, "COUNT", count):
        return _second_awaited(peek)


def _second_awaited(peek: Any) -> tuple[bool, bool]:
    state = comm_hooks.register(DistributedDataParallel(nn.Linear(8, 8).to(_device())), "fp16")
    anchors = [nn.Parameter(torch.zeros(5000, device=_device())) for _ in range(2)]
    first, second = (torch.full((5000,), 1.0 + dist.get_rank(), device=_device()) for _ in range(2))
    waiting = [state.average(each, [a]) for each, a in zip((first, second), anchors, strict=True)]
    waiting[1].wait()
    arrived = bool((second.cpu() == 1.5).all())
    found = bool((peek(first) == 1.5).all())
    waiting[0].wait()
    return found, arrived


def test_a_bucket_is_encoded_and_sent_while_another_is_on_its_way(sim2):
    # With one lane the second could not be encoded before the first was there.
    assert sim2.run(_beside, 2) == [(False, True)] * 2
    assert sim2.run(_beside, 1) == [(True, True)] * 2


# -- launches and memory ------------------------------------------------------------------------


def _launches(wire: str, ranks_per_host: int) -> tuple[int, int, float]:
    """Calls of kernels, all other ops, and buffers beside the bucket, of one bucket."""
    from unittest.mock import patch

    from torch.utils._python_dispatch import TorchDispatchMode

    from distamp.comm_hooks import formats

    counts = {"kernels": 0, "ops": 0, "bytes": 0}
    inside = [False]

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if "empty" in func.name() and out.dtype is torch.uint8 and not inside[0]:
                counts["bytes"] += out.numel()
            tags = func.tags
            # A view is no launch; neither is memory.
            view = torch.Tag.inplace_view in tags or func.is_view
            if not inside[0] and not view and "empty" not in func.name():
                counts["ops"] += 1
            return out

    def one_launch(function: Any) -> Any:
        # Each of these is one of Triton's kernels, which a simulated device does not have.
        def run(*args: Any, **kwargs: Any) -> None:
            counts["kernels"] += 1
            inside[0] = True
            try:
                function(*args, **kwargs)
            finally:
                inside[0] = False

        return run

    numel = 1 << 20
    state = comm_hooks.register(
        DistributedDataParallel(nn.Linear(8, 8).to(_device())), wire, ranks_per_host=ranks_per_host
    )
    parameter = nn.Parameter(torch.zeros(numel, device=_device()))
    with Ops():
        for _ in range(2):  # of each lane, which has its memory from then on
            state.average(torch.ones(numel, device=_device()), [parameter]).wait()
    counts["ops"] = 0
    values = torch.ones(numel, device=_device())
    names = ("encode", "decode", "sum_encode")
    with Ops(), patch.multiple(formats, **{n: one_launch(getattr(formats, n)) for n in names}):
        state.average(values, [parameter]).wait()
    return counts["kernels"], counts["ops"], counts["bytes"] / (4 * numel)


@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_a_bucket_takes_three_kernels_and_few_launches(sim_ranks, wire, ranks_per_host):
    for kernels, ops, buffers in sim_ranks(4).run(_launches, wire, ranks_per_host):
        assert kernels == 3
        assert kernels + ops <= 12
        assert 0 < buffers <= 2.25
