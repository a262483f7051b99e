"""Writes to masters outside of ``step``: by methods of the optimizer, and by other code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp import StepGuard
from distamp.errors import CallOrderError
from distamp.scaler import MasterParameters, master_params
from tests.on_ranks import on_ranks
from tests.scaler.masters import ByHand, half_away, half_mlp, local, loss_of, one_master, spread

BF16 = torch.bfloat16
SPLIT = pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])


class Averaging(torch.optim.SGD):
    """SGD with an ``eval`` that writes a mean of its weights, and a ``train`` that undoes it."""

    @torch.no_grad()
    def eval(self) -> None:
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["trained"] = weight.clone()
            weight.lerp_(torch.ones_like(weight), 0.1)

    @torch.no_grad()
    def train(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.copy_(self.state[weight].pop("trained"))


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as its users write it, around an optimizer that steps."""

    def __init__(self, params: Iterable[Tensor], lr: float, rho: float) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["old"] = weight.clone()
            weight.add_(weight.grad, alpha=self.param_groups[0]["rho"])
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.copy_(self.state[weight]["old"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


def averaging(params: Iterable[Tensor]) -> Averaging:
    return Averaging(params, lr=0.1)


def sam(params: Iterable[Tensor]) -> SAM:
    return SAM(params, lr=0.1, rho=0.5)


class Pair:
    """A model with masters, and the same model trained by hand."""

    def __init__(self, make: Callable[..., Any], split: bool, layout: str) -> None:
        self.models = [spread(half_mlp(dtype=BF16), layout) for _ in range(2)]
        self.optimizer = make(self.models[0].parameters())
        self.masters = MasterParameters(self.optimizer, split=split)
        self.hand = ByHand(self.models[1].parameters(), make, split)
        self.rank = dist.get_rank() if layout else 0

    def backward(self, batch: int) -> None:
        self.hand.zero_grad()
        for model in self.models:
            loss_of(model, 10 * batch + self.rank).backward()

    def call(self, method: str) -> None:
        """Call a method of both optimizers, and write the weights by hand into their model."""
        getattr(self.optimizer, method)()
        with torch.no_grad():
            getattr(self.hand.optimizer, method)()
            for parameter, copy in zip(self.hand.parameters, self.hand.copies, strict=True):
                local(parameter).copy_(self.hand.rounded(copy))

    def are_equal(self) -> bool:
        ours, theirs = (model.parameters() for model in self.models)
        return all(torch.equal(local(a), local(b)) for a, b in zip(ours, theirs, strict=True))


def _average(split: bool, layout: str = "") -> None:
    pair = Pair(averaging, split, layout)
    for step in range(3):
        pair.optimizer.zero_grad()
        pair.backward(step)
        pair.hand.unscale(1.0)
        pair.call("step")
        trained = local(pair.models[0][0].weight.detach()).clone()
        pair.call("eval")
        assert pair.are_equal()
        assert not torch.equal(local(pair.models[0][0].weight), trained)
        pair.call("train")
        assert pair.are_equal()


def _ascend(split: bool, layout: str = "", unscales: bool = False) -> None:
    pair, guard = Pair(sam, split, layout), StepGuard()
    for step in range(3):
        for method in ("first_step", "second_step"):
            pair.backward(step)
            pair.hand.unscale(1.0)
            if unscales:
                guard.unscale_(pair.optimizer)
            pair.call(method)
            assert pair.are_equal(), method
            pair.optimizer.zero_grad()
            if unscales:
                guard.update()


@SPLIT
def test_the_model_has_what_eval_and_train_write_when_they_return(split):
    _average(split)


@SPLIT
def test_the_model_has_what_eval_of_schedulefree_writes(split):
    schedulefree = pytest.importorskip("schedulefree")
    pair = Pair(lambda ps: schedulefree.SGDScheduleFree(ps, lr=0.1, foreach=False), split, "")
    pair.call("train")
    for step in range(3):
        pair.backward(step)
        pair.hand.unscale(1.0)
        pair.call("step")
    trained = pair.models[0][0].weight.detach().clone()
    pair.call("eval")
    assert pair.are_equal()
    assert not torch.equal(pair.models[0][0].weight, trained)


@SPLIT
@pytest.mark.parametrize("unscales", [False, True])
def test_the_two_steps_of_sam_are_those_of_float32(split, unscales):
    _ascend(split, unscales=unscales)


@pytest.mark.parametrize(
    ("run", "split"),
    [
        pytest.param(_average, False, id="_average-whole"),
        pytest.param(_ascend, True, id="_ascend-split", marks=pytest.mark.slow),
        pytest.param(_average, True, id="_average-split", marks=pytest.mark.slow),
        pytest.param(_ascend, False, id="_ascend-whole", marks=pytest.mark.slow),
    ],
)
def test_methods_reach_the_shards_of_fsdp2(ranks2, run, split):
    ranks2.run(run, split, "FSDP2")


class Scaling(torch.optim.SGD):
    """SGD with a method that writes gradients, one that steps, and one that raises."""

    def halve_gradients(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.grad.mul_(0.5)

    def halve_and_step(self) -> None:
        self.halve_gradients()
        self.step()

    def write_and_raise(self) -> None:
        with torch.no_grad():
            self.param_groups[0]["params"][0].fill_(8.0)
        raise KeyError("on purpose")


@SPLIT
def test_methods_may_write_gradients_and_step_and_raise(split):
    parameter = nn.Parameter(torch.zeros(1, dtype=BF16))
    optimizer = Scaling([parameter], lr=1.0)
    MasterParameters(optimizer, split=split)
    parameter.grad = torch.ones_like(parameter)
    optimizer.halve_gradients()
    assert parameter.grad.item() == 0.5
    optimizer.step()
    assert parameter.item() == -0.5
    parameter.grad = torch.ones_like(parameter)
    optimizer.halve_and_step()
    assert parameter.item() == -1.0
    optimizer.zero_grad()
    with pytest.raises(KeyError, match="on purpose"):
        optimizer.write_and_raise()
    assert parameter.item() == 8.0
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert parameter.item() == 7.0


def test_a_direct_write_to_whole_masters_reaches_the_model_by_zero_grad():
    parameter, optimizer, masters = one_master(1.0)
    with torch.no_grad():
        masters.master_of(parameter).add_(2.0)
    optimizer.zero_grad()
    assert parameter.item() == 3.0
    with torch.no_grad():
        parameter.fill_(5.0)  # a write to the model is followed, and not undone
    optimizer.zero_grad()
    assert parameter.item() == 5.0


WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda master: master.add_(1.0),
    "copy_": lambda master: master.copy_(torch.ones_like(master)),
    "an index": lambda master: master.__setitem__(0, 1.0),
    "data": lambda master: setattr(master, "data", torch.ones_like(master)),
    "of data": lambda master: master.data.mul_(2.0),
    "detach": lambda master: master.detach().mul_(2.0),
    "foreach": lambda master: torch._foreach_mul_([master], 2.0),
    "out": lambda master: torch.add(torch.ones_like(master), 1.0, out=master),
}


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_a_direct_write_to_split_masters_is_refused_with_the_way(write):
    parameter, optimizer, masters = one_master(1.0, 2.0, split=True)
    (master,) = master_params(optimizer)
    with pytest.raises(CallOrderError, match=r"with masters\.materialized\(\)"):
        WRITES[write](master)
    with masters.materialized():
        assert type(master) is Tensor
        master.add_(1.0)
    assert parameter.tolist() == [2.0, 3.0]


@on_ranks(2)
@torch.no_grad()
def test_a_direct_write_to_split_masters_of_shards_is_refused_with_the_way():
    model = spread(half_mlp(dtype=BF16), "FSDP2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    masters = MasterParameters(optimizer, split=True)
    for master in master_params(optimizer):
        for written in (master, master.to_local()):
            with pytest.raises(CallOrderError, match=r"with masters\.materialized\(\)"):
                written.add_(1.0)
    before = local(model[0].weight).clone()
    with masters.materialized():
        for master in master_params(optimizer):
            master.add_(1.0)
    assert torch.equal(local(model[0].weight), half_away(before.float() + 1.0))
