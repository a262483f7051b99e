"""Optimizer state, checkpoints, and weights written by something else than the optimizer."""

from __future__ import annotations

import copy
import io
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp.scaler import MasterParameters, master_params
from tests.scaler.masters import half_mlp, master_scaler
from tests.scaler.steps import cpu_scaler
from tests.scaler.test_master import OPTIMIZERS, equal, loss_of, one, one_master, values

F16, F32 = torch.float16, torch.float32


class Job:
    """A model, an optimizer, masters and a scaler, made anew as after a restart."""

    def __init__(self, name: str = "AdamW", seed: int = 0) -> None:
        self.model = half_mlp(seed)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.masters = MasterParameters(self.optimizer)
        self.scaler = master_scaler()

    def train(self, *steps: int) -> Job:
        for step in steps:
            self.optimizer.zero_grad()
            self.scaler.scale(loss_of(self.model, step)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return self

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "masters": self.masters}

    def saved(self) -> dict[str, Any]:
        """What a file holds, read back without unpickling anything but tensors."""
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, file)
        file.seek(0)
        state: dict[str, Any] = torch.load(file, weights_only=True)
        return state

    def values(self) -> list[Tensor]:
        state = [
            value
            for kept in self.optimizer.state_dict()["state"].values()
            for value in kept.values()
            if isinstance(value, Tensor)
        ]
        return values([*self.model.parameters(), *master_params(self.optimizer), *state])


# -- optimizer state -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "AdamW fused"])
def test_state_that_an_optimizer_has_already_goes_on_in_float32(name):
    """Two steps in float16, then masters: as if the state had been cast by hand."""
    model = half_mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = cpu_scaler(fp16_grads="inplace")
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    low = copy.deepcopy(optimizer.state_dict()["state"])
    by_hand = OPTIMIZERS[name]([p.detach().float() for p in model.parameters()])
    by_hand.load_state_dict(optimizer.state_dict())

    MasterParameters(optimizer)
    wide = optimizer.state_dict()["state"]
    assert wide.keys() == low.keys() == by_hand.state_dict()["state"].keys()
    for number, kept in wide.items():
        for key, value in kept.items():
            if isinstance(value, Tensor):
                assert value.dtype is F32
                assert torch.equal(value, low[number][key].float())
                assert torch.equal(value, by_hand.state_dict()["state"][number][key])
    assert set(optimizer.state) == set(master_params(optimizer))


# -- checkpoints -----------------------------------------------------------------------------------


ORDERS = list(permutations(["model", "optimizer", "masters"]))


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_a_resumed_run_goes_on_to_the_bit_in_whatever_order_it_is_loaded(order):
    whole = Job().train(0, 1, 2, 3)
    saved = Job().train(0, 1).saved()
    resumed = Job(seed=1)
    for part in order:
        resumed.parts()[part].load_state_dict(saved[part])
    resumed.train(2, 3)
    assert equal(resumed.values(), whole.values())


def test_masters_alone_bring_the_model_with_them():
    saved = Job().train(0, 1)
    fresh = Job(seed=1)
    fresh.masters.load_state_dict(saved.saved()["masters"])
    assert equal(fresh.model.parameters(), saved.model.parameters())
    assert equal(master_params(fresh.optimizer), master_params(saved.optimizer))


def test_the_models_checkpoint_alone_refreshes_the_masters():
    """Its values are float16, so these are what the next step begins with."""
    saved = Job().train(0, 1).saved()
    resumed = Job(seed=1).train(5)
    resumed.model.load_state_dict(saved["model"])
    kept = resumed.masters.state_dict()["masters"]
    assert equal(kept.values(), [v.float() for v in saved["model"].values()])

    again = Job(seed=1).train(5)
    again.model.load_state_dict(saved["model"])
    again.train(2)
    resumed.train(2)
    assert equal(again.values(), resumed.values())
    moved = [a - b for a, b in zip(again.model.parameters(), saved["model"].values(), strict=True)]
    assert max(float(m.detach().abs().max()) for m in moved) < 0.05, "from the loaded weights on"


def test_the_state_holds_the_masters_by_the_optimizers_own_numbers():
    first, frozen, second = one(1.0), one(2.0).requires_grad_(False), one(3.0)
    groups = [{"params": [first, frozen]}, {"params": [second], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    masters = MasterParameters(optimizer)
    assert optimizer.state_dict()["param_groups"][1]["params"] == [2]
    state = masters.state_dict()
    assert {n: v.item() for n, v in state["masters"].items()} == {0: 1.0, 2: 3.0}
    assert all(v.dtype is F32 for v in state["masters"].values())


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "not a state of master parameters"),
        ({"version": 1, "masters": {0: torch.ones(1)}}, r"masters of parameters \[0\].*\[0, 1\]"),
        (
            {"version": 1, "masters": {0: torch.ones(1), 1: torch.ones(3)}},
            r"saved master of parameter 1 is .*\(3,\), the one here is .*\(1,\)",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(state, says):
    optimizer = torch.optim.SGD([one(5.0), one(6.0)], lr=1.0)
    masters = MasterParameters(optimizer)
    with pytest.raises(ValueError, match=says):
        masters.load_state_dict(state)
    assert [m.item() for m in master_params(optimizer)] == [5.0, 6.0]


def test_the_optimizers_state_dict_is_that_of_an_fp32_run():
    """So a checkpoint of a float32 run loads into an O2 run and the other way round."""
    job = Job().train(0, 1)
    fp32 = OPTIMIZERS["AdamW"](half_mlp().float().parameters())
    fp32.load_state_dict(job.optimizer.state_dict())
    for kept in fp32.state_dict()["state"].values():
        assert kept["exp_avg"].dtype is F32
    assert equal(
        [h["exp_avg"] for h in fp32.state_dict()["state"].values()],
        [h["exp_avg"] for h in job.optimizer.state_dict()["state"].values()],
    )


# -- weights that something else writes ------------------------------------------------------------


def test_weights_that_are_swapped_out_and_back_keep_their_masters():
    """As for an evaluation with averaged weights."""
    swapped, straight = Job().train(0, 1, 2), Job().train(0, 1, 2)
    kept = values(swapped.model.parameters())
    with torch.no_grad():
        for parameter in swapped.model.parameters():
            parameter.zero_()
        for parameter, value in zip(swapped.model.parameters(), kept, strict=True):
            parameter.copy_(value)
    assert equal(swapped.train(3).values(), straight.train(3).values())


def test_an_element_that_was_written_is_taken_over_and_no_other():
    parameter = nn.Parameter(torch.zeros(2, dtype=F16))
    optimizer = torch.optim.SGD([parameter], lr=1e-5)
    masters, scaler = MasterParameters(optimizer), master_scaler()
    with torch.no_grad():
        masters.master_of(parameter).fill_(1.0 + 2e-5)
    masters.write_back()
    with torch.no_grad():
        parameter[0] = 7.0
    scaler.scale(parameter.float().sum()).backward()
    scaler.step(optimizer)
    expected = torch.tensor([7.0, 1.0 + 2e-5]) - 1e-5
    torch.testing.assert_close(masters.master_of(parameter).detach(), expected, rtol=0, atol=1e-7)


def test_refresh_takes_every_parameter_as_it_is():
    """Writes through .data leave no trace; the caller has to say so."""
    parameter, optimizer, masters = one_master(1.0)
    parameter.data.fill_(4.0)
    optimizer.step()
    assert parameter.item() == 1.0
    parameter.data.fill_(4.0)
    masters.refresh()
    optimizer.step()
    assert parameter.item() == 4.0
