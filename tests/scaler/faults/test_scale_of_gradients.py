"""Each optimizer is unscaled by the scale that its gradients were made with, compiled or not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler
from distamp.errors import StageError
from distamp.scaler import MasterParameters
from tests.ranks import RankPool, mesh
from tests.scaler.faults.tools import error_of
from tests.scaler.steps import INF, backward, cpu_scaler, leaf, torch_scaler


def _pair_of_optimizers(fused: bool = False) -> tuple[list[nn.Parameter], list[torch.optim.SGD]]:
    parameters = [leaf(1.0), leaf(1.0)]
    return parameters, [torch.optim.SGD([p], lr=1.0, fused=fused) for p in parameters]


def _moves_in_between(
    scaler: DistGradScaler, how: str, first: float, fused: bool
) -> tuple[Any, ...]:
    """Manual optimisation: both backward, then step and update of each in turn."""
    (p, q), (a, b) = _pair_of_optimizers(fused)
    backward(scaler, p, first)
    backward(scaler, q, 0.25)
    scaler.step(a)
    scaler.update()
    left = None
    if how == "unscale":
        scaler.unscale_(b)
        left = q.grad.item()
    elif how == "clip":
        left = scaler.clip_grad_norm_(b, 100.0).item()
    scaler.step(b)
    scaler.update()
    return left, q.item(), scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("how", ["step", "unscale", "clip"])
@pytest.mark.parametrize("first", [INF, 0.25], ids=["backs off", "grows"])
def test_an_optimizer_stepped_after_update_is_unscaled_by_its_own_scale(
    how: str, first: float, fused: bool
) -> None:
    left, value, scale = _moves_in_between(cpu_scaler(growth_interval=1), how, first, fused)
    assert value == 0.75
    assert left is None if how == "step" else left == 0.25
    assert scale == (1024.0 if first == INF else 4096.0)


def _on_ranks(how: str) -> Any:
    first = INF if dist.get_rank() == 1 else 0.25
    return _moves_in_between(cpu_scaler(growth_interval=1), how, first, False)[1:]


@pytest.mark.parametrize("how", ["step", "unscale", "clip"])
def test_the_same_where_ranks_agree(pair: RankPool, how: str) -> None:
    assert pair.run(_on_ranks, how) == [(0.75, 1024.0)] * 2


def test_a_new_scale_by_hand_counts_too() -> None:
    (p, q), (a, b) = _pair_of_optimizers()
    scaler = cpu_scaler()
    backward(scaler, p, 0.25)
    backward(scaler, q, 0.25)
    scaler.step(a)
    scaler.update(16.0)
    scaler.step(b)
    assert q.item() == 0.75


def test_masters_are_unscaled_by_their_own_scale() -> None:
    p, q = leaf(1.0), leaf(1.0, dtype=torch.float16)
    a, b = torch.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0)
    MasterParameters(b)
    scaler = cpu_scaler(fp16_grads="master")
    backward(scaler, p, INF)
    backward(scaler, q, 0.25)
    scaler.step(a)
    scaler.update()
    scaler.step(b)
    scaler.update()
    assert q.item() == 0.75


# -- accumulation over a change of scale -----------------------------------------------------------


def _accumulates(first: float, growth_interval: int, zeroed: str) -> tuple[Any, ...]:
    """Gradients of b are made, the scale moves (or not), and more are added or replace them."""
    (p, q), (a, b) = _pair_of_optimizers()
    scaler = cpu_scaler(growth_interval=growth_interval)
    backward(scaler, p, first)
    backward(scaler, q, 0.25)
    scaler.step(a)
    scaler.update()
    if zeroed == "to None":
        b.zero_grad()
    elif zeroed == "in place":
        b.zero_grad(set_to_none=False)
    elif zeroed == "by hand":
        q.grad = torch.zeros_like(q)
    elif zeroed == "through data":
        q.grad.data.zero_()
    elif zeroed == "through numpy":
        q.grad.numpy().fill(0.0)
    backward(scaler, q, 0.125)
    error = error_of(scaler.step, b)
    return error, q.item()


def test_accumulation_over_an_update_that_left_the_scale_alone_is_a_sum() -> None:
    assert _accumulates(0.25, 2000, "never") == (None, 1.0 - 0.375)


@pytest.mark.parametrize(
    "zeroed", ["to None", "in place", "by hand", "through data", "through numpy"]
)
@pytest.mark.parametrize(("first", "growth_interval"), [(INF, 2000), (0.25, 1)])
def test_gradients_that_were_zeroed_are_of_the_new_scale(
    first: float, growth_interval: int, zeroed: str
) -> None:
    assert _accumulates(first, growth_interval, zeroed) == (None, 0.875)


def test_accumulation_within_one_iteration_goes_on_after_a_skipped_one() -> None:
    """The loop of torch's documentation: zero_grad once per effective batch."""
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = cpu_scaler()
    for gradients in ((0.125, INF), (0.125, 0.125), (0.25, 0.25)):
        for gradient in gradients:
            backward(scaler, parameter, gradient)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (parameter.item(), scaler.get_scale()) == (0.25, 512.0)


# -- optimizers that are not stepped in every iteration --------------------------------------------


def _copied(scaler: Any, parameter: Tensor, gradient: float) -> None:
    (new,) = torch.autograd.grad(scaler.scale((parameter * gradient).sum()), parameter)
    parameter.grad.copy_(new)


def _copied_through_data(scaler: Any, parameter: Tensor, gradient: float) -> None:
    (new,) = torch.autograd.grad(scaler.scale((parameter * gradient).sum()), parameter)
    parameter.grad.data.copy_(new)


def _set_through_data(scaler: Any, parameter: Tensor, gradient: float) -> None:
    (new,) = torch.autograd.grad(scaler.scale((parameter * gradient).sum()), parameter)
    parameter.grad.data = new


def _zeroed_through_data(scaler: Any, parameter: Tensor, gradient: float) -> None:
    parameter.grad.data.zero_()
    backward(scaler, parameter, gradient)


def _scaled_by_hand(scaler: Any, parameter: Tensor, gradient: float) -> None:
    parameter.grad.zero_()
    (parameter * gradient * scaler.get_scale()).sum().backward()


WAYS = [_copied, _copied_through_data, _set_through_data, _zeroed_through_data, _scaled_by_hand]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [0.25, INF], ids=["grows", "backs off"])
def test_gradients_that_were_stepped_are_not_left_behind(
    way: Callable[[Any, Tensor, float], None], first: float
) -> None:
    """One optimizer of two steps every second time, and its gradients are never set to None."""
    values = []
    for scaler in (cpu_scaler(growth_interval=1), torch_scaler(growth_interval=1)):
        (p, q), (a, b) = _pair_of_optimizers()
        q.grad = torch.zeros_like(q)
        for number in range(4):
            a.zero_grad()
            backward(scaler, p, first if number == 1 else 0.25)
            if number % 2 == 0:
                way(scaler, q, 0.25 * (number + 1))
                scaler.step(b)
            scaler.step(a)
            scaler.update()
        values.append((p.item(), q.item(), scaler.get_scale()))
    assert values[0] == values[1]
    assert values[0][1] == 0.0


def test_gradients_made_after_step_and_before_update_keep_their_scale() -> None:
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = cpu_scaler(growth_interval=1)
    backward(scaler, parameter, 0.25)
    scaler.step(optimizer)
    optimizer.zero_grad()
    backward(scaler, parameter, 0.5)
    scaler.update()
    scaler.step(optimizer)
    assert parameter.item() == 0.25


def test_a_stage_that_is_set_back_begins_anew() -> None:
    """As is done to take a second step of an iteration with torch's scaler."""
    values = []
    for scaler in (cpu_scaler(), torch_scaler()):
        parameter = leaf(1.0)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        backward(scaler, parameter, 0.25)
        scaler.unscale_(optimizer)
        optimizer.zero_grad()
        backward(scaler, parameter, 0.5)
        scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        values.append(parameter.item())
    assert values == [0.5, 0.5]


# -- scale() inside torch.compile ------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, backend="eager")


def _scaled_loss(scaler: Any, compiled: bool) -> Callable[[Tensor, float], Tensor]:
    def loss_of(parameter: Tensor, gradient: float) -> Tensor:
        return scaler.scale((parameter.float() * gradient).sum())

    return _compiled(loss_of) if compiled else loss_of


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_backward_after_unscale_is_seen(compiled: bool) -> None:
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = cpu_scaler()
    scaled = _scaled_loss(scaler, compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaled(parameter, 0.25).backward()
        scaler.unscale_(optimizer)
        scaled(parameter, 0.25).backward()
    with pytest.raises(StageError, match="after unscale_"):
        scaler.step(optimizer)
    assert parameter.item() == 1.0


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_masters_see_zero_grad(compiled: bool) -> None:
    parameter = leaf(4.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    MasterParameters(optimizer)
    scaler = cpu_scaler(fp16_grads="master")
    scaled = _scaled_loss(scaler, compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaled(parameter, 2.0).backward()
        optimizer.zero_grad()  # thrown away without a step
        scaled(parameter, 2.0).backward()
        scaler.step(optimizer)
    assert parameter.item() == 2.0


def test_the_scale_that_compiled_code_used_is_the_one_gradients_are_divided_by() -> None:
    (p, q), (a, b) = _pair_of_optimizers()
    scaler = cpu_scaler()
    scaled = _scaled_loss(scaler, True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaled(p, INF).backward()
        scaled(q, 0.25).backward()
        scaler.step(a)
        scaler.update()
        scaler.step(b)
    assert q.item() == 0.75


@pytest.mark.parametrize("how", ["step", "unscale", "clip"])
@pytest.mark.parametrize("first", [INF, 0.25], ids=["backs off", "grows"])
def test_an_optimizer_first_seen_after_update_is_unscaled_by_its_own_scale(
    how: str, first: float
) -> None:
    """One optimizer trains alone for a while; another joins, and is stepped after update()."""
    (p, q), (a, b) = _pair_of_optimizers()
    scaler = cpu_scaler(growth_interval=1)
    backward(scaler, p, 0.25)
    scaler.step(a)
    scaler.update()
    a.zero_grad()
    backward(scaler, p, first)
    backward(scaler, q, 0.25)
    scaler.step(a)
    scaler.update()
    if how == "unscale":
        scaler.unscale_(b)
    elif how == "clip":
        scaler.clip_grad_norm_(b, 100.0)
    scaler.step(b)
    assert q.item() == 0.75


@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="its compiler fails on a process group that is None"
)
def test_an_update_inside_a_compiled_step_moves_the_scale() -> None:
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = cpu_scaler(growth_interval=1)

    def one_step(gradient: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale((parameter * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    compiled = _compiled(one_step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for gradient in (0.25, INF, 0.25):
            compiled(torch.tensor(gradient))
    assert (parameter.item(), scaler.get_scale()) == (0.5, 2048.0)


# -- FSDP2, which adds to what a DTensor holds; tensor parallel, which adds to the DTensor ---------


def _sharded(kind: str) -> nn.Module:
    if kind == "FSDP2":
        return fully_shard(nn.Linear(4, 4), mesh=mesh((2,), ("shard",)))
    return parallelize_module(nn.Linear(4, 4), mesh((2,), ("shard",)), ColwiseParallel())


KINDS = ["FSDP2", "TP"]


def _leaves_out_a_step(wrap: Callable[[nn.Module], nn.Module], set_to_none: bool) -> Any:
    """The scale is set by hand in an iteration without a step."""
    values = []
    for scaler in (cpu_scaler(), torch_scaler()):
        torch.manual_seed(0)
        model = wrap(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
            if number == 1:
                scaler.update(64.0)
                continue
            scaler.step(optimizer)
            scaler.update()
        weight = next(model.parameters())
        values.append(getattr(weight, "full_tensor", lambda w=weight: w)().detach().clone())
    return values


def _without_a_step_on_dtensors(kind: str, set_to_none: bool) -> Any:
    return _leaves_out_a_step(lambda _: _sharded(kind), set_to_none)


def _without_a_step_in_bucket_views(set_to_none: bool) -> Any:
    return _leaves_out_a_step(
        lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True), set_to_none
    )


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "bucket views"])
def test_gradients_of_a_step_left_out_are_gone_once_zeroed(
    ranks: Callable[[int], RankPool], kind: str, set_to_none: bool
) -> None:
    if kind == "bucket views":
        found = ranks(2).run(_without_a_step_in_bucket_views, set_to_none)
    else:
        found = ranks(2).run(_without_a_step_on_dtensors, kind, set_to_none)
    for ours, theirs in found:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
