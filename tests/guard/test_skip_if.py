"""`skip_if`: a rank requests a skip, and every rank skips the step."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distamp
from distamp import DistGradScaler, StepGuard
from distamp.errors import ConfigError, RankMismatchError
from distamp.guard.optimizer_history import StepCounts
from tests.guard.test_nonfinite_weights import _NetOfCells as Net
from tests.guard.test_nonfinite_weights import backward, calls_of_a_step
from tests.levels.cells import wrapped
from tests.on_ranks import on_devices, on_ranks
from tests.place import device_type
from tests.ranks import logged
from tests.scaler.steps import INF, cpu_scaler, iteration, sgd


def ddp() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = wrapped(Net(), "DDP", None, "")
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


# -- one process -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [{}, {"max_norm": 1.0}], ids=["flags", "norm"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("request_", [True, torch.tensor(True), torch.tensor([2.0])])
def test_a_request_skips_the_step_and_has_a_count_of_its_own(request_, fused, step):
    parameter, optimizer = sgd(fused=fused)
    guard = StepGuard(max_consecutive_skips=1)
    iteration(guard, optimizer, parameter, 0.5, skip_if=request_, **step)
    assert parameter.item() == 1.0
    assert not guard.step_was_taken(optimizer)
    iteration(guard, optimizer, parameter, 0.5, skip_if=None, **step)
    assert parameter.item() == 0.5
    assert guard.step_counts(optimizer) == StepCounts(1, 0, 0, 1)


def test_a_request_does_not_clip_the_gradients():
    parameter, optimizer = sgd()
    iteration(StepGuard(), optimizer, parameter, 8.0, max_norm=1.0, skip_if=True)
    assert parameter.grad.item() == 8.0


def test_a_fused_step_in_float64_is_not_clipped():
    """Such gradients are clipped before the kernel runs."""
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    parameter.grad = torch.full_like(parameter, 8.0)
    StepGuard().step(optimizer, max_norm=1.0, skip_if=True)
    assert parameter.grad.item() == 8.0


def test_the_norm_of_a_step_that_was_requested_to_skip_is_known():
    parameter, optimizer = sgd()
    guard = StepGuard()
    iteration(guard, optimizer, parameter, 8.0, max_norm=1.0, skip_if=True)
    assert guard.grad_norm(optimizer).item() == 8.0


def test_the_scale_of_a_scaler_does_not_back_off():
    parameter, optimizer = sgd()
    scaler = cpu_scaler(8.0)
    iteration(scaler, optimizer, parameter, 0.5, skip_if=True)
    assert scaler.get_scale() == 8.0
    assert scaler.step_counts(optimizer) == StepCounts(0, 0, 0, 1)


@pytest.mark.parametrize("step", [{}, {"max_norm": 1.0}], ids=["flags", "norm"])
def test_with_an_overflow_the_step_counts_as_skipped_and_the_scale_backs_off(step):
    parameter, optimizer = sgd()
    scaler = cpu_scaler(8.0)
    iteration(scaler, optimizer, parameter, INF, skip_if=True, **step)
    assert scaler.get_scale() == 4.0
    assert scaler.step_counts(optimizer) == StepCounts(0, 1, 0, 0)


def test_a_norm_above_the_limit_counts_as_requested():
    parameter, optimizer = sgd()
    guard = StepGuard()
    iteration(guard, optimizer, parameter, 8.0, skip_norm_above=1.0, skip_if=True)
    assert guard.step_counts(optimizer) == StepCounts(0, 0, 0, 1)


def test_after_unscale_the_request_still_skips():
    parameter, optimizer = sgd()
    guard = StepGuard()
    iteration(guard, optimizer, parameter, 0.5, unscale=True, skip_if=True)
    assert parameter.item() == 1.0
    assert guard.step_counts(optimizer) == StepCounts(0, 0, 0, 1)


def test_a_disabled_scaler_skips_too():
    parameter, optimizer = sgd()
    scaler = DistGradScaler("cpu", enabled=False)
    iteration(scaler, optimizer, parameter, 0.5, skip_if=True)
    assert parameter.item() == 1.0
    assert scaler.step_counts(optimizer) == StepCounts(0, 0, 0, 1)


def test_a_request_is_logged_at_info(caplog):
    parameter, optimizer = sgd()
    with caplog.at_level(logging.INFO, "distamp.guard"):
        iteration(StepGuard(), optimizer, parameter, 0.5, skip_if=True)
    assert caplog.messages == [
        "Skipped step 1 of SGD (1 parameter): a rank requested it by skip_if."
    ]
    assert caplog.records[0].levelno == logging.INFO


@pytest.mark.parametrize("wrong", [1, 0.5, "yes", [True]])
def test_a_request_is_a_bool_or_a_tensor(wrong):
    parameter, optimizer = sgd()
    guard = StepGuard()
    with pytest.raises(TypeError, match=r"skip_if must be True, False, None or a 0-d tensor"):
        iteration(guard, optimizer, parameter, 0.5, skip_if=wrong)


def test_a_request_has_one_element():
    parameter, optimizer = sgd()
    with pytest.raises(ConfigError, match=r"one value, not a tensor of shape \(2,\)"):
        iteration(StepGuard(), optimizer, parameter, 0.5, skip_if=torch.tensor([True, False]))


def test_an_optimizer_with_such_an_argument_is_refused():
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None, skip_if: Any = None) -> None:  # type: ignore[override]
            super().step()

    parameter, _ = sgd()
    optimizer = Own([parameter], lr=1.0)
    with pytest.raises(TypeError, match="has a skip_if of its own"):
        iteration(StepGuard(), optimizer, parameter, 0.5, skip_if=True)


def test_step_all_skips_all_optimizers():
    (first, optimizer), (second, second_optimizer) = sgd(), sgd()
    guard = StepGuard()
    for parameter in (first, second):
        parameter.sum().backward()
    guard.unscale_(optimizer)
    guard.step_all([optimizer, second_optimizer], skip_if=True)
    guard.update()
    assert (first.item(), second.item()) == (1.0, 1.0)
    for skipped in (optimizer, second_optimizer):
        assert guard.step_counts(skipped) == StepCounts(0, 0, 0, 1)


def test_amp_passes_the_request_on():
    model = Net()
    amp = distamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    amp.backward(amp.model(torch.ones(4, 8)).square().mean())
    assert not amp.step(skip_if=True)
    assert amp.scaler.step_counts(amp.optimizers[0]).requested_skips == 1


# -- several ranks ---------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("step", [{}, {"max_norm": 1.0}], ids=["flags", "norm"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_the_request_of_one_rank_skips_the_step_on_every_rank(fused, step):
    model, _ = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    guard = StepGuard()
    weight_then = model.module.hidden.weight.detach().clone()
    for requests in (True, False):
        backward(guard, model, optimizer)
        guard.step(optimizer, skip_if=requests and dist.get_rank() == 1, **step)
        guard.update()
        assert torch.equal(model.module.hidden.weight, weight_then) == requests
    assert guard.step_counts(optimizer) == StepCounts(1, 0, 0, 1)


@on_ranks(2)
def test_a_rank_may_leave_the_request_out():
    model, optimizer = ddp()
    guard = StepGuard()
    backward(guard, model, optimizer)
    if dist.get_rank() == 1:
        guard.step(optimizer, skip_if=True)
    else:
        guard.step(optimizer)
    guard.update()
    assert guard.step_counts(optimizer) == StepCounts(0, 0, 0, 1)


@on_ranks(2)
@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_"])
def test_after_an_earlier_message_the_request_has_one_of_its_own(call):
    model, optimizer = ddp()
    guard = StepGuard()
    for _ in range(2):
        backward(guard, model, optimizer)
        if call == "unscale_":
            guard.unscale_(optimizer)
        else:
            guard.clip_grad_norm_(optimizer, 1.0)
        guard.step(optimizer, skip_if=dist.get_rank() == 1)
        guard.update()
    assert guard.step_counts(optimizer) == StepCounts(0, 0, 0, 2)


@on_ranks(2)
def test_after_unscale_a_rank_without_the_argument_is_an_error_on_every_rank():
    model = Net()  # Without the collectives of DDP, because rank 1 would wait in them.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = StepGuard()
    request_ = {"skip_if": False} if dist.get_rank() == 1 else {}

    def two_iterations() -> None:
        for _ in range(2):
            backward(guard, model, optimizer)
            guard.unscale_(optimizer)
            guard.step(optimizer, **request_)
            guard.update()

    with pytest.raises(RankMismatchError, match=r"step\(skip_if=\)"):
        two_iterations()


@on_ranks(2)
@pytest.mark.parametrize("step_all", [False, True], ids=["step", "step_all"])
def test_a_rank_that_unscales_first_skips_by_the_request_of_another_rank(step_all):
    """The message of unscale_ is the message of step(skip_if=)."""
    model, optimizer = ddp()
    guard = StepGuard()
    backward(guard, model, optimizer)
    arguments = {"skip_if": True}
    if dist.get_rank() == 0:
        guard.unscale_(optimizer)
        arguments = {}
    if step_all:
        guard.step_all([optimizer], **arguments)
    else:
        guard.step(optimizer, **arguments)
    guard.update()
    assert guard.step_counts(optimizer) == StepCounts(0, 0, 0, 1)


@on_ranks(2)
def test_a_wrong_request_of_one_rank_raises_on_every_rank():
    model, optimizer = ddp()
    guard = StepGuard()
    backward(guard, model, optimizer)
    with pytest.raises(TypeError, match="skip_if must be"):
        guard.step(optimizer, skip_if="yes" if dist.get_rank() == 1 else None)


@on_ranks(2)
@pytest.mark.parametrize("step", [{}, {"max_norm": 1.0}], ids=["flags", "norm"])
def test_a_request_that_is_false_adds_no_message_and_no_byte(step):
    calls = calls_of_a_step(StepGuard(), **step)
    assert calls_of_a_step(StepGuard(), **step, skip_if=False) == calls


# -- devices ---------------------------------------------------------------------------------------


@on_devices(2)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("step", [{}, {"max_norm": 1.0}], ids=["flags", "norm"])
def test_on_devices_a_tensor_of_one_rank_skips_the_step(fused, step):
    model = Net().to(device_type())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    guard = StepGuard()
    weight_then = model.hidden.weight.detach().clone()
    request_ = torch.tensor(dist.get_rank() == 1, device=device_type())
    backward(guard, model, optimizer)
    guard.step(optimizer, skip_if=request_, **step)
    guard.update()
    assert torch.equal(model.hidden.weight, weight_then)
    assert guard.step_counts(optimizer) == StepCounts(0, 0, 0, 1)


@on_devices(2)
def test_on_devices_no_rank_steps_if_the_request_of_one_rank_after_unscale_is_wrong():
    """The message of the request is read at the next call, so the flags must stop the step."""
    model = Net().to(device_type())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    guard = StepGuard()
    weight_then = model.hidden.weight.detach().clone()
    request_ = torch.ones(2 if dist.get_rank() == 1 else 1, device=device_type())
    backward(guard, model, optimizer)
    guard.unscale_(optimizer)

    def step_and_read_the_reply() -> None:
        guard.step(optimizer, skip_if=request_ * 0)
        guard.step_counts(optimizer)

    with pytest.raises(ConfigError):
        step_and_read_the_reply()
    if dist.get_rank() == 1:  # It raised at once, and reads the reply now.
        with pytest.raises(ConfigError):
            guard.step_counts(optimizer)
    assert torch.equal(model.hidden.weight, weight_then)


@on_devices(1)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("step", [{}, {"max_norm": 1.0}], ids=["flags", "norm"])
def test_one_process_on_a_device_counts_the_request(fused, step):
    model = Net().to(device_type())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    guard = StepGuard()
    with logged("distamp.guard") as lines:
        for requests in (True, False):
            backward(guard, model, optimizer)
            flag = torch.tensor(requests, device=device_type())
            guard.step(optimizer, skip_if=flag, **step)
            guard.update()
        assert guard.step_counts(optimizer) == StepCounts(1, 0, 0, 1)
    assert len(lines) == 1
