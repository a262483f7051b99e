"""Tensors that one stream or device makes and another uses: what the scaler and hooks keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler
from distamp.comm_hooks import register
from distamp.comm_hooks.residuals import Residuals
from distamp.scaler import message
from distamp.scaler.groups import Group

SCHEDULES = [("late", 0), ("late_others", 0), ("random", 31)]


# -- messages -------------------------------------------------------------------------------------


def _words_on_two_streams() -> list[int]:
    """The words of a message that has room for more optimizers, on streams that never meet."""
    device = torch.device("sim", dist.get_rank())
    group = Group(dist.group.WORLD, device)
    group.length.capacity = 3
    first, second = torch.Stream(device), torch.Stream(device)
    for stream in (first, second):
        with stream:
            clean = [[torch.zeros((), device=device)]]
            words = message._device_words(group, group.layout(), 5, clean)
    with second:
        found: list[int] = words.tolist()
    return found


def test_a_message_is_made_of_nothing_that_another_stream_made(sim2):
    for schedule, seed in SCHEDULES:
        found = sim2.run(_words_on_two_streams, schedule=schedule, seed=seed, group="fresh")
        assert found == [[5 << 32] * 3] * 2


# -- hooks ----------------------------------------------------------------------------------------


def _residual_let_go() -> float:
    """What one stream keeps is read on the hook's, and its memory asked for again meanwhile."""
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    residuals = Residuals([64], 2)
    kept = {0: torch.full((2, 64), 3.0)}
    residuals.adopt(kept, torch.device("sim:0"), [("mine", 0, 64)])
    side.wait_stream(main)
    with side:
        residuals.begin(None)
        given = residuals.before("mine", 0, 64).residual
        assert given is not None
        read = given * 2
        residuals.keep("mine", 0, torch.zeros_like(given))
        del given
        residuals.end(torch.zeros((), dtype=torch.bool, device="sim"))
    others = [torch.full((64,), 5.0, device="sim") for _ in range(8)]
    main.synchronize()
    main.wait_stream(side)
    return read.sum().item() / 64 + 0 * len(others)


def test_residuals_outlive_the_exchange_that_reads_them(sim):
    for schedule, seed in SCHEDULES:
        assert sim.one(_residual_let_go, schedule=schedule, seed=seed) == 18.0


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


@pytest.mark.parametrize("wire", ["fp16", "int8", "fp8_e4m3"])
def test_a_joined_hook_over_devices_of_one_process(sim2, wire):
    expected = sim2.run(_hooked_over_two_devices, wire, schedule="eager")
    assert expected[0][1:] == ([True, True, False, True, True, True], 512.0)
    torch.testing.assert_close(expected[0], expected[1], rtol=0, atol=0)
    for schedule, seed in SCHEDULES:
        found = sim2.run(_hooked_over_two_devices, wire, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
