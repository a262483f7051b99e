"""A module's extra state is a part of its state dict, so checkpoints and snapshots contain it.

FP8 layers keep the history of their scales there, and a metric its counts. A run that lost them
would resume with other numbers.
"""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp.levels import Amp
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class CountingLinear(nn.Linear):
    """A linear layer that counts its calls in a Python number and keeps the largest input."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.calls = 0
        self.largest = torch.zeros(())

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.largest = torch.maximum(self.largest, inputs.detach().abs().max().float())
        return super().forward(inputs)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "largest": self.largest}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        self.largest = state["largest"]


def make_amp(level: str, layout: str = "plain") -> Amp:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(CountingLinear(), nn.Tanh(), CountingLinear())
    distamp.cast_model(model, level)
    if layout == "ddp":
        model = DistributedDataParallel(model)
    if layout == "fsdp2":
        fully_shard(model)
    return distamp.initialize(model, torch.optim.AdamW(model.parameters()), level)


def train(amp: Amp, inputs: Tensor, steps: int) -> None:
    for _ in range(steps):
        amp.zero_grad()
        with amp.autocast():
            loss = amp.model(inputs).float().square().mean()
        amp.backward(loss)
        amp.step()


def first_layer(amp: Amp) -> Any:
    layers = [module for module in amp.model.modules() if isinstance(module, CountingLinear)]
    return layers[0]


@pytest.mark.parametrize("level", ["fp32", "bf16-O2"])
def test_a_checkpoint_contains_the_extra_state_of_a_module(level, tmp_path):
    amp = make_amp(level)
    train(amp, torch.full((2, 8), 3.0), steps=2)
    amp.save(tmp_path / "checkpoint")

    resumed = make_amp(level)
    resumed.load(tmp_path / "checkpoint")

    assert first_layer(resumed).calls == 2
    assert first_layer(resumed).largest == 3.0


def test_a_checkpoint_without_an_extra_state_leaves_the_one_of_the_module(tmp_path):
    amp = make_amp("fp32")
    dcp.save(
        {name: entry for name, entry in amp.flat_state_dict().items() if "_extra" not in name}
        | {"amp": (amp.state_dict(),)},
        checkpoint_id=tmp_path / "checkpoint",
    )

    resumed = make_amp("fp32")
    train(resumed, torch.ones(2, 8), steps=3)
    resumed.load(tmp_path / "checkpoint")

    assert first_layer(resumed).calls == 3


@on_ranks(2)
@pytest.mark.parametrize(("saved_layout", "loaded_layout"), [("ddp", "fsdp2"), ("fsdp2", "ddp")])
def test_an_extra_state_moves_to_another_layout(saved_layout, loaded_layout, tmp_path):
    amp = make_amp("fp32", saved_layout)
    train(amp, torch.full((2, 8), 3.0), steps=2)
    amp.save(tmp_path / "checkpoint")

    resumed = make_amp("fp32", loaded_layout)
    resumed.load(tmp_path / "checkpoint")

    assert first_layer(resumed).calls == 2
    assert first_layer(resumed).largest == 3.0


def test_a_snapshot_contains_the_extra_state_of_a_module():
    amp = make_amp("fp32")
    snapshots = amp.snapshots(every=10)
    train(amp, torch.full((2, 8), 3.0), steps=1)
    snapshots.record()
    train(amp, torch.full((2, 8), 5.0), steps=2)

    snapshots.rewind()

    assert first_layer(amp).calls == 1
    assert first_layer(amp).largest == 3.0
