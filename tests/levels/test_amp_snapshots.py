"""`Amp.snapshots`: the models, optimizers and the scaler of `initialize` go back together."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp.errors import LossScaleCollapseError, NonFiniteWeightsError
from distamp.grads import to_local
from distamp.levels.amp import Amp
from distamp.masters import masters_of
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases

INF = float("inf")


def amp_at(level: str, wrap: Any = None, **settings: Any) -> Amp:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    distamp.cast_model(model, level)
    if wrap is not None:
        model = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    return distamp.initialize(model, optimizer, level, **settings)


def loss_of(amp: Amp, factor: float = 1.0) -> Tensor:
    with amp.autocast():
        outputs = amp.model(factor * torch.ones(4, 8))
    return outputs.float().square().mean()


def iteration(amp: Amp, factor: float = 1.0) -> bool:
    amp.zero_grad()
    amp.backward(loss_of(amp, factor))
    return bool(amp.step())


def weights(amp: Amp) -> list[Tensor]:
    tensors = [to_local(param.detach()).clone() for param in amp.model.parameters()]
    for optimizer in amp.optimizers:
        masters = masters_of(optimizer)
        values = {} if masters is None else masters.state_dict()["masters"]
        tensors += [to_local(value).clone() for value in values.values()]
    return tensors


@pytest.mark.parametrize("level", ["fp32", "fp16", "bf16", "fp16-O2", "fp16-O3", "bf16-O2"])
def test_every_level_goes_back_to_the_same_bits(level):
    amp = amp_at(level)
    snapshots = amp.snapshots(every=50)
    iteration(amp)
    snapshots.record()
    expected, state = weights(amp), amp.scaler.state_dict()
    for factor in (2.0, INF, 3.0):
        iteration(amp, factor)
        snapshots.record()
    assert snapshots.rewind() == 3
    assert all(map(torch.equal, weights(amp), expected))
    assert amp.scaler.state_dict() == state


def test_a_model_with_nan_trains_on_after_it_went_back():
    amp = amp_at("fp16")
    snapshots = amp.snapshots()
    iteration(amp)
    snapshots.record()
    with torch.no_grad():
        next(amp.model.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteWeightsError):
        iteration(amp)
    assert snapshots.rewind() == 0
    assert iteration(amp)


def test_a_collapse_of_the_scale_is_taken_back():
    amp = amp_at("fp16", init_scale=64.0, max_consecutive_skips=2)
    snapshots = amp.snapshots()
    iteration(amp)
    snapshots.record()
    assert not iteration(amp, INF)
    with pytest.raises(LossScaleCollapseError):
        iteration(amp, INF)
    snapshots.rewind()
    assert amp.scaler.get_scale() == 64.0
    # The next skip is the first in a row again.
    assert not iteration(amp, INF)


def test_a_write_to_a_parameter_is_in_the_master_of_the_snapshot():
    amp = amp_at("bf16-O2")
    iteration(amp)
    weight = next(amp.model.parameters())
    with torch.no_grad():
        weight[0, 0] = 3.0
    snapshots = amp.snapshots()
    snapshots.record()
    iteration(amp)
    snapshots.rewind()
    (masters,) = amp.masters
    master = masters.master_of(weight)
    assert master is not None
    assert weight[0, 0].item() == master[0, 0].item() == 3.0


def test_a_parameter_that_was_unfrozen_later_gets_a_new_master():
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    distamp.cast_model(model, "bf16-O2")
    amp = distamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.1), "bf16-O2")
    snapshots = amp.snapshots()
    iteration(amp)
    snapshots.record()
    model[0].requires_grad_(True)
    iteration(amp)
    snapshots.rewind()
    (masters,) = amp.masters
    master = masters.master_of(model[0].weight)
    assert master is not None
    assert torch.equal(master, model[0].weight.float())
    assert iteration(amp)


@on_ranks(2)
@pytest.mark.parametrize(
    "wrap", quick_cases([DistributedDataParallel, fully_shard], quick=[fully_shard])
)
def test_passes_that_were_not_reduced_are_dropped(wrap):
    """The step after them is not refused, and has none of their gradients."""
    amp = amp_at("bf16", wrap)
    snapshots = amp.snapshots()
    iteration(amp)
    snapshots.record()
    expected = weights(amp)
    with amp.no_sync():
        amp.backward(loss_of(amp, 100.0 + dist.get_rank()))
    snapshots.rewind()
    assert all(map(torch.equal, weights(amp), expected))
    amp.backward(loss_of(amp))
    assert amp.step()
    after_rewind = weights(amp)
    snapshots.rewind()
    assert iteration(amp)
    assert all(map(torch.equal, weights(amp), after_rewind))


def test_schedules_of_extra_go_back():
    amp = amp_at("fp32")
    schedule = torch.optim.lr_scheduler.StepLR(amp.optimizers[0], 1, 0.5)
    snapshots = amp.snapshots(extra=(schedule,))
    iteration(amp)
    snapshots.record()
    schedule.step()
    snapshots.rewind()
    assert schedule.last_epoch == 0
    assert amp.optimizers[0].param_groups[0]["lr"] == 0.1
