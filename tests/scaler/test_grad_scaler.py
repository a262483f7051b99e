"""The whole scaler: steps against float64, what can be asked of them, and the peers' faults."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp.errors import StageError
from distamp.scaler import StepCounts
from tests.scaler.reference import KINDS, Kind
from tests.scaler.steps import (
    INF,
    NAN,
    backward,
    cpu_scaler,
    iteration,
    leaf,
    pairs,
    sgd,
    torch_scaler,
)

FLAG_SLOTS = 16  # optimizers whose flags share the first message of two ranks

# -- kept steps ------------------------------------------------------------------------------------

CPU_KINDS = [kind for kind in KINDS.values() if "capturable" not in kind.name]
ORDERS = ["step", "unscale", "clip", "torch's clip"]


class Fit:
    """A small regression, in any dtype, with or without a scaler."""

    def __init__(self, kind: Kind, dtype: torch.dtype, reference: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.dtype = dtype
        self.data = torch.randn(6, 8, 5, generator=generator).to(dtype)
        first = torch.randn(5, 4, generator=generator).mul(0.3).to(dtype)
        second = torch.randn(4, 1, generator=generator).mul(0.3).to(dtype)
        self.parameters = [nn.Parameter(first), nn.Parameter(second)]
        settings = {"foreach": False} if reference else kind.implementation
        self.optimizer = kind.cls(self.parameters, **kind.settings, **settings)

    def loss(self, index: int) -> Tensor:
        first, second = self.parameters
        return (torch.tanh(self.data[index] @ first) @ second - 1.0).square().mean()

    def run(self, scaler: Any, order: str, skipped: tuple[int, ...] = ()) -> list[Tensor]:
        for index in range(len(self.data)):
            self.optimizer.zero_grad()
            scaler.scale(self.loss(index)).backward()
            if index in skipped:
                assert self.parameters[1].grad is not None
                self.parameters[1].grad[2] = NAN
            if order in ("unscale", "torch's clip"):
                scaler.unscale_(self.optimizer)
            if order == "clip":
                scaler.clip_grad_norm_(self.optimizer, 0.5)
            if order == "torch's clip":
                nn.utils.clip_grad_norm_(self.parameters, 0.5)
            scaler.step(self.optimizer)
            scaler.update()
        return [p.detach().clone() for p in self.parameters]

    def without_scaler(self, order: str, skipped: tuple[int, ...] = ()) -> list[Tensor]:
        for index in range(len(self.data)):
            if index in skipped:
                continue
            self.optimizer.zero_grad()
            self.loss(index).backward()
            if "clip" in order:
                nn.utils.clip_grad_norm_(self.parameters, 0.5)
            self.optimizer.step()
        return [p.detach().clone() for p in self.parameters]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", CPU_KINDS, ids=lambda kind: kind.name)
def test_steps_are_those_of_float64_without_a_scaler(kind, order):
    expected = Fit(kind, torch.float64, reference=True).without_scaler(order, skipped=(2,))
    got = Fit(kind, torch.float32).run(cpu_scaler(2.0**16), order, skipped=(2,))
    torch.testing.assert_close([p.double() for p in got], expected, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("order", ["step", "unscale"])
@pytest.mark.parametrize("kind", CPU_KINDS, ids=lambda kind: kind.name)
def test_in_one_process_every_bit_is_torchs(kind, order):
    ours = Fit(kind, torch.float32).run(cpu_scaler(2.0**16, growth_interval=2), order, (3,))
    theirs = Fit(kind, torch.float32).run(torch_scaler(2.0**16, growth_interval=2), order, (3,))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("kind", CPU_KINDS, ids=lambda kind: kind.name)
def test_a_skipped_step_changes_neither_parameters_nor_state(kind):
    fit, scaler = Fit(kind, torch.float32), cpu_scaler()
    fit.run(scaler, "step")
    state = fit.optimizer.state_dict()
    before = [p.detach().clone() for p in fit.parameters]
    copied = {
        (i, key): value.clone() if isinstance(value, Tensor) else value
        for i, entry in state["state"].items()
        for key, value in entry.items()
    }
    fit.optimizer.zero_grad()
    scaler.scale(fit.loss(0)).backward()
    fit.parameters[0].grad[0, 0] = -INF
    scaler.step(fit.optimizer)
    assert all(map(torch.equal, fit.parameters, before))
    for (i, key), value in copied.items():
        assert torch.equal(
            torch.as_tensor(fit.optimizer.state_dict()["state"][i][key]), torch.as_tensor(value)
        )


@pytest.mark.parametrize("value", [INF, -INF, NAN], ids=str)
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_one_bad_element_anywhere_skips_the_whole_step(value, where, fused):
    parameters = [leaf(1.0, 1.0), leaf(1.0), leaf(1.0, 1.0, 1.0)]
    optimizer = torch.optim.SGD(parameters, lr=1.0, fused=fused)
    scaler = cpu_scaler()
    for index, parameter in enumerate(parameters):
        backward(scaler, parameter, 0.25)
        if index == where:
            parameter.grad[-1] = value
    scaler.step(optimizer)
    assert all((p == 1.0).all() for p in parameters)


@pytest.mark.parametrize("fused", [False, True])
def test_finite_gradients_whose_squares_overflow_are_no_overflow(fused):
    parameter = leaf(1.0, 1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scaler = cpu_scaler(2.0**100)
    iteration(scaler, optimizer, parameter, 0.25)
    assert parameter.tolist() == [0.75, 0.75]


@pytest.mark.parametrize("fused", [False, True])
def test_an_empty_gradient_is_clean(fused):
    parameter, empty = leaf(1.0), nn.Parameter(torch.empty(0))
    optimizer = torch.optim.SGD([parameter, empty], lr=1.0, fused=fused)
    scaler = cpu_scaler()
    empty.grad = torch.empty(0)
    backward(scaler, parameter, 0.25)
    scaler.step(optimizer)
    assert parameter.item() == 0.75


def test_gradients_of_several_dtypes_share_one_decision():
    for value, expected in ((0.25, 0.75), (INF, 1.0)):
        parameters = [leaf(1.0, dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16)]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler = cpu_scaler()
        for parameter in parameters:
            backward(scaler, parameter, 0.25)
        parameters[2].grad.mul_(value * 4)
        scaler.step(optimizer)
        assert [p.item() for p in parameters] == [expected] * 3


def test_step_returns_what_the_optimizer_returns_and_passes_arguments_on():
    class Returns(torch.optim.SGD):
        def step(self, closure: Any = None, *, scale_by: float = 1.0) -> Any:
            super().step()
            return scale_by

    parameter = leaf(1.0)
    optimizer = Returns([parameter], lr=1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    assert scaler.step(optimizer, scale_by=3.0) == 3.0
    scaler.update()
    optimizer.zero_grad()
    backward(scaler, parameter, INF)
    assert scaler.step(optimizer, scale_by=3.0) is None


def test_an_optimizer_without_parameters_steps():
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([{"params": []}], lr=1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.stepped(optimizer)


def test_a_parameter_group_added_later_is_looked_at():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    iteration(scaler, optimizer, parameter, 0.25)
    late = leaf(1.0)
    optimizer.add_param_group({"params": [late]})
    optimizer.zero_grad()
    backward(scaler, parameter, 0.25)
    backward(scaler, late, INF)
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.item(), late.item(), scaler.get_scale()) == (0.75, 1.0, 512.0)


# -- sparse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("indices", [[0, 2], [2, 2]], ids=["coalesced", "duplicates"])
@pytest.mark.parametrize("unscale", [False, True])
def test_sparse_gradients_are_unscaled_as_dense_ones(dtype, indices, unscale):
    table = nn.Parameter(torch.ones(3, 2, dtype=dtype))
    optimizer = torch.optim.SGD([table], lr=1.0)
    scaler = cpu_scaler(1024.0, fp16_grads="inplace")
    scaler.scale(torch.ones(()))
    values = torch.tensor([[256.0, 512.0], [128.0, 0.0]], dtype=dtype)
    table.grad = torch.sparse_coo_tensor([indices], values, (3, 2), check_invariants=True)
    expected = torch.ones(3, 2).index_add(0, torch.tensor(indices), values.float() / -1024.0)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close(table.detach().float(), expected)


@pytest.mark.parametrize("coalesced", [False, True])
def test_an_overflow_in_a_sparse_gradient_skips(coalesced):
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    scaler = cpu_scaler()
    before = embedding.weight.detach().clone()
    scaler.scale((embedding(torch.tensor([1, 1, 3])) * torch.tensor([1.0, INF])).sum()).backward()
    if coalesced:
        embedding.weight.grad = embedding.weight.grad.coalesce()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(embedding.weight, before)
    assert scaler.get_scale() == 512.0


def test_fp16_duplicates_that_sum_beyond_fp16_are_an_overflow():
    """Each value is finite, their sum is not: 40000 + 40000 > 65504."""
    table = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = torch.optim.SGD([table], lr=1.0)
    scaler = cpu_scaler(fp16_grads="inplace")
    scaler.scale(torch.ones(()))
    values = torch.tensor([40000.0, 40000.0], dtype=torch.float16)
    table.grad = torch.sparse_coo_tensor([[1, 1]], values, (3,), check_invariants=True)
    scaler.step(optimizer)
    assert (table.tolist(), scaler.stepped(optimizer)) == ([1.0, 1.0, 1.0], False)


# -- several optimizers ----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["one by one", "step_all", "unscale_ of all"])
def test_each_optimizer_is_skipped_by_its_own_overflow_and_the_scale_moves_once(call):
    scaler = cpu_scaler()
    both = list(pairs(scaler, 0.25, INF, INF))
    optimizers = [optimizer for _, optimizer in both]
    if call == "step_all":
        assert scaler.step_all(optimizers) == [None] * 3
    else:
        if call == "unscale_ of all":
            scaler.unscale_(*optimizers)
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
    assert [p.item() for p, _ in both] == [0.75, 1.0, 1.0]
    assert [scaler.stepped(o) for o in optimizers] == [True, False, False]
    assert scaler.get_scale() == 512.0


def test_step_all_takes_some_that_are_unscaled_and_some_that_are_not():
    scaler = cpu_scaler()
    both = list(pairs(scaler, 0.25, 0.5))
    scaler.unscale_(both[0][1])
    scaler.step_all([optimizer for _, optimizer in both])
    scaler.update()
    assert [p.item() for p, _ in both] == [0.75, 0.5]


def test_step_all_takes_an_iterator_and_returns_what_each_step_returned():
    class Returns(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            return self.param_groups[0]["lr"]

    scaler, parameters = cpu_scaler(), [leaf(1.0), leaf(1.0)]
    optimizers = [Returns([p], lr=lr) for p, lr in zip(parameters, (0.5, 0.25), strict=True)]
    for parameter in parameters:
        backward(scaler, parameter, 1.0)
    assert scaler.step_all(iter(optimizers)) == [0.5, 0.25]


def test_step_all_refuses_what_step_refuses_and_steps_none():
    scaler = cpu_scaler()
    both = list(pairs(scaler, 0.25, 0.25))
    scaler.step(both[1][1])
    with pytest.raises(StageError, match=r"step\(\) has already been called"):
        scaler.step_all([optimizer for _, optimizer in both])
    assert [p.item() for p, _ in both] == [1.0, 0.75]


def test_more_optimizers_than_one_message_holds():
    scaler = cpu_scaler()
    both = list(pairs(scaler, *([0.25] * FLAG_SLOTS + [INF, 0.25])))
    scaler.step_all([optimizer for _, optimizer in both])
    assert [p.item() for p, _ in both] == [0.75] * FLAG_SLOTS + [1.0, 0.75]


# -- what can be asked -----------------------------------------------------------------------------


def test_stepped_found_inf_and_counts_of_each_iteration():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    seen = []
    for gradient in (0.0, INF, 0.0, NAN):
        iteration(scaler, optimizer, parameter, gradient)
        seen.append((scaler.stepped(optimizer), scaler.found_inf(optimizer).item()))
    assert seen == [(True, 0.0), (False, 1.0), (True, 0.0), (False, 1.0)]
    assert scaler.step_counts(optimizer) == StepCounts(taken=2, skipped=2)


def test_counts_are_kept_for_each_optimizer():
    scaler = cpu_scaler()
    both = list(pairs(scaler, 0.25, INF))
    for _, optimizer in both:
        scaler.step(optimizer)
    assert [scaler.step_counts(o) for _, o in both] == [StepCounts(1, 0), StepCounts(0, 1)]
    with pytest.raises(StageError, match=r"step_counts\(\) was called before"):
        scaler.step_counts(sgd(1.0)[1])


def test_found_inf_is_a_0_d_flag_known_from_unscale_on():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    for gradient in (0.25, INF):
        optimizer.zero_grad()
        backward(scaler, parameter, gradient)
        scaler.unscale_(optimizer)
        flag = scaler.found_inf(optimizer)
        assert (flag.shape, flag.dtype) == ((), torch.float32)
        assert flag.item() == float(gradient == INF)
        scaler.step(optimizer)
        scaler.update()
        assert flag.item() == float(gradient == INF), "the next iteration leaves it alone"


def test_questions_before_their_time_are_named():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    with pytest.raises(StageError, match=r"stepped\(\) was called before step\(\)"):
        scaler.stepped(optimizer)
    with pytest.raises(StageError, match=r"found_inf\(\) was called before"):
        scaler.found_inf(optimizer)
    backward(scaler, parameter, 0.25)
    scaler.unscale_(optimizer)
    assert scaler.found_inf(optimizer).item() == 0.0
    with pytest.raises(StageError, match=r"stepped\(\) was called before step\(\)"):
        scaler.stepped(optimizer)


def test_a_schedule_gated_by_stepped_does_not_advance_on_a_skip_as_it_does_under_torch():
    rates = {}
    for name, scaler in (("ours", cpu_scaler()), ("torch's", torch_scaler())):
        parameter, optimizer = sgd(1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
        for gradient in (0.0, INF, INF, 0.0):
            iteration(scaler, optimizer, parameter, gradient)
            if name == "torch's" or scaler.stepped(optimizer):
                schedule.step()
        rates[name] = optimizer.param_groups[0]["lr"]
    assert rates == {"ours": 1 / 3, "torch's": 1 / 5}


def test_the_scaler_keeps_no_optimizer_alive():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    iteration(scaler, optimizer, parameter, 0.25)
    reference = weakref.ref(optimizer)
    del optimizer
    import gc

    gc.collect()
    assert reference() is None


# -- before the first step -----------------------------------------------------------------------


def test_is_unscaled_from_unscale_until_the_step():
    scaler = cpu_scaler()
    parameter, optimizer = sgd()
    assert not scaler.is_unscaled(optimizer)
    backward(scaler, parameter, 1.0)
    assert not scaler.is_unscaled(optimizer)
    scaler.unscale_(optimizer)
    assert scaler.is_unscaled(optimizer)
    scaler.step(optimizer)
    assert not scaler.is_unscaled(optimizer)


def test_an_optimizer_added_before_its_first_step_is_known():
    scaler = cpu_scaler()
    parameter, optimizer = sgd()
    scaler.add_optimizer(optimizer)
    scaler.add_optimizer(optimizer)
    assert scaler.step_counts(optimizer) == StepCounts(taken=0, skipped=0)
    iteration(scaler, optimizer, parameter, 1.0)
    assert scaler.step_counts(optimizer) == StepCounts(taken=1, skipped=0)
    with pytest.raises(TypeError):
        scaler.add_optimizer([optimizer])


def test_a_disabled_scaler_knows_no_optimizer_as_unscaled():
    scaler = cpu_scaler(enabled=False)
    _, optimizer = sgd()
    scaler.add_optimizer(optimizer)
    scaler.unscale_(optimizer)
    assert not scaler.is_unscaled(optimizer)


# -- closures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True], ids=["position", "name"])
def test_a_closure_is_refused_before_anything_changes(by_name):
    scaler, calls = cpu_scaler(), []
    parameter, optimizer = sgd(1.0)
    backward(scaler, parameter, 0.25)
    given = {"closure": lambda: calls.append(1)}
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, **given) if by_name else scaler.step(optimizer, *given.values())
    assert calls == []
    assert parameter.grad.item() == 0.25 * 1024.0
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.75
