"""Optimizers that take the flag themselves, wrappers of frameworks, and steps that fail."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import DistGradScaler
from distamp.errors import CallOrderError
from distamp.scaler import MasterParameters, StepCounts
from tests.on_ranks import on_ranks
from tests.scaler.steps import (
    INF,
    backward,
    cpu_scaler,
    iteration,
    leaf,
    sgd,
    torch_scaler,
)

UNSCALE = pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])


# -- torch's protocol of fused optimizers ----------------------------------------------------------


class ProtocolOptimizer(torch.optim.Optimizer):
    """A user's optimizer of the protocol, which records scale and flag and steps by them."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.records: list[Any] = []

    def step(self, closure: Any = None) -> Any:
        flag = self.found_inf
        scale = None if self.grad_scale is None else self.grad_scale.item()
        self.records.append((scale, flag.shape, flag.item()))
        if flag:
            return
        for parameter in self.param_groups[0]["params"]:
            parameter.data -= parameter.grad / (1.0 if scale is None else scale)


def records_of_steps(scaler: Any, unscale: bool) -> list[Any]:
    """Return the parameter after three steps, and the scale and flag of each step."""
    parameter = leaf(1.0)
    optimizer = ProtocolOptimizer([parameter])
    for gradient in (0.25, INF, 0.25):
        iteration(scaler, optimizer, parameter, gradient, unscale=unscale)
        attributes = set(vars(optimizer))
        assert not attributes & {"grad_scale", "found_inf"}, "both are removed after the step"
    return [parameter.item(), *optimizer.records]


@UNSCALE
def test_an_optimizer_of_the_protocol_receives_torchs_scale_and_flag(unscale):
    """It receives both also on an overflow, because it skips the step by itself."""
    records = records_of_steps(cpu_scaler(), unscale)
    assert records == records_of_steps(torch_scaler(), unscale)


def momentum_after_skips(device: str) -> list[list[float]]:
    """Train a fused SGD, and return its parameters.

    The first step overflows, and the first step of a parameter that is added later. torch leaves a
    momentum buffer uninitialised in such a step.
    """
    parameters = [nn.Parameter(torch.ones(4, device=device)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters[:1], lr=1.0, momentum=0.5, fused=True)
    scaler = DistGradScaler(device, init_scale=1024.0)
    for number, gradient in enumerate((INF, 0.25, 0.25, INF, 0.25)):
        if number == 3:
            optimizer.add_param_group({"params": parameters[1:]})
        optimizer.zero_grad()
        for parameter in parameters:
            scaler.scale((parameter * gradient).sum()).backward()
        garbage = [torch.full((4,), 1e30, device=device) for _ in range(64)]
        # A new buffer reuses this memory.
        garbage.clear()
        scaler.step(optimizer)
        scaler.update()
    return [parameter.tolist() for parameter in parameters]


def test_a_skipped_step_leaves_no_momentum():
    # 1 - 0.25 - (0.125 + 0.25) - (0.1875 + 0.25), and one step from the start.
    assert momentum_after_skips("cpu") == [[-0.0625] * 4, [0.75] * 4]


# -- torch's older protocol: the scaler itself is an argument (Apex's fused LAMB) ------------------


class CallsTheScaler(torch.optim.SGD):
    """Unscales by the scaler, and skips the step if the scaler has a flag."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any) -> Any:
        grad_scaler.unscale_(self)
        flags = grad_scaler._found_inf_per_device(self).values()
        if any(flag.item() for flag in flags):
            return "skipped inside"
        super().step()
        return "stepped"


def train_with_overflow(scaler: Any, overflows: bool = True) -> tuple[list[Any], float, float]:
    """Return the results of three steps, the parameter, and the scale.

    The second step overflows if `overflows`.
    """
    parameter = leaf(1.0)
    optimizer = CallsTheScaler([parameter], lr=1.0)
    results = []
    for gradient in (0.25, INF if overflows else 0.25, 0.25):
        with pytest.warns(FutureWarning, match="stop passing itself"):
            results.append(iteration(scaler, optimizer, parameter, gradient))
    return results, parameter.item(), scaler.get_scale()


def test_an_optimizer_that_takes_the_scaler_is_given_it():
    expected = (["stepped", "skipped inside", "stepped"], 0.5, 512.0)
    assert train_with_overflow(torch_scaler()) == expected
    assert train_with_overflow(cpu_scaler()) == expected


@on_ranks(2)
def test_an_optimizer_that_takes_the_scaler_is_not_called_if_one_rank_overflowed():
    overflows = dist.get_rank() == 0
    expected = (["stepped", None, "stepped"], 0.5, 512.0)
    assert train_with_overflow(cpu_scaler(), overflows) == expected


# -- wrappers --------------------------------------------------------------------------------------


class Lightning:
    """LightningOptimizer of lightning.pytorch, which is no Optimizer and forwards attributes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = self.optimizer = optimizer

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        return self._optimizer.step(closure, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)


class Accelerated(torch.optim.Optimizer):
    """AcceleratedOptimizer of Accelerate, which is an Optimizer without groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class SharpnessAware(torch.optim.Optimizer):
    """SAM, which shares the groups of its ``base_optimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.base_optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "Lightning": Lightning,
    "Accelerate": Accelerated,
    "SAM": SharpnessAware,
    "twice": lambda optimizer: Lightning(Accelerated(optimizer)),
}


def test_masters_of_a_wrapper_are_stepped():
    """The wrapper has the masters, and shares its groups with the optimizer inside."""
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    wrapper = SharpnessAware(torch.optim.SGD([parameter], lr=0.5))
    MasterParameters(wrapper)
    scaler = cpu_scaler(8.0, fp16_grads="master")
    scaler.scale(parameter.float().sum()).backward()
    scaler.step(wrapper)
    assert scaler.step_was_taken(wrapper)
    assert parameter.item() == 0.5


class WrappedTraining:
    """A parameter, its optimizer in a wrapper, and a scaler that receives both by turns.

    Attributes:
        first: The optimizer that is unscaled, either the wrapper or the inner one.
        second: The optimizer that is stepped.
    """

    def __init__(self, name: str, first: str, fused: bool) -> None:
        self.parameter, self.inner = sgd(fused=fused)
        self.scaler = cpu_scaler()
        wrapper = WRAPPERS[name](self.inner)
        if first == "wrapper":
            self.first, self.second = wrapper, self.inner
        else:
            self.first, self.second = self.inner, wrapper

    def backward(self, gradient: float) -> None:
        self.inner.zero_grad()
        backward(self.scaler, self.parameter, gradient)

    def step(self, gradient: float) -> None:
        self.backward(gradient)
        self.scaler.unscale_(self.first)
        self.scaler.step(self.second)


ALREADY_CALLED = "already been called"
WRAPPER = pytest.mark.parametrize("name", WRAPPERS)
# A wrapper around a fused optimizer comes first only. As the second one it would forward torch's
# mark of fused optimizers and drop the flag, which it does with torch's class too.
FIRST = pytest.mark.parametrize(
    ("first", "fused"),
    [("wrapper", False), ("inner", False), ("wrapper", True)],
    ids=["wrapper", "inner", "fused wrapper"],
)


@WRAPPER
@FIRST
def test_a_wrapper_and_its_optimizer_are_unscaled_once(name, first, fused):
    training = WrappedTraining(name, first, fused)
    training.backward(0.25)
    training.scaler.unscale_(training.first)
    assert training.scaler.is_unscaled(training.second)
    with pytest.raises(RuntimeError, match=ALREADY_CALLED):
        training.scaler.unscale_(training.second)
    training.scaler.step(training.second)
    assert training.parameter.item() == 0.75


@WRAPPER
@FIRST
def test_a_wrapper_and_its_optimizer_are_stepped_once(name, first, fused):
    training = WrappedTraining(name, first, fused)
    training.step(0.25)
    with pytest.raises(RuntimeError, match=ALREADY_CALLED):
        training.scaler.step(training.first)
    assert training.parameter.item() == 0.75


@WRAPPER
@FIRST
def test_a_wrapper_and_its_optimizer_have_the_same_flags_and_counts(name, first, fused):
    training = WrappedTraining(name, first, fused)
    scaler = training.scaler
    for gradient in (0.25, INF, 0.5):
        training.step(gradient)
        scaler.update()
        for optimizer in (training.first, training.second):
            assert scaler.step_was_taken(optimizer) is (gradient != INF)
            assert scaler.found_inf(optimizer).item() == float(gradient == INF)
    for optimizer in (training.first, training.second):
        assert scaler.step_counts(optimizer) == StepCounts(taken=2, skipped=1)
    assert training.parameter.item() == 0.25


@WRAPPER
@FIRST
def test_a_clip_by_a_wrapper_counts_for_its_optimizer(name, first, fused):
    training = WrappedTraining(name, first, fused)
    training.backward(4.0)
    norm = training.scaler.clip_grad_norm_(training.first, 0.25)
    assert norm.item() == 4.0
    training.scaler.step(training.second)
    assert training.parameter.item() == pytest.approx(0.75, abs=1e-5)


# -- a step that fails -----------------------------------------------------------------------------


class Breaks(torch.optim.SGD):
    """SGD with a first step that raises MemoryError."""

    broken = True

    def step(self, closure: Any = None) -> Any:
        if self.broken:
            self.broken = False
            raise MemoryError("no memory left")
        return super().step(closure)


REFUSED_UNTIL_UPDATE = r"After a step that raised, call zero_grad\(\) and upd"


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@UNSCALE
def test_after_an_exception_inside_a_step_the_next_step_waits_for_update(fused, unscale):
    parameter = leaf(1.0)
    optimizer = Breaks([parameter], lr=1.0, fused=fused)
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    assert not set(vars(optimizer)) & {"grad_scale", "found_inf"}
    with pytest.raises(CallOrderError, match=REFUSED_UNTIL_UPDATE):
        scaler.step(optimizer)
    assert not scaler.is_unscaled(optimizer)
    assert parameter.item() == 1.0
    assert scaler.step_counts(optimizer).taken == 0

    optimizer.zero_grad()
    scaler.update()
    iteration(scaler, optimizer, parameter, 0.25)
    assert parameter.item() == 0.75
    assert scaler.step_counts(optimizer).taken == 1


@pytest.mark.parametrize("settings", [{}, {"max_norm": 8.0}], ids=["step", "max_norm"])
def test_after_a_step_that_raised_no_scaled_gradient_is_taken_for_an_unscaled_one(settings):
    parameter = leaf(1.0)
    optimizer = Breaks([parameter], lr=1.0)
    scaler = cpu_scaler()
    with pytest.raises(MemoryError):
        iteration(scaler, optimizer, parameter, 0.5, **settings)
    with pytest.raises(CallOrderError, match=REFUSED_UNTIL_UPDATE):
        iteration(scaler, optimizer, parameter, 0.25, **settings)
    scaler.update()
    iteration(scaler, optimizer, parameter, 0.25, **settings)
    assert parameter.item() == 0.75


# -- arguments of a wrong type ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "argument", [[sgd()[1]], leaf(1.0), None], ids=["list", "parameter", "None"]
)
@pytest.mark.parametrize("call", ["unscale_", "step", "register_optimizers"])
def test_an_argument_that_is_no_optimizer_is_refused_by_its_type(call, argument):
    parameter, _ = sgd()
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    method = getattr(scaler, call)
    with pytest.raises(TypeError, match=f"an optimizer, not {type(argument).__name__}"):
        method(argument)


def test_unscale_without_an_optimizer_is_refused():
    scaler = cpu_scaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(TypeError, match="at least one optimizer"):
        scaler.unscale_()


def test_a_parameter_that_is_no_tensor_is_refused():
    parameter, optimizer = sgd()
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    optimizer.param_groups[0]["params"] = [1.0]
    with pytest.raises(TypeError, match=r"expected param to be torch\.Tensor, got float"):
        scaler.step(optimizer)
