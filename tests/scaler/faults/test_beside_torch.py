"""Loops from torch's documentation and from the field, to the same values as torch's class."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.scaler.steps import INF, cpu_scaler, leaf, torch_scaler

Make = Callable[..., Any]


def _sgd(*parameters: nn.Parameter, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, **{"lr": 1.0, **settings})


def _round(scaler: Any, optimizer: Any, loss: torch.Tensor, unscale: bool = False) -> Any:
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    returned = scaler.step(optimizer)
    scaler.update()
    return returned


def scales_every_dtype(make: Make) -> Any:
    scaler = make()
    results: list[Any] = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64):
        for shape in ((), (2,)):
            result = scaler.scale(torch.ones(shape, dtype=dtype))
            results.append((result.dtype, result.flatten()[0].item(), result.requires_grad))
    return results


def scales_nested_structures(make: Make) -> Any:
    scaler, one = make(), torch.ones(())

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.item()
        kind = type(value).__name__ if isinstance(value, (list, tuple)) else "iterable"
        return kind, [plain(each) for each in value]

    given = ([one, one], (one, (one, [one])), iter([one]), {1: one}.values(), [])
    return [plain(scaler.scale(each)) for each in given]


def gradient_penalty(make: Make) -> Any:
    scaler, p = make(), leaf(2.0)
    optimizer = _sgd(p, lr=0.125)
    squares = p * p
    (gradient,) = torch.autograd.grad(scaler.scale(squares.sum()), [p], create_graph=True)
    penalty = (gradient * (1.0 / scaler.get_scale())).pow(2).sum()
    _round(scaler, optimizer, squares.sum() + penalty, unscale=True)
    return p.item()


def several_losses_and_optimizers(make: Make) -> Any:
    scaler, p, q = make(), leaf(1.0), leaf(2.0)
    first, second = _sgd(p, lr=0.125), _sgd(q, lr=0.125)
    values = []
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        scaler.scale((2 * p + 3 * q).sum()).backward(retain_graph=True)
        scaler.scale((3 * p - 5 * q).sum()).backward()
        scaler.unscale_(first)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        values += [p.item(), q.item()]
    return values


def activation_checkpoints(make: Make) -> Any:
    from torch.utils.checkpoint import checkpoint

    scaler = make()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for reentrant in (True, False):
        optimizer.zero_grad()
        x = torch.ones(2, 4, requires_grad=True)
        loss = checkpoint(model, x, use_reentrant=reentrant).sum()
        _round(scaler, optimizer, loss, unscale=True)
    return [p.tolist() for p in model.parameters()]


def learning_rate_schedules_count_calls(make: Make) -> Any:
    scaler, p = make(), leaf(1.0)
    optimizer = _sgd(p)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []
    for gradient in (INF, 0.25, 0.25):
        optimizer.zero_grad()
        _round(scaler, optimizer, (p * gradient).sum())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            schedule.step()
        seen.append((p.item(), optimizer.param_groups[0]["lr"], len(caught)))
    return seen


def a_group_is_added(make: Make) -> Any:
    scaler, p, q = make(), leaf(1.0), leaf(1.0)
    optimizer = _sgd(p)
    _round(scaler, optimizer, (p * 0.25 + q * 0.25).sum())
    optimizer.add_param_group({"params": [q]})
    optimizer.zero_grad()
    _round(scaler, optimizer, (p * 0.25 + q * 0.25).sum(), unscale=True)
    return p.item(), q.item()


def an_empty_group(make: Make) -> Any:
    scaler, p = make(), leaf(1.0)
    optimizer = torch.optim.SGD([{"params": [p]}, {"params": []}], lr=1.0)
    _round(scaler, optimizer, (p * 0.25).sum())
    return p.item()


def float64_beside_float32(make: Make) -> Any:
    scaler, p, q = make(), leaf(1.0, dtype=torch.float64), leaf(1.0)
    optimizer = _sgd(p, q)
    for gradient in (0.25, INF, 0.25):
        optimizer.zero_grad()
        _round(scaler, optimizer, (p * gradient).sum() + q.sum() * 0.5)
    return p.item(), q.item(), scaler.get_scale()


def sparse_gradients(make: Make) -> Any:
    embedding = nn.Embedding(4, 2, sparse=True)
    nn.init.ones_(embedding.weight)
    scaler, optimizer = make(), torch.optim.SGD(embedding.parameters(), lr=1.0)
    for gradient in (0.25, INF, 0.25):
        optimizer.zero_grad()
        _round(scaler, optimizer, (embedding(torch.tensor([1, 1, 2])) * gradient).sum(), True)
    return embedding.weight.tolist(), scaler.get_scale()


def a_shallow_copy(make: Make) -> Any:
    scaler, p = make(growth_interval=2), leaf(1.0)
    optimizer = _sgd(p)
    _round(scaler, optimizer, (p * 0.25).sum())
    copied = copy.copy(scaler)
    optimizer.zero_grad()
    _round(copied, optimizer, (p * 0.25).sum())
    return p.item(), copied.get_scale()


def backward_in_another_thread(make: Make) -> Any:
    scaler, p = make(), leaf(1.0)
    optimizer = _sgd(p)
    thread = threading.Thread(target=lambda: scaler.scale((p * 0.25).sum()).backward())
    thread.start()
    thread.join()
    scaler.step(optimizer)
    scaler.update()
    return p.item()


def two_scalers_of_one_optimizer(make: Make) -> Any:
    first, second, p = make(), make(init_scale=64.0), leaf(1.0)
    optimizer = _sgd(p)
    _round(first, optimizer, (p * 0.25).sum())
    optimizer.zero_grad()
    _round(second, optimizer, (p * 0.25).sum(), unscale=True)
    return p.item()


def gradients_by_hand(make: Make) -> Any:
    scaler, p = make(), leaf(1.0)
    optimizer = _sgd(p)
    scaler.scale(torch.ones(()))
    values = []
    for _ in range(2):
        p.grad = torch.tensor([256.0])
        scaler.unscale_(optimizer)
        values.append(p.grad.item())
        scaler.step(optimizer)
        scaler.update(8.0)
        p.grad = torch.tensor([2.0])
        scaler.step(optimizer)
        scaler.update(1024.0)
        values.append(p.item())
    return values


def gradients_by_hand_in_place(make: Make) -> Any:
    """One buffer for the gradient, filled anew in each iteration, while the scale moves."""
    scaler, p = make(growth_interval=1), leaf(1.0)
    optimizer = _sgd(p)
    p.grad = torch.zeros(1)
    scaler.scale(torch.ones(()))
    values = []
    for _ in range(4):
        p.grad.fill_(0.25 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        values.append(p.item())
    return values


def gradients_copied_from_elsewhere(make: Make) -> Any:
    """``torch.autograd.grad`` and a copy into ``.grad``, as trainers with buffers of their own."""
    scaler, p = make(growth_interval=1), leaf(1.0)
    optimizer = _sgd(p)
    p.grad = torch.zeros(1)
    values = []
    for _ in range(4):
        (gradient,) = torch.autograd.grad(scaler.scale((p * 0.25).sum()), [p])
        p.grad.copy_(gradient)
        scaler.step(optimizer)
        scaler.update()
        values.append(p.item())
    return values


def zeroed_in_place(make: Make) -> Any:
    scaler, p = make(growth_interval=1), leaf(1.0)
    optimizer = _sgd(p)
    for gradient in (0.25, INF, 0.25, 0.25):
        optimizer.zero_grad(set_to_none=False)
        _round(scaler, optimizer, (p * gradient).sum())
    return p.item(), scaler.get_scale()


def zeroed_after_update(make: Make) -> Any:
    scaler, p = make(growth_interval=1), leaf(1.0)
    optimizer = _sgd(p)
    for gradient in (0.25, INF, 0.25, 0.25):
        _round(scaler, optimizer, (p * gradient).sum())
        p.grad.zero_()
    return p.item(), scaler.get_scale()


def zeroed_by_multiplication(make: Make) -> Any:
    scaler, p = make(growth_interval=1), leaf(1.0)
    optimizer = _sgd(p)
    for gradient in (0.25, 0.25, 0.25):
        _round(scaler, optimizer, (p * gradient).sum())
        p.grad.mul_(0.0)
    return p.item(), scaler.get_scale()


def detached_gradients_kept_for_later(make: Make) -> Any:
    """Gradients are moved away and put back before the step."""
    scaler, p = make(growth_interval=1), leaf(1.0)
    optimizer = _sgd(p)
    for _ in range(3):
        scaler.scale((p * 0.125).sum()).backward()
        kept, p.grad = p.grad, None
        scaler.scale((p * 0.125).sum()).backward()
        p.grad = p.grad + kept
        scaler.step(optimizer)
        scaler.update()
        p.grad = None
    return p.item(), scaler.get_scale()


def an_optimizer_that_skips_iterations(make: Make) -> Any:
    """A GAN whose generator is stepped every other iteration; else its gradients are dropped."""
    scaler, p, q = make(growth_interval=1), leaf(1.0), leaf(1.0)
    every, other = _sgd(p), _sgd(q)
    for number in range(4):
        every.zero_grad()
        other.zero_grad()
        scaler.scale((p * 0.25 + q * 0.25).sum()).backward()
        scaler.step(every)
        if number % 2:
            scaler.step(other)
        scaler.update()
    return p.item(), q.item(), scaler.get_scale()


def an_optimizer_that_skips_iterations_zeroed_in_place(make: Make) -> Any:
    scaler, p, q = make(growth_interval=1), leaf(1.0), leaf(1.0)
    every, other = _sgd(p), _sgd(q)
    for number in range(4):
        every.zero_grad(set_to_none=False)
        other.zero_grad(set_to_none=False)
        scaler.scale((p * 0.25 + q * 0.25).sum()).backward()
        scaler.step(every)
        if number % 2:
            scaler.step(other)
        scaler.update()
    return p.item(), q.item(), scaler.get_scale()


def a_frozen_part_that_thaws(make: Make) -> Any:
    scaler, p, q = make(growth_interval=1), leaf(1.0), leaf(1.0)
    q.requires_grad_(False)
    optimizer = _sgd(p, q)
    for number in range(4):
        if number == 2:
            q.requires_grad_(True)
        optimizer.zero_grad()
        _round(scaler, optimizer, (p * 0.25 + q * 0.25).sum())
    return p.item(), q.item(), scaler.get_scale()


def an_optimizer_made_anew(make: Make) -> Any:
    """A new optimizer over the same parameters, whose gradients were never zeroed to None."""
    scaler, p = make(growth_interval=1), leaf(1.0)
    for _ in range(3):
        optimizer = _sgd(p)
        optimizer.zero_grad(set_to_none=False)
        _round(scaler, optimizer, (p * 0.25).sum())
    return p.item(), scaler.get_scale()


def evaluation_in_between(make: Make) -> Any:
    """Losses are scaled for logging alone, with and without a graph, and input gradients taken."""
    scaler, p = make(growth_interval=1), leaf(1.0)
    optimizer = _sgd(p)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.no_grad():
            scaler.scale((p * 0.25).sum())
        x = torch.ones(1, requires_grad=True)
        torch.autograd.grad(scaler.scale((p.detach() * x).sum()), [x])
        _round(scaler, optimizer, (p * 0.25).sum(), unscale=True)
        scaler.scale((x * 3).sum()).backward()
    return p.item(), x.grad.item(), scaler.get_scale()


def a_backward_over_other_parameters_after_unscale(make: Make) -> Any:
    scaler, p, q = make(), leaf(1.0), leaf(1.0)
    first, second = _sgd(p), _sgd(q)
    scaler.scale((p * 0.25).sum()).backward()
    scaler.unscale_(first)
    scaler.scale((q * 0.25).sum()).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    return p.item(), q.item()


def step_takes_arguments_and_returns(make: Make) -> Any:
    class Own(torch.optim.SGD):
        def step(self, first: Any = None, *, second: Any = None) -> Any:  # type: ignore[override]
            super().step()
            return first, second

    scaler, p = make(), leaf(1.0)
    optimizer = Own([p], lr=1.0)
    scaler.scale((p * 0.25).sum()).backward()
    returned = scaler.step(optimizer, second=3)
    scaler.update()
    return returned, p.item()


def step_hooks(make: Make) -> Any:
    scaler, p, calls = make(), leaf(1.0), []
    optimizer = _sgd(p)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for gradient in (0.25, INF):
        optimizer.zero_grad()
        _round(scaler, optimizer, (p * gradient).sum())
    return calls


def messages_of_errors(make: Make) -> Any:
    scaler, p, texts = make(), leaf(1.0), []
    optimizer = _sgd(p)

    def note(call: Callable[[], Any]) -> None:
        try:
            call()
        except (RuntimeError, AssertionError) as error:
            texts.append(str(error))

    for call in (lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer), scaler.update):
        note(call)
    scaler.scale((p * 0.25).sum()).backward()
    scaler.unscale_(optimizer)
    note(lambda: scaler.unscale_(optimizer))
    scaler.step(optimizer)
    note(lambda: scaler.step(optimizer))
    note(lambda: scaler.unscale_(optimizer))
    return texts


def a_state_through_a_file(make: Make) -> Any:
    scaler, p = make(growth_interval=3), leaf(1.0)
    optimizer = _sgd(p)
    _round(scaler, optimizer, (p * 0.25).sum())
    file = io.BytesIO()
    torch.save(scaler.state_dict(), file)
    file.seek(0)
    loaded = make()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(2):
        optimizer.zero_grad()
        _round(loaded, optimizer, (p * 0.25).sum())
    return loaded.state_dict(), p.item()


def a_scale_that_the_optimizer_brings(make: Make) -> Any:
    class Scaled(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            self._step_supports_amp_scaling = True
            self.grad_scale: Any = torch.tensor(2.0)

        def step(self, closure: Any = None) -> Any:
            return float(self.grad_scale), float(self.found_inf)

    scaler, p = make(), leaf(1.0)
    optimizer = Scaled([p])
    scaler.scale((p * 0.25).sum()).backward()
    return scaler.step(optimizer)


def hooks_on_parameters(make: Make) -> Any:
    scaler, p, seen = make(), leaf(1.0), []
    optimizer = _sgd(p)
    p.register_hook(lambda gradient: seen.append(gradient.item()))
    p.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.item()))
    loss = scaler.scale((p * 0.25).sum())
    loss.backward(retain_graph=True)
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    return seen, p.item()


def unscaled_inside_of_backward(make: Make) -> Any:
    scaler, p = make(), leaf(1.0)
    optimizer = _sgd(p)
    p.register_post_accumulate_grad_hook(lambda _: scaler.unscale_(optimizer))
    _round(scaler, optimizer, (p * 0.25).sum())
    return p.item()


def stepped_inside_of_backward(make: Make) -> Any:
    """An optimizer for each parameter, stepped as soon as its gradient is there."""
    scaler, parameters = make(), [leaf(1.0), leaf(2.0)]
    optimizers = {p: _sgd(p) for p in parameters}

    def step(parameter: Any) -> None:
        scaler.step(optimizers[parameter])
        parameter.grad = None

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(step)
    for gradient in (0.25, INF, 0.25):
        scaler.scale(sum((p * gradient).sum() for p in parameters)).backward()
        scaler.update()
    return [p.item() for p in parameters], scaler.get_scale()


def a_gradient_replaced_after_unscale(make: Make) -> Any:
    scaler, p = make(), leaf(1.0)
    optimizer = _sgd(p)
    scaler.scale((p * 0.25).sum()).backward()
    scaler.unscale_(optimizer)
    p.grad = p.grad * 2
    scaler.step(optimizer)
    scaler.update()
    return p.item()


def another_loss_of_the_same_graph_after_update(make: Make) -> Any:
    """The scaled loss is kept, and its graph is gone through again with fresh gradients."""
    scaler, p = make(), leaf(1.0)
    optimizer = _sgd(p)
    loss = (p * 0.25).sum()
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss).backward(retain_graph=True)
        scaler.step(optimizer)
        scaler.update(scaler.get_scale() * 2)
    return p.item(), scaler.get_scale()


def a_model_in_a_function(make: Make) -> Any:
    from torch.func import functional_call

    scaler = make()
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.5)
    _round(scaler, optimizer, functional_call(model, weights, torch.ones(1, 2)).sum())
    return [w.tolist() for w in weights.values()]


LOOPS = [
    value
    for value in list(globals().values())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and not value.__name__.startswith("_")
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_goes_as_with_torchs_class(loop: Callable[[Make], Any]) -> None:
    assert loop(cpu_scaler) == loop(torch_scaler)


def test_the_loops_are_there() -> None:
    assert len(LOOPS) >= 30
