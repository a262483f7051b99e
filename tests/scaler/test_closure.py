"""Optimizers that evaluate the loss themselves: each evaluation is unscaled and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp.errors import StageError
from tests.collectives import count_collectives
from tests.scaler.steps import INF, NAN, cpu_scaler, sgd, torch_scaler

GIVEN = {"by position": lambda c: ((c,), {}), "by keyword": lambda c: ((), {"closure": c})}
given = pytest.mark.parametrize("how", GIVEN)


def line_closure(
    scaler: Any, parameter: nn.Parameter, optimizer: torch.optim.Optimizer, gradient: float = 0.1
) -> Callable[[], Tensor]:
    """A loss with this gradient everywhere."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameter * gradient).sum()
        scaler.scale(loss).backward()
        return loss

    return closure


# -- SGD -------------------------------------------------------------------------------------------


def test_torchs_scaler_steps_scaled_gradients_with_a_closure_by_position():
    parameter, optimizer = sgd(1.0)
    scaler = torch_scaler()
    closure = line_closure(scaler, parameter, optimizer)
    closure()
    scaler.step(optimizer, closure)
    assert parameter.item() == pytest.approx(1.0 - 102.4)


@given
def test_one_evaluation_is_stepped_with_its_unscaled_gradient(how):
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    scaler.scale(torch.tensor(1.0))
    args, kwargs = GIVEN[how](line_closure(scaler, parameter, optimizer))
    loss = scaler.step(optimizer, *args, **kwargs)
    scaler.update()
    assert parameter.item() == pytest.approx(0.9)
    assert loss.item() == pytest.approx(0.1), "the loss that step returns is unscaled"
    assert (scaler.stepped(optimizer), scaler.step_counts(optimizer).taken) == (True, 1)


@given
def test_scale_may_first_be_called_inside_the_closure(how):
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    args, kwargs = GIVEN[how](line_closure(scaler, parameter, optimizer))
    scaler.step(optimizer, *args, **kwargs)
    scaler.update()
    assert parameter.item() == pytest.approx(0.9)


def test_none_for_a_closure_is_none():
    for args, kwargs in (((None,), {}), ((), {"closure": None})):
        parameter, optimizer = sgd(1.0)
        scaler = cpu_scaler()
        scaler.scale((parameter * 0.25).sum()).backward()
        scaler.step(optimizer, *args, **kwargs)
        assert parameter.item() == 0.75


def test_a_closure_after_unscale_is_refused():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    closure = line_closure(scaler, parameter, optimizer)
    closure()
    scaler.unscale_(optimizer)
    with pytest.raises(StageError, match=r"closure after unscale_\(\).*leave unscale_\(\) out"):
        scaler.step(optimizer, closure)
    assert parameter.item() == 1.0


def test_a_second_step_with_a_closure_is_refused():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    closure = line_closure(scaler, parameter, optimizer)
    scaler.step(optimizer, closure)
    with pytest.raises(StageError, match=r"step\(\) has already been called"):
        scaler.step(optimizer, closure)


def test_an_optimizer_that_ignores_the_closure_is_named():
    class Ignores(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            super().step()

    parameter, _ = sgd(1.0)
    optimizer = Ignores([parameter], lr=1.0)
    scaler = cpu_scaler()
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(StageError, match=r"closure that the optimizer never called"):
        scaler.step(optimizer, lambda: None)


def test_an_exception_in_the_closure_comes_through_and_the_user_may_try_again():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    good = line_closure(scaler, parameter, optimizer)

    def bad() -> Tensor:
        raise OSError("the data is gone")

    with pytest.raises(OSError, match=r"the data is gone"):
        scaler.step(optimizer, bad)
    scaler.step(optimizer, good)
    scaler.update()
    assert parameter.item() == pytest.approx(0.9)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_a_closure_with_other_optimizers_equals_no_scaler(kind, options):
    runs = []
    for scaler in (cpu_scaler(), cpu_scaler(enabled=False)):
        parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer = kind([parameter], lr=0.125, **options)
        for gradient in (0.5, -0.25, 1.0):
            scaler.step(optimizer, line_closure(scaler, parameter, optimizer, gradient))
            scaler.update()
        runs.append(parameter.detach().clone())
    torch.testing.assert_close(runs[0], runs[1])


# -- LBFGS -----------------------------------------------------------------------------------------


class Regression:
    """Least squares in eight unknowns: one minimum, and the reference in float64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(32, 8, generator=generator)
        self.targets = torch.randn(32, 1, generator=generator)
        self.weight = nn.Parameter(torch.zeros(8, 1))
        self.optimizer = torch.optim.LBFGS([self.weight], lr=1.0, line_search_fn="strong_wolfe")
        self.evaluations = 0
        self.overflow_at = -1
        self.overflow = INF

    def closure(self, scaler: Any) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            loss = (self.inputs @ self.weight - self.targets).square().mean()
            scaler.scale(loss).backward()
            if self.evaluations == self.overflow_at:
                assert self.weight.grad is not None
                self.weight.grad[3] = self.overflow
            self.evaluations += 1
            return loss

        return evaluate

    def minimum(self) -> Tensor:
        solution = torch.linalg.lstsq(self.inputs.double(), self.targets.double()).solution
        return solution.float()


def first_gradient_lbfgs_kept(scaler: Any) -> Tensor:
    problem = Regression()
    problem.optimizer.param_groups[0]["max_iter"] = 1
    scaler.scale(torch.tensor(1.0))
    problem.closure(scaler)()
    scaler.step(problem.optimizer, problem.closure(scaler))
    kept: Tensor = problem.optimizer.state[problem.weight]["d"]
    return kept


def test_torchs_scaler_refuses_a_closure_by_keyword_alone():
    problem, scaler = Regression(), torch_scaler()
    scaler.scale(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match=r"Closure use is not currently supported"):
        scaler.step(problem.optimizer, closure=problem.closure(scaler))


def test_lbfgs_under_torchs_scaler_follows_scaled_gradients_and_under_ours_unscaled_ones():
    plain = first_gradient_lbfgs_kept(cpu_scaler(enabled=False))
    torch.testing.assert_close(first_gradient_lbfgs_kept(torch_scaler()), plain * 1024)
    torch.testing.assert_close(first_gradient_lbfgs_kept(cpu_scaler()), plain)


@given
def test_lbfgs_reaches_the_minimum_that_it_reaches_without_a_scaler(how):
    problem, scaler = Regression(), cpu_scaler(2.0**16)
    for _ in range(3):
        args, kwargs = GIVEN[how](problem.closure(scaler))
        scaler.step(problem.optimizer, *args, **kwargs)
        scaler.update()
    torch.testing.assert_close(problem.weight.detach(), problem.minimum(), rtol=1e-4, atol=1e-5)
    alone = Regression()
    for _ in range(3):
        alone.optimizer.step(alone.closure(cpu_scaler(enabled=False)))
    torch.testing.assert_close(problem.weight, alone.weight, rtol=1e-4, atol=1e-5)


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The optimizer's state with tensors copied, in a form that compares."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.tolist()
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return value

    return [
        {key: plain(value) for key, value in state.items()} for state in optimizer.state.values()
    ]


@pytest.mark.parametrize("value", [INF, NAN], ids=["inf", "nan"])
@pytest.mark.parametrize("later", [0, 1, 3], ids=["first", "second", "fourth evaluation"])
@pytest.mark.parametrize("warm", [0, 1], ids=["first step", "second step"])
def test_an_overflow_in_any_evaluation_puts_parameters_and_state_back(value, later, warm):
    problem, scaler = Regression(), cpu_scaler(512.0)
    problem.optimizer.param_groups[0]["max_iter"] = 4
    for _ in range(warm):
        scaler.step(problem.optimizer, problem.closure(scaler))
        scaler.update()
    weight, state = problem.weight.detach().clone(), state_of(problem.optimizer)
    problem.overflow_at, problem.overflow = problem.evaluations + later, value
    result = scaler.step(problem.optimizer, problem.closure(scaler))
    assert problem.evaluations == problem.overflow_at + 1, "the overflow ends the step"
    assert result is None
    assert torch.equal(problem.weight, weight)
    assert state_of(problem.optimizer) == state
    assert (scaler.stepped(problem.optimizer), scaler.found_inf(problem.optimizer)) == (False, 1)
    scaler.update()
    assert scaler.get_scale() == 256.0
    for _ in range(5):
        scaler.step(problem.optimizer, problem.closure(scaler))
        scaler.update()
    torch.testing.assert_close(problem.weight.detach(), problem.minimum(), rtol=1e-3, atol=1e-4)


def test_after_an_overflow_the_state_still_belongs_to_the_parameters():
    problem, scaler = Regression(), cpu_scaler()
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    problem.overflow_at = problem.evaluations
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    assert list(problem.optimizer.state) == [problem.weight]
    assert next(iter(problem.optimizer.state)) is problem.weight


# -- ranks -----------------------------------------------------------------------------------------


def lbfgs_on_ranks(overflowing: int | None) -> tuple[list[float], list[float], float, bool]:
    """Each rank holds half of the data; gradients are averaged inside the closure."""
    problem, scaler = Regression(), cpu_scaler(2.0**16)
    rank, size = dist.get_rank(), dist.get_world_size()
    minimum = problem.minimum()
    inputs, targets = problem.inputs.chunk(size)[rank], problem.targets.chunk(size)[rank]
    evaluations = 0

    def closure() -> Tensor:
        nonlocal evaluations
        problem.optimizer.zero_grad()
        loss = (inputs @ problem.weight - targets).square().mean()
        scaler.scale(loss).backward()
        assert problem.weight.grad is not None
        dist.all_reduce(problem.weight.grad, op=dist.ReduceOp.SUM)
        problem.weight.grad /= size
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == overflowing and evaluations == 2:
            problem.weight.grad[0] = INF  # on this rank alone
        evaluations += 1
        return total / size

    stepped = []
    for _ in range(3):
        scaler.step(problem.optimizer, closure)
        scaler.update()
        stepped.append(scaler.stepped(problem.optimizer))
    return (
        problem.weight.flatten().tolist(),
        minimum.flatten().tolist(),
        scaler.get_scale(),
        stepped,
    )


@pytest.mark.parametrize("overflowing", [None, 0, 1])
def test_lbfgs_on_two_ranks_agrees_on_every_evaluation(ranks2, overflowing):
    first, second = ranks2.run(lbfgs_on_ranks, overflowing)
    assert first == second
    weight, minimum, scale, stepped = first
    assert weight == pytest.approx(minimum, rel=1e-3, abs=1e-4)
    assert stepped == [overflowing is None, True, True]
    assert scale == (2.0**16 if overflowing is None else 2.0**15)


def messages_of_lbfgs() -> tuple[int, int]:
    problem, scaler = Regression(), cpu_scaler()
    scaler.step(problem.optimizer, problem.closure(scaler))
    scaler.update()
    before = problem.evaluations
    with count_collectives() as counted:
        scaler.step(problem.optimizer, problem.closure(scaler))
        scaler.update()
    return problem.evaluations - before, counted.count


def test_one_message_for_each_evaluation(ranks2):
    for evaluations, messages in ranks2.run(messages_of_lbfgs):
        assert messages == evaluations > 0


def fp16_gradient_on_one() -> list[str]:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = cpu_scaler()

    def closure() -> Tensor:
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            return scaler.scale(torch.zeros(()))
        loss = parameter.float().sum()
        scaler.scale(loss).backward()
        return loss

    try:
        scaler.step(optimizer, closure)
    except ValueError as error:
        return [str(error), str(parameter.item())]
    return ["nothing was raised"]


def test_a_gradient_that_one_rank_cannot_unscale_is_raised_on_both(ranks2):
    for message, value in ranks2.run(fp16_gradient_on_one):
        assert "Attempting to unscale FP16 gradients" in message
        assert value == "1.0"


def closure_fails_on_one() -> str:
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    good = line_closure(scaler, parameter, optimizer)

    def closure() -> Tensor:
        loss = good()
        if dist.get_rank() == 1:
            raise OSError("the data is gone")
        return loss

    try:
        scaler.step(optimizer, closure)
    except OSError as error:
        return f"{error}, {parameter.item()}"
    return "nothing was raised"


def test_an_exception_in_the_closure_on_one_rank_is_raised_on_both(ranks2):
    first, second = ranks2.run(closure_fails_on_one)
    assert first.startswith("the data is gone (raised on rank 1")
    assert second == "the data is gone, 1.0"
