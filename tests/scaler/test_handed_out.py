"""Gradients that were handed out are the user's: `update` moves only what no call looked at."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distamp import DistGradScaler
from tests.scaler.steps import backward, cpu_scaler, iteration, leaf, sgd, torch_scaler


def _stepped_by_hand(scaler: Any) -> list[float]:
    """`unscale_`, a clip of one's own, `update`, and the optimizer's own step."""
    parameter, optimizer = sgd()
    backward(scaler, parameter, 0.25)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    scaler.update()
    optimizer.step()
    return [parameter.item()]


def _replayed(scaler: Any) -> list[float]:
    """A captured graph scales and goes backward: a replay runs no Python, and writes gradients."""
    parameter, optimizer = sgd()
    backward(scaler, parameter, 0.25)
    for _ in range(2):
        parameter.grad.fill_(0.25 * scaler.get_scale())
        scaler.unscale_(optimizer)  # and drops the step, as where the norm is large
        seen = parameter.grad.item()
        scaler.update()
    return [seen, parameter.grad.item()]


def _scaled_by_hand(scaler: Any) -> list[float]:
    """Losses times `get_scale()`, and no step where the norm is large."""
    parameter, optimizer = sgd()
    scaler.scale(torch.ones(()))
    for _ in range(3):
        optimizer.zero_grad()
        (parameter * 0.25 * scaler.get_scale()).sum().backward()
        scaler.unscale_(optimizer)
        seen = parameter.grad.item()
        scaler.update()
    return [seen]


def _discriminator_then_generator(scaler: Any) -> list[float]:
    """D steps, G's loss is scaled, and one `update` for both: D's gradients stay as they were."""
    (d, of_d), (g, of_g) = sgd(), sgd()
    backward(scaler, d, 1.0)
    scaler.unscale_(of_d)
    scaler.step(of_d)
    backward(scaler, g, 1.0)
    scaler.step(of_g)
    kept = d.grad
    scaler.update()
    return [d.grad.item(), kept.item(), d.item(), g.item()]


def _kept_by_reference(scaler: Any) -> list[float]:
    parameter, optimizer = sgd()
    backward(scaler, parameter, 0.25)
    scaler.unscale_(optimizer)
    kept = parameter.grad
    scaler.step(optimizer)
    scaler.update()
    return [kept.item(), parameter.grad.item()]


@pytest.mark.parametrize(
    "idiom",
    [
        _stepped_by_hand,
        _replayed,
        _scaled_by_hand,
        _discriminator_then_generator,
        _kept_by_reference,
    ],
    ids=lambda idiom: idiom.__name__[1:],
)
@pytest.mark.parametrize("interval", [1, 2, 1000])
def test_an_idiom_ends_as_with_torchs(idiom: Callable[[Any], list[float]], interval: int) -> None:
    ours, theirs = (make(growth_interval=interval) for make in (cpu_scaler, torch_scaler))
    assert idiom(ours) == idiom(theirs)


def test_float16_gradients_in_place_are_not_touched_by_update():
    parameter = leaf(1.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = cpu_scaler(fp16_grads="inplace", growth_interval=1)
    backward(scaler, parameter, 0.25)
    scaler.unscale_(optimizer)
    scaler.update()
    assert parameter.grad.item() == 0.25


def _grows(scaler: DistGradScaler) -> None:
    """An iteration of another optimizer, after which the scale is another."""
    before = scaler.get_scale()
    parameter, optimizer = sgd()
    iteration(scaler, optimizer, parameter, 0.25)
    assert scaler.get_scale() != before


@pytest.mark.parametrize("known", [True, False])
def test_what_waits_is_carried_over_where_the_optimizer_is_known(known: bool) -> None:
    parameter, optimizer = sgd()
    scaler = cpu_scaler(growth_interval=1)
    scaler.add_optimizer(*[optimizer] * known)
    backward(scaler, parameter, 0.25)
    _grows(scaler)
    backward(scaler, parameter, 0.25)
    scaler.step(optimizer)
    # An optimizer that the scaler never saw is divided by today's scale, as in torch.
    assert parameter.item() == (0.5 if known else 0.625)


def test_what_was_unscaled_waits_for_step_alone_and_only_beside_one_that_stepped():
    (a, of_a), (b, of_b), (c, of_c) = (sgd() for _ in range(3))
    scaler = cpu_scaler(growth_interval=1)
    for parameter in (a, b, c):
        backward(scaler, parameter, 0.25)
    scaler.unscale_(of_a, of_b, of_c)
    scaler.step(of_a)
    scaler.update()
    scaler.step(of_b)
    scaler.update()
    assert scaler.is_unscaled(of_c)
    assert (b.item(), c.grad.item()) == (0.75, 0.25)
    scaler.unscale_(of_c)  # looks again, for it may have been written since
    assert c.grad.item() == 0.25 / scaler.get_scale()
    scaler.update()  # nothing was stepped
    assert not scaler.is_unscaled(of_c)
    scaler.unscale_(of_b, of_c)
    scaler.step(of_b)
    scaler.update()
    assert scaler.is_unscaled(of_c)
    scaler.scale(torch.ones(()))
    assert not scaler.is_unscaled(of_c)
