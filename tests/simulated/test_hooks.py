"""Communication hooks on simulated devices: results of the CPU, streams, lanes and launches."""

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
from tests.place import device_type, rank_device
from tests.ranks import RankPool, mesh
from tests.simulated.pools import SimPool

slow = pytest.mark.slow
SCHEDULES = [("late", 0), ("late_others", 0)]


def _train(layout: str, wire: str, attach: bool, ranks_per_host: int, kind: str) -> Any:
    """Train six steps; return the losses, whether each was taken, and the scale.

    The third step overflows on rank 1 alone.
    """
    model, settings = spread(layout)
    state = register_comm_hook(model, wire, ranks_per_host=ranks_per_host, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **{kind: True})
    scaler = DistGradScaler(device_type(), init_scale=2.0**10, growth_interval=3)
    if attach:
        scaler.attach_comm_hook(state)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, taken = [], []
    for step in range(6):
        x = torch.randn(8, WIDTHS[0], generator=generator)
        loss = model(x.to(rank_device())).square().mean()
        overflows = step == 2 and dist.get_rank() == 1
        factor = float("inf") if overflows else 1.0
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        taken.append(scaler.step_was_taken(optimizer))
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu(), taken, scaler.get_scale()


def _compare_with_cpu(sim_pool: SimPool, cpu_pool: RankPool, schedule: str, *settings: Any) -> None:
    """Train on the CPU and on devices with the same settings, and compare the results."""
    expected = cpu_pool.run(_train, *settings)
    results = sim_pool.run(_train, *settings, schedule=schedule)
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-7)
    for _, taken, scale in results[:2]:
        assert taken == [True, True, False, True, True, True]
        assert scale == 1024.0


@slow
def test_ddp_with_int8_has_the_result_of_the_cpu(sim2, ranks2):
    _compare_with_cpu(sim2, ranks2, "late", "DDP", "int8", True, 1, "foreach")


@slow
def test_ddp_with_int8_and_a_fused_step_has_the_result_of_the_cpu(sim2, ranks2):
    """The host does not read the flag of a skip, so error feedback restarts on the device."""
    _compare_with_cpu(sim2, ranks2, "late_others", "DDP", "int8", True, 1, "fused")


def test_fsdp1_with_fp16_has_the_result_of_the_cpu(sim2, ranks2):
    _compare_with_cpu(sim2, ranks2, "late_others", "FSDP1", "fp16", True, 1, "foreach")


@slow
def test_hsdp_with_bf16_has_the_result_of_the_cpu(sim2, ranks2):
    _compare_with_cpu(sim2, ranks2, "late", "HSDP", "bf16", False, 1, "fused")


@slow
def test_ddp_with_int8_on_two_hosts_has_the_result_of_the_cpu(sim_ranks, ranks4):
    _compare_with_cpu(sim_ranks(4), ranks4, "late_others", "DDP", "int8", False, 2, "foreach")


@slow
def test_ddp_with_fp16_on_two_hosts_has_the_result_of_the_cpu(sim_ranks, ranks4):
    _compare_with_cpu(sim_ranks(4), ranks4, "late", "DDP", "fp16", True, 2, "fused")


@slow
def test_fsdp2_with_bf16_on_two_hosts_has_the_result_of_the_cpu(sim_ranks, ranks4):
    _compare_with_cpu(sim_ranks(4), ranks4, "late_others", "FSDP2", "bf16", True, 2, "foreach")


def _bucket_on_a_stream() -> list[Tensor]:
    """Return gradients that the user's stream computed and a hook averaged."""
    side = torch.Stream(rank_device())
    layer = nn.Linear(64, 64).to(rank_device())
    model = DistributedDataParallel(layer)
    register_comm_hook(model, "fp16")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x = torch.full((2, 64), 1.0 + dist.get_rank(), device=rank_device())
        for _ in range(3):
            model.zero_grad()
            model(x).sum().backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def test_a_hook_waits_for_the_stream_that_made_the_gradients(sim2):
    weight_grad = torch.full((64, 64), 3.0)
    bias_grad = torch.full((64,), 2.0)
    expected = weight_grad, bias_grad
    for schedule, seed in SCHEDULES:
        for grads in sim2.run(_bucket_on_a_stream, schedule=schedule, seed=seed):
            torch.testing.assert_close(tuple(grads), expected, rtol=1e-3, atol=0)


# -- lanes -----------------------------------------------------------------------------------------


def _roots() -> float:
    """Return the worst relative error of gradients over several steps.

    Each block is an FSDP root, in a container that is not sharded.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    # There are more blocks than lanes.
    blocks = nn.ModuleList(nn.Linear(300, 300, bias=False) for _ in range(6)).to(rank_device())
    for block in blocks:
        fully_shard(block, mesh=mesh((size,), ("shard",)))
    # With two hosts a rank reads the sum of its host again when it adds the sums of all hosts.
    register_comm_hook(blocks, "fp16", ranks_per_host=2)
    worst = 0.0
    for step in range(3):
        blocks.zero_grad()
        draw = torch.Generator().manual_seed(step)
        inputs = torch.randn(size, 4, 300, generator=draw)
        # Without a gradient of the input, FSDP2 reduces all roots at the end, one after another.
        x = inputs[rank].to(rank_device()).requires_grad_()
        # No block waits for another.
        losses = [factor * block(x).sum() for factor, block in enumerate(blocks, 1)]
        torch.stack(losses).sum().backward()
        exact = inputs.double().sum(1).mean(0)
        for factor, weight in enumerate(blocks.parameters(), 1):
            full_grad = weight.grad.full_tensor().cpu().double()
            difference = full_grad[0] / factor - exact
            error = difference.norm() / exact.norm()
            worst = max(worst, float(error.nan_to_num(torch.inf)))
    return worst


def test_roots_never_share_a_buffer_in_flight(sim_ranks):
    pool = sim_ranks(4)
    for schedule, seed in SCHEDULES:
        worst_errors = pool.run(_roots, schedule=schedule, seed=seed)
        assert max(worst_errors) < 4e-4


@on_devices(2)
def test_a_failure_stays_on_every_lane_of_a_device():
    model = DistributedDataParallel(nn.Linear(8, 8).to(rank_device()))
    state, bucket = register_comm_hook(model, "fp16"), torch.ones(4096, device=rank_device())
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

    parameters = {name: nn.Parameter(torch.zeros(4096, device=rank_device())) for name in "ab"}
    hook = register_comm_hook(DistributedDataParallel(nn.Linear(8, 8).to(rank_device())), "int8")
    hook.name_parameters(parameters.items())

    def step(names: str, found_inf: float) -> None:
        for name in names:
            bucket = torch.linspace(-1.0, 1.0, 4096, device=rank_device())
            hook.all_reduce_mean(bucket, [parameters[name]]).wait()
        flag = torch.full((), found_inf, device=rank_device())
        with refuse():
            hook.on_step(None, flag)
            hook.on_update()

    step("ab", skipped)
    step("b", 0.0)
    residuals_a, residuals_b = hook.state_dict()["residuals"].values()
    assert bool(residuals_a[0].any()) is (skipped == 0.0)
    assert residuals_b[0].any()


@on_devices(4)
@pytest.mark.parametrize(
    ("wire", "ranks_per_host"),
    [
        pytest.param("fp16", 1, marks=slow),
        pytest.param("fp16", 2, marks=slow),
        pytest.param("int8", 1),
        pytest.param("int8", 2, marks=slow),
    ],
)
def test_a_bucket_waits_for_nothing(wire, ranks_per_host):
    from tests.simulated.device import refuse

    bucket = torch.ones(1 << 16, device=rank_device())
    parameters = [nn.Parameter(bucket)]
    model = DistributedDataParallel(nn.Linear(8, 8).to(rank_device()))
    state = register_comm_hook(model, wire, ranks_per_host=ranks_per_host)
    # Each lane allocates its memory in its first call.
    for _ in range(2):
        state.all_reduce_mean(bucket, parameters).wait()
    with refuse():
        for _ in range(2):
            state.all_reduce_mean(bucket, parameters).wait()
