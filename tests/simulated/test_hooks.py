"""Communication hooks on simulated devices: as on the CPU; streams, lanes and launches."""

import contextlib
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler
from distamp.comm_hooks import register_comm_hook
from distamp.comm_hooks.formats import Fp16Blocks
from tests.comm_hooks.training import WIDTHS, spread
from tests.on_ranks import on_devices
from tests.place import device_type, here
from tests.ranks import mesh

SCHEDULES = [("late", 0), ("late_others", 0)]


def _train(how: str, wire: str, attach: bool, ranks_per_host: int, kind: str) -> Any:
    """Six steps, one of which overflows on rank 1 alone: losses, scale, and who stepped."""
    model, settings = spread(how)
    state = register_comm_hook(model, wire, ranks_per_host=ranks_per_host, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **{kind: True})
    scaler = DistGradScaler(device_type(), init_scale=2.0**10, growth_interval=3)
    if attach:
        scaler.attach_comm_hook(state)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, taken = [], []
    for step in range(6):
        x = torch.randn(8, WIDTHS[0], generator=generator).to(here())
        loss = model(x).square().mean()
        bad = step == 2 and dist.get_rank() == 1
        scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        taken.append(scaler.step_was_taken(optimizer))
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu(), taken, scaler.get_scale()


@pytest.mark.parametrize(
    ("size", "how", "wire", "attach", "kind", "schedule"),
    [
        (2, "DDP", "int8", True, "foreach", "late"),
        # What it skips is read by no host: error feedback begins anew on the device.
        (2, "DDP", "int8", True, "fused", "late_others"),
        (2, "FSDP1", "fp16", True, "foreach", "late_others"),
        (2, "HSDP", "bf16", False, "fused", "late"),
        # In two levels: two hosts of two ranks.
        (4, "DDP", "int8", False, "foreach", "late_others"),
        (4, "DDP", "fp16", True, "fused", "late"),
        (4, "FSDP2", "bf16", True, "foreach", "late_others"),
    ],
)
def test_a_hooked_run_is_as_on_the_cpu(sim_ranks, ranks, size, how, wire, attach, kind, schedule):
    arguments = how, wire, attach, size // 2, kind
    expected = ranks(size).run(_train, *arguments)
    found = sim_ranks(size).run(_train, *arguments, schedule=schedule)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert found[0][1:] == found[1][1:] == ([True, True, False, True, True, True], 1024.0)


def _bucket_on_a_stream() -> list[Tensor]:
    """Gradients made on the user's own stream, averaged by a hook, read there."""
    side = torch.Stream(here())
    model = DistributedDataParallel(nn.Linear(64, 64).to(here()))
    register_comm_hook(model, "fp16")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for _ in range(3):
            model.zero_grad()
            model(torch.full((2, 64), 1.0 + dist.get_rank(), device=here())).sum().backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def test_a_hook_waits_for_the_stream_that_made_the_gradients(sim2):
    expected = torch.full((64, 64), 3.0), torch.full((64,), 2.0)
    for schedule, seed in SCHEDULES:
        for found in sim2.run(_bucket_on_a_stream, schedule=schedule, seed=seed):
            torch.testing.assert_close(tuple(found), expected, rtol=1e-3, atol=0)


# -- lanes -----------------------------------------------------------------------------------------


def _roots() -> float:
    """The worst error of blocks that are each an FSDP root, in a container that is not sharded."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # More than there are lanes.
    blocks = nn.ModuleList(nn.Linear(300, 300, bias=False) for _ in range(6)).to(here())
    for each in blocks:
        fully_shard(each, mesh=mesh((size,), ("shard",)))
    # In two levels: what a rank got from its own host is read again when it adds up.
    register_comm_hook(blocks, "fp16", ranks_per_host=2)
    worst = 0.0
    for step in range(3):
        blocks.zero_grad()
        draw = torch.Generator().manual_seed(step)
        given = torch.randn(size, 4, 300, generator=draw)
        # Else FSDP2 reduces all roots' gradients at the end, one root after another.
        x = given[rank].to(here()).requires_grad_()
        # No block waits for another.
        losses = [(1 + place) * block(x).sum() for place, block in enumerate(blocks)]
        torch.stack(losses).sum().backward()
        exact = given.double().sum(1).mean(0)
        for place, weight in enumerate(blocks.parameters()):
            found = weight.grad.full_tensor()[0].cpu().double() / (1 + place)
            error = (found - exact).norm() / exact.norm()
            worst = max(worst, float(error.nan_to_num(torch.inf)))
    return worst


def test_roots_never_share_a_buffer_in_flight(sim_ranks):
    for schedule, seed in SCHEDULES:
        assert max(sim_ranks(4).run(_roots, schedule=schedule, seed=seed)) < 4e-4


@on_devices(2)
def test_every_lane_of_a_device_keeps_a_failure():
    model = DistributedDataParallel(nn.Linear(8, 8).to(here()))
    state, bucket = register_comm_hook(model, "fp16"), torch.ones(4096, device=here())
    failing = patch.object(Fp16Blocks, "encode", side_effect=RuntimeError("out of memory"))
    with failing, pytest.raises(RuntimeError, match="out of memory"):
        state.all_reduce_mean(bucket)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"failed before \(out of memory\)"):
            state.all_reduce_mean(bucket)


@on_devices(2)
@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_the_error_of_a_step_is_dropped_by_a_flag_that_the_host_does_not_read(skipped):
    """The bucket drops out after that step, and the following step is taken."""
    from tests.simulated.device import refuse

    parameters = {name: nn.Parameter(torch.zeros(4096, device=here())) for name in "ab"}
    hook = register_comm_hook(DistributedDataParallel(nn.Linear(8, 8).to(here())), "int8")
    hook.name_parameters(parameters.items())
    for used, flag in (("ab", skipped), ("b", 0.0)):
        for name in used:
            bucket = torch.linspace(-1.0, 1.0, 4096, device=here())
            hook.all_reduce_mean(bucket, [parameters[name]]).wait()
        found_inf = torch.full((), flag, device=here())
        with refuse():
            hook.on_step(None, found_inf)
            hook.on_update()
    of_a, of_b = (residuals[0].cpu() for residuals in hook.state_dict()["residuals"].values())
    assert bool(of_a.any()) is (skipped == 0.0)
    assert of_b.any()


@on_devices(4)
@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_a_bucket_waits_for_nothing(wire, ranks_per_host):
    from tests.simulated.device import refuse

    bucket = torch.ones(1 << 16, device=here())
    parameters = [nn.Parameter(bucket)]
    model = DistributedDataParallel(nn.Linear(8, 8).to(here()))
    state = register_comm_hook(model, wire, ranks_per_host=ranks_per_host)
    for number in range(4):  # each lane has its memory from the third on
        with refuse() if number > 1 else contextlib.nullcontext():
            state.all_reduce_mean(bucket, parameters).wait()
