"""initialize at odd places: credit in a state, small penalties, copies of shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distamp import initialize
from distamp.initialize import Amp
from distamp.scaler import HysteresisSchedule


def _amp(level: str, **settings: object) -> Amp:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level, **settings)


def test_a_state_has_what_the_schedule_remembers():
    schedule = HysteresisSchedule(hysteresis=3, min_scale=2.0)
    amp, other = _amp("O1", schedule=schedule), _amp("O1", schedule=schedule)
    amp.backward(amp.model(torch.full((1, 4), torch.inf)).sum())
    assert not amp.step()
    other.load_state_dict(amp.state_dict())
    assert other.scaler.schedule_state_dict() == amp.scaler.schedule_state_dict()
    assert other.scaler.schedule_state_dict()["hysteresis_tracker"] == 2


def test_gradients_of_a_penalty_do_not_underflow():
    half = torch.ones(2, dtype=torch.float16, requires_grad=True)
    (gradient,) = _amp("O1").grad((half.float() * 1e-8).sum(), [half])
    assert gradient.tolist() == pytest.approx([1e-8] * 2, rel=1e-2)


def _norm_of_copies() -> tuple[float, float]:
    inputs = torch.arange(8.0).view(2, 4)
    alone = _amp("O0")
    alone.backward(alone.model(inputs).square().mean())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 2), mesh=mesh["shards"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copies = mesh["copies"].get_group()
    amp = initialize(model, optimizer, "O0", comm_hook="fp16", replicas=copies)
    amp.backward(model(inputs).square().mean())
    return amp.clip_grad_norm_(1.0).item(), alone.clip_grad_norm_(1.0).item()


def test_copies_of_shards_count_once_in_the_norm(ranks4):
    for ours, alone in ranks4.run(_norm_of_copies):
        assert ours == pytest.approx(alone, rel=1e-3)
