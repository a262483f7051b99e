"""Communication hooks on simulated devices: every format, under every wrapper, attached or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from distamp import DistGradScaler
from distamp.comm_hooks import WIRE_FORMATS, register, wire_format
from tests.ranks import mesh

SCHEDULES = [("late", 0), ("random", 5)]
WRAPPERS = ["DDP", "FSDP1", "FSDP2", "HSDP"]


def _wrapped(how: str, net: nn.Module, device: torch.device) -> nn.Module:
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    if how == "FSDP1":
        return FullyShardedDataParallel(net, device_id=device)
    shape = {"FSDP2": ((2,), ("shard",)), "HSDP": ((2, 1), ("replicate", "shard"))}[how]
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh(*shape))
    return fully_shard(net, mesh=mesh(*shape))


def _train(kind: str, how: str, wire: str, attach: bool) -> Any:
    """Six steps, one of which overflows on rank 1 alone: losses, scale, and who stepped."""
    rank = dist.get_rank()
    device = torch.device(kind, rank) if kind == "sim" else torch.device(kind)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16), nn.Linear(16, 4))
    model = _wrapped(how, net.to(device), device)
    state = register(model, wire)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    scaler = DistGradScaler(kind, init_scale=2.0**10, growth_interval=3)
    if attach:
        scaler.attach(state)
    generator = torch.Generator().manual_seed(rank)
    losses, taken = [], []
    for step in range(6):
        x = torch.randn(8, 16, generator=generator).to(device)
        loss = model(x).square().mean()
        scaler.scale(loss * (float("inf") if step == 2 and rank else 1.0)).backward()
        scaler.step(optimizer)
        taken.append(scaler.stepped(optimizer))
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu(), taken, scaler.get_scale()


def _formats(how: str) -> list[str]:
    feeds_back = [w for w in WIRE_FORMATS if wire_format(w).needs_error_feedback]
    return [w for w in WIRE_FORMATS if how == "DDP" or w not in feeds_back]


@pytest.mark.parametrize(
    ("how", "wire"), [(how, wire) for how in WRAPPERS for wire in _formats(how)]
)
def test_a_hooked_run_is_as_on_the_cpu(sim2, ranks2, how, wire):
    attach = WRAPPERS.index(how) % 2 == 0 or wire in ("fp16", "int8")
    expected = ranks2.run(_train, "cpu", how, wire, attach)
    for schedule, seed in SCHEDULES:
        found = sim2.run(_train, "sim", how, wire, attach, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        assert found[0][1] == found[1][1] == [True, True, False, True, True, True]


def _bucket_on_a_stream() -> list[Tensor]:
    """Gradients made on the user's own stream, averaged by a hook, read there."""
    rank = dist.get_rank()
    side = torch.Stream(f"sim:{rank}")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).to(f"sim:{rank}"))
    register(model, "fp16")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for _ in range(3):
            model.zero_grad()
            model(torch.full((2, 64), 1.0 + rank, device=f"sim:{rank}")).sum().backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def test_a_hook_waits_for_the_stream_that_made_the_gradients(sim2):
    expected = torch.full((64, 64), 3.0), torch.full((64,), 2.0)
    for schedule, seed in [*SCHEDULES, ("late_others", 0)]:
        for found in sim2.run(_bucket_on_a_stream, schedule=schedule, seed=seed):
            torch.testing.assert_close(tuple(found), expected, rtol=1e-3, atol=0)


class _TwoParts(nn.Module):
    """Two parameters in one bucket; the gradient of ``a`` is as large as ``factor`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(500)) for _ in range(2))

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return (self.a * x).sum() * factor + (self.b * x).sum()


def _one_overflows(kind: str, wire: str, fused: bool) -> Any:
    """Parameters and residuals after six steps; the optimizer of ``a`` skips the fourth."""
    rank = dist.get_rank()
    device = torch.device(kind, rank) if kind == "sim" else torch.device(kind)
    model = nn.parallel.DistributedDataParallel(_TwoParts().to(device))
    scaler = DistGradScaler(kind, init_scale=2.0**10, growth_interval=3)
    state = register(model, wire)
    scaler.attach(state)
    a, b = (torch.optim.SGD([p], lr=1.0, fused=fused) for p in (model.module.a, model.module.b))
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        x = torch.randn(500, generator=generator).to(device)
        factor = float("inf") if step == 3 and rank else 1.0
        scaler.scale(model(x, factor)).backward()
        scaler.step(a)
        scaler.step(b)
        assert (scaler.stepped(a), scaler.stepped(b)) == (step != 3, True)
        scaler.update()
        model.zero_grad()
    (residuals,) = state.state_dict()["residuals"].values()
    values = [model.module.a.detach(), model.module.b.detach(), *residuals]
    return [each.cpu() for each in values]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("wire", ["int8"])
def test_residuals_are_those_of_the_cpu_where_an_optimizer_skips(sim2, ranks2, wire, fused):
    expected = ranks2.run(_one_overflows, "cpu", wire, False)
    for schedule, seed in SCHEDULES:
        found = sim2.run(_one_overflows, "sim", wire, fused, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
