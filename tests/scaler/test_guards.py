"""What stands between a mistake around the scaler and a wrong number; torch's own beside it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from distamp.errors import StageError
from tests.scaler.steps import INF, backward, cpu_scaler, leaf, sgd, torch_scaler

LATE = r"backward\(\) through a scaled loss added gradients after unscale_\(\)"


# -- backward after unscale_ -----------------------------------------------------------------------


def test_backward_after_unscale_is_refused_and_nothing_is_stepped():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, 1.0)
    scaler.unscale_(optimizer)
    backward(scaler, parameter, 1.0)
    with pytest.raises(StageError, match=LATE):
        scaler.step(optimizer)
    assert parameter.item() == 1.0


def test_backward_after_unscale_is_refused_where_there_was_no_gradient_before():
    first, second = leaf(1.0), leaf(1.0)
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    scaler = cpu_scaler()
    backward(scaler, first, 1.0)
    scaler.unscale_(optimizer)
    backward(scaler, second, 1.0)
    with pytest.raises(StageError, match=LATE):
        scaler.step(optimizer)


def test_backward_after_clip_is_refused():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, 1.0)
    scaler.clip_grad_norm_(optimizer, 1.0)
    backward(scaler, parameter, 1.0)
    with pytest.raises(StageError, match=LATE):
        scaler.step(optimizer)


def test_every_leaf_of_a_structure_is_watched():
    for pick in range(2):
        parameter, optimizer = sgd(1.0)
        scaler = cpu_scaler()
        backward(scaler, parameter, 1.0)
        scaler.unscale_(optimizer)
        losses = scaler.scale([parameter.sum(), {"b": parameter.sum()}])
        (losses[0] if pick == 0 else losses[1]["b"]).backward()
        with pytest.raises(StageError, match=LATE):
            scaler.step(optimizer)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_backward_after_unscale_is_refused_for_every_implementation(options):
    parameter = leaf(1.0)
    optimizer = torch.optim.AdamW([parameter], **options)
    scaler = cpu_scaler()
    backward(scaler, parameter, 1.0)
    scaler.unscale_(optimizer)
    backward(scaler, parameter, 1.0)
    with pytest.raises(StageError, match=LATE):
        scaler.step(optimizer)
    assert parameter.item() == 1.0


def test_the_iteration_after_a_refusal_is_right():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, 1.0)
    scaler.unscale_(optimizer)
    backward(scaler, parameter, 1.0)
    with pytest.raises(StageError):
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    backward(scaler, parameter, 0.25)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.75


# No false alarm.


def test_another_optimizers_loss_may_be_backpropagated_between():
    parameter, optimizer = sgd(1.0)
    other, other_optimizer = sgd(1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    scaler.unscale_(optimizer)
    backward(scaler, other, 0.5)
    scaler.step(optimizer)
    scaler.step(other_optimizer)
    scaler.update()
    assert (parameter.item(), other.item()) == (0.75, 0.5)


def test_one_graph_kept_for_two_backwards_before_unscale_accumulates():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    loss = scaler.scale((parameter * 0.25).sum())
    loss.backward(retain_graph=True)
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.5


def test_a_backward_that_reads_the_parameters_and_adds_nothing_to_them_is_fine():
    """A generator's loss through a discriminator whose gradients are not asked for."""
    discriminator, discriminator_optimizer = sgd(2.0)
    generator, generator_optimizer = sgd(1.0)
    scaler = cpu_scaler()
    backward(scaler, discriminator, 0.25)
    scaler.unscale_(discriminator_optimizer)
    loss = (generator * discriminator).sum()
    scaler.scale(loss).backward(inputs=[generator])
    scaler.step(discriminator_optimizer)
    scaler.step(generator_optimizer)
    scaler.update()
    assert (discriminator.item(), generator.item()) == (1.75, -1.0)


def test_grad_through_a_scaled_loss_adds_nothing_and_is_fine():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    scaler.unscale_(optimizer)
    torch.autograd.grad(scaler.scale((parameter * 3).sum()), parameter)
    scaler.step(optimizer)
    assert parameter.item() == 0.75


def test_a_gradient_penalty_is_as_without_a_scaler():
    steps = []
    for scaler in (cpu_scaler(2.0**16), cpu_scaler(enabled=False)):
        torch.manual_seed(0)
        model, inputs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.ones(2, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            scaled = torch.autograd.grad(
                scaler.scale(loss), list(model.parameters()), create_graph=True
            )
            gradients = [g / scaler.get_scale() for g in scaled]
            penalty = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            scaler.scale(loss + penalty).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        steps.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(steps[0], steps[1])


def test_accumulation_over_iterations_without_update_between_is_right():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    for _ in range(4):
        backward(scaler, parameter, 0.0625)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.75


def test_a_new_iterations_backward_after_step_is_fine():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    for _ in range(3):
        optimizer.zero_grad()
        backward(scaler, parameter, 0.25)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert parameter.item() == 0.25


def test_a_forgotten_optimizer_unscaled_but_never_stepped_is_begun_anew_by_update():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, INF)
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    optimizer.zero_grad()
    backward(scaler, parameter, 0.25)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert parameter.item() == 0.75


# -- wrapper and inner optimizer -------------------------------------------------------------------


def zero_with(
    scaler: Any, unscale: Callable[[Any], Any], step: Callable[[Any], Any], inf_on: int | None
) -> list[float]:
    parameters = [leaf(1.0), leaf(1.0)]
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=1.0)
    for parameter in parameters:
        backward(scaler, parameter, INF if dist.get_rank() == inf_on else 0.25)
    scaler.unscale_(unscale(optimizer))
    scaler.step(step(optimizer))
    scaler.update()
    return [p.item() for p in parameters]


def outer(optimizer: Any) -> Any:
    return optimizer


def inner(optimizer: Any) -> Any:
    return optimizer.optim


def zero_on_ranks(which: str, first: str, second: str, inf_on: int | None) -> list[float]:
    scaler = (cpu_scaler if which == "ours" else torch_scaler)()
    names = {"outer": outer, "inner": inner}
    return zero_with(scaler, names[first], names[second], inf_on)


@pytest.mark.parametrize("second", ["outer", "inner"])
def test_gradients_unscaled_through_the_wrapper_are_not_unscaled_again(ranks2, second):
    values = ranks2.run(zero_on_ranks, "ours", "outer", second, None)
    stepped = {value for rank in values for value in rank}
    assert stepped == ({0.75} if second == "outer" else {0.75, 1.0})


@pytest.mark.parametrize("inf_on", [0, 1])
def test_a_wrappers_step_is_skipped_by_all_where_one_rank_overflows(ranks2, inf_on):
    values = ranks2.run(zero_on_ranks, "ours", "outer", "outer", inf_on)
    assert values == [[1.0, 1.0]] * 2


def zero_inner_first(inf_on: int | None) -> Any:
    scaler = cpu_scaler()
    try:
        return zero_with(scaler, inner, outer, inf_on)
    except StageError as error:
        return str(error)


def test_inner_unscaled_and_wrapper_stepped_is_right_or_named(ranks2):
    for result in ranks2.run(zero_inner_first, None):
        assert result == [0.75, 0.75] or "unscaled twice" in result


def test_a_new_optimizer_over_the_same_parameters_works_in_the_next_iteration():
    parameter, first = sgd(1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    scaler.step(first)
    scaler.update()
    second = torch.optim.SGD([parameter], lr=1.0)
    second.zero_grad()
    backward(scaler, parameter, 0.25)
    scaler.unscale_(second)
    scaler.step(second)
    assert parameter.item() == 0.5


# -- the hook on a scaled loss ---------------------------------------------------------------------


@pytest.mark.parametrize("seen", [False, True], ids=["first loss", "later loss"])
def test_a_user_s_hooks_on_a_scaled_loss_run_beside_ours_and_can_be_removed(seen):
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    if seen:
        backward(scaler, parameter, 1.0)
        scaler.step(optimizer)
        scaler.update()
    calls: list[float] = []
    for removed in (False, True):
        loss = scaler.scale(parameter.sum())
        handle = loss.register_hook(lambda gradient: calls.append(gradient.item()))
        if removed:
            handle.remove()
        loss.backward()
        assert calls == [1.0]
    scaler.unscale_(optimizer)
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(StageError, match=LATE):
        scaler.step(optimizer)


def test_a_scaled_loss_is_saved_without_a_warning():
    loss = cpu_scaler().scale(leaf(1.0).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(loss, io.BytesIO())
