"""The scaler on a real accelerator, beside torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

from distamp import DistGradScaler
from tests.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIMIZERS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]
HOW = [{"foreach": False, "fused": False}, {"foreach": True}, {"fused": True}]


def _train(scaler: Any, cls: Any, how: dict[str, bool], unscale_first: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    optimizer = cls(model.parameters(), lr=0.01, **how)
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            output = model(torch.randn(4, 8, device="cuda"))
        loss = output.float().pow(2).mean() * (float("inf") if step == 3 else 1.0)
        scaler.scale(loss).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().cpu() for p in model.parameters()], scaler.get_scale()


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("how", HOW, ids=["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_it_trains_as_torch_does(cls: Any, how: dict[str, bool], unscale_first: bool) -> None:
    expected = _train(torch.amp.GradScaler("cuda"), cls, how, unscale_first)
    torch.testing.assert_close(_train(DistGradScaler(), cls, how, unscale_first), expected)


def test_offloaded_gradients_are_checked_where_they_lie() -> None:
    here, there = nn.Linear(2, 2).cuda(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*here.parameters(), *there.parameters()], lr=1.0, foreach=False)
    scaler = DistGradScaler("cuda", init_scale=4.0)
    scaler.scale(torch.ones((), device="cuda"))
    for p in (*here.parameters(), *there.parameters()):
        p.grad = torch.full_like(p, 4.0)
    assert there.weight.grad is not None
    there.weight.grad[0, 0] = float("nan")
    scaler.step(optimizer)
    assert not scaler.stepped(optimizer)


@pytest.fixture
def one_nccl_rank(tmp_path: Any) -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.usefixtures("one_nccl_rank")
def test_fsdp1_with_cpu_offload_trains_as_without(use_orig_params: bool) -> None:
    # On a machine without an accelerator torch itself cannot: it locks pages for one.
    ends = []
    for offload in (True, False):
        torch.manual_seed(0)
        model = FullyShardedDataParallel(
            nn.Linear(4, 4),
            device_id=0,
            cpu_offload=CPUOffload(offload_params=offload),
            use_orig_params=use_orig_params,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        scaler = DistGradScaler("cuda", init_scale=4.0)
        taken = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4, device="cuda")).pow(2).mean()
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            norm = scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            taken.append(scaler.stepped(optimizer))
            scaler.update()
        assert taken == [True, False, True, True]
        ends.append((float(norm), *[p.detach().cpu() for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1])


def _on_one_gpu(bad_rank: int) -> Any:
    """Gloo ranks that share one GPU: the scale and the gradients lie on it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = DistGradScaler("cuda", init_scale=4.0)
    taken = []
    for step in range(3):
        scaler.scale(torch.ones((), device="cuda"))
        bad = step == 1 and dist.get_rank() == bad_rank
        for p in model.parameters():
            p.grad = torch.full_like(p, float("inf") if bad else 4.0)
        scaler.step(optimizer)
        taken.append(scaler.stepped(optimizer))
        scaler.update()
    return taken, model.weight.detach().cpu(), scaler.get_scale()


def test_ranks_on_one_gpu_skip_together(ranks2: RankPool) -> None:
    first, second = ranks2.run(_on_one_gpu, 1)
    assert first[0] == second[0] == [True, False, True]
    assert torch.equal(first[1], second[1])
    assert first[2] == second[2] == 2.0
