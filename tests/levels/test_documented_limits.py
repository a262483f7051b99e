"""Limits of torch or of a level, with the way out that the docs give for each."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp.errors import ReplicaMismatchError
from distamp.levels import Amp
from tests.on_ranks import on_ranks


@dataclasses.dataclass
class Batch:
    """A dataclass that torch knows, as input and output of a model."""

    hidden: Tensor
    step: int


@dataclasses.dataclass
class UnregisteredBatch:
    """A dataclass that torch does not know."""

    hidden: Tensor


torch.export.register_dataclass(Batch)


class OnBatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, batch: Batch | UnregisteredBatch) -> Batch | UnregisteredBatch:
        return dataclasses.replace(batch, hidden=self.linear(batch.hidden))


def test_a_level_casts_the_tensors_of_a_registered_dataclass():
    amp = distamp.initialize(OnBatches(), None, "bf16-O2")

    outputs = amp.model(Batch(torch.ones(1, 4), step=3))

    assert outputs.hidden.dtype is torch.float32
    assert outputs.step == 3
    with pytest.raises(RuntimeError, match="same dtype"):
        amp.model(UnregisteredBatch(torch.ones(1, 4)))


def train_one_step(amp: Amp) -> None:
    amp.zero_grad()
    with amp.autocast():
        loss = amp.model(torch.ones(2, 4)).float().square().mean()
    amp.backward(loss)
    amp.step()


@on_ranks(2)
def test_a_unit_trains_after_it_was_frozen_if_its_first_forward_pass_came_before():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for module in (model[0], model[2], model):
        fully_shard(module, mp_policy=policy)
    with torch.no_grad():
        model(torch.ones(1, 4))
    model[0].requires_grad_(False)
    amp = distamp.initialize(model, torch.optim.AdamW(model.parameters()), "bf16")
    train_one_step(amp)
    weight = model[0].weight.full_tensor().clone()

    model[0].requires_grad_(True)
    train_one_step(amp)

    assert model[0].weight.grad.dtype is torch.float32
    assert not torch.equal(model[0].weight.full_tensor(), weight)


@on_ranks(2)
@pytest.mark.parametrize("level", ["fp32", "fp16"])
def test_a_run_goes_on_after_its_replicas_were_repaired(level):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scale = {"init_scale": 8.0} if level == "fp16" else {}
    amp = distamp.initialize(model, optimizer, level, check_replicas_every=1, **scale)
    train_one_step(amp)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.module.bias.add_(0.25)

    with pytest.raises(ReplicaMismatchError):
        train_one_step(amp)
    amp.scaler.repair_replicas(from_rank=0)
    amp.zero_grad()
    amp.scaler.update()
    train_one_step(amp)

    assert amp.scaler.step_counts(optimizer).taken == 2
    assert amp.scaler.check_replicas().compared
