"""Masters of DTensors: FSDP2, HSDP and tensor parallel, beside the loop by hand on each rank."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from distamp.scaler import MasterParameters, master_params
from tests.masters.test_split import BF16, OPTIMIZERS, ByHand, same_bits
from tests.ranks import mesh
from tests.scaler.masters import half_mlp, loss_of, master_scaler


def _model(layout: str, seed: int = 0) -> nn.Module:
    model = half_mlp(seed, BF16)  # of 4 outputs and biases of 16, so every shard differs in size
    if "TP" in layout:
        over = mesh((2, 2), ("shard", "tensor"))
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, over["tensor"], plan)
        if layout == "TP":
            return model
        return fully_shard(model, mesh=over["shard"])
    if layout == "HSDP":
        return fully_shard(model, mesh=mesh((2, 2), ("copies", "shard")))
    return fully_shard(model)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _OnRank(ByHand):
    """By hand on what this rank holds, written in place: the model's own gradients are read."""

    def __init__(self, model: nn.Module, make: Any) -> None:
        self.model = list(model.parameters())
        with torch.no_grad():
            super().__init__(map(_local, self.model), make)

    def step(self, max_norm: float | None = None) -> None:
        for parameter, part in zip(self.model, self.parameters, strict=True):
            gradient, parameter.grad = parameter.grad, None
            part.grad = None if gradient is None else _local(gradient)
        super().step(max_norm)


@torch.no_grad()
def _compare(model: nn.Module, optimizer: Any, masters: Any, hand: Any) -> None:
    if masters.split:
        assert all(_local(each).isnan().all() for each in master_params(optimizer))
    with masters.materialized():
        for ours, theirs in zip(master_params(optimizer), hand.copies, strict=True):
            assert same_bits(_local(ours), theirs)
    for ours, theirs in zip(model.parameters(), hand.parameters, strict=True):
        assert same_bits(_local(ours), theirs)


def _train(layout: str, name: str, steps: int) -> list[float]:
    """Split masters; the rank's own data where parameters are sharded over it."""
    make = OPTIMIZERS[name]
    model, other = _model(layout), _model(layout)
    optimizer, hand = make(model.parameters()), _OnRank(other, make)
    masters = MasterParameters(optimizer, split=True)
    batch = {"TP": 0, "FSDP2 x TP": dist.get_rank() // 2}.get(layout, dist.get_rank())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, 10 * step + batch).backward()
        loss_of(other, 10 * step + batch).backward()
        optimizer.step()
        hand.step()
    _compare(model, optimizer, masters, hand)
    return [_local(p).detach().double().sum().item() for p in model.parameters()]


@pytest.mark.parametrize(
    "name",
    [
        "AdamW fused",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("AdamW", "SGD", "Adagrad")),
    ],
)
def test_200_steps_under_fsdp2_are_those_by_hand_on_each_shard_to_the_bit(ranks2, name):
    ranks2.run(_train, "FSDP2", name, 200)


@pytest.mark.parametrize("layout", ["HSDP", "TP", "FSDP2 x TP"])
def test_in_every_layout_of_dtensors_they_are_those_by_hand_to_the_bit(ranks4, layout):
    found = ranks4.run(_train, layout, "AdamW", 10)
    if layout == "HSDP":
        assert found[0] == found[2]
        assert found[1] == found[3]


def _scaled(split: bool) -> list[float]:
    """A scaler, a norm of the whole model, and an overflow of one rank in the second step."""
    model, whole = _model("FSDP2"), half_mlp(0, BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    MasterParameters(optimizer, split=split)
    scaler, norms = master_scaler(), []
    for step in range(3):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
        scaler.scale(loss_of(model, step, factor)).backward()
        if step == 0:
            loss_of(whole, 0).backward()
            expected = torch.stack([p.grad.double().square().sum() for p in whole.parameters()])
            norm = scaler.clip_grad_norm_(optimizer, 0.01)
            assert norm.item() == pytest.approx(expected.sum().sqrt().item(), rel=2e-2)
            norms.append(norm.item())
        scaler.step(optimizer)
        assert scaler.stepped(optimizer) is (step != 1)
        scaler.update()
    return norms


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_scaler_skips_on_all_ranks_and_clips_by_the_norm_of_the_whole(ranks2, split):
    first, second = ranks2.run(_scaled, split)
    assert first == second


def _partial(split: bool) -> float:
    """The gradient of a replicated parameter that each rank has a summand of."""
    weight = nn.Parameter(distribute_tensor(torch.zeros(3, dtype=BF16), mesh((2,), ("tensor",))))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    MasterParameters(optimizer, split=split)
    scaler = master_scaler(2.0)
    scaler.scale(torch.ones(()))
    summand = torch.full((3,), 2.0 * (dist.get_rank() + 1), dtype=BF16)
    weight.grad = DTensor.from_local(summand, weight.device_mesh, [Partial()])
    scaler.step(optimizer)
    return weight.to_local()[0].item()


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_gradient_of_which_each_rank_has_a_summand_is_stepped_by_the_sum(ranks2, split):
    """As the norms of sequence parallel have it."""
    assert ranks2.run(_partial, split) == [-3.0, -3.0]


# -- checkpoints -----------------------------------------------------------------------------------


class _Job:
    def __init__(self, split: bool, seed: int = 0) -> None:
        self.model = _model("FSDP2", seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.masters = MasterParameters(self.optimizer, split=split)

    def train(self, *steps: int) -> _Job:
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, 10 * step + dist.get_rank()).backward()
            self.optimizer.step()
        return self

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "masters": self.masters}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, folder: str) -> _Job:
        """The optimizer's state must be there to be loaded into, as dcp wants it."""
        state = self.train(7).state()
        dcp.load(state, checkpoint_id=folder)
        self.optimizer.load_state_dict(state["optimizer"])
        self.masters.load_state_dict(state["masters"])
        self.model.load_state_dict(state["model"])
        return self


def _resumed(folder: str, wrote: bool, reads: bool) -> bool:
    whole = _Job(wrote).train(0, 1, 2, 3)
    dcp.save(_Job(wrote).train(0, 1).state(), checkpoint_id=folder)
    resumed = _Job(reads, seed=1).load(folder).train(2, 3)
    ours, theirs = resumed.masters.state_dict(), whole.masters.state_dict()
    return all(
        same_bits(_local(mine), _local(theirs["masters"][number]))
        for number, mine in ours["masters"].items()
    )


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_sharded_run_goes_on_to_the_bit_by_torchs_distributed_checkpoint(ranks2, split):
    folder = tempfile.mkdtemp()
    try:
        assert ranks2.run(_resumed, folder, split, split) == [True, True]
    finally:
        shutil.rmtree(folder)


@torch.no_grad()
def _written(write: str, split: bool) -> bool:
    """Whether a step keeps what was written to the weights before it."""
    model = _model("FSDP2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    MasterParameters(optimizer, split=split)
    weights = {name: torch.full_like(p, 0.25) for name, p in model.state_dict().items()}
    if write == "load_state_dict":
        model.load_state_dict(weights)
    elif write == "in place":  # as dcp.load(model.state_dict()) does
        for name, tensor in model.state_dict().items():
            tensor.to_local().copy_(weights[name].to_local())
    else:
        torch._foreach_lerp_(list(model.parameters()), list(weights.values()), 1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return all((p.full_tensor() == 0.25).all() for p in model.parameters())


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("write", ["load_state_dict", "in place", "foreach"])
def test_what_was_written_to_sharded_weights_stays(ranks2, write, split):
    assert ranks2.run(_written, write, split) == [True] * 2
