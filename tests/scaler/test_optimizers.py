"""Optimizers that take the flag themselves, wrappers of frameworks, and steps that fail."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import DistGradScaler
from distamp.errors import CallOrderError
from distamp.scaler import MasterParameters, StepCounts
from tests.scaler.steps import (
    INF,
    backward,
    cpu_scaler,
    error_of,
    iteration,
    leaf,
    sgd,
    torch_scaler,
)

UNSCALE = pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])


# -- torch's protocol of fused optimizers ----------------------------------------------------------


class Own(torch.optim.Optimizer):
    """A user's optimizer of the protocol: notes what it is handed, and steps by it."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.seen: list[Any] = []

    def step(self, closure: Any = None) -> Any:
        scale, flag = self.grad_scale, self.found_inf
        self.seen.append((None if scale is None else scale.item(), flag.shape, flag.item()))
        for p in self.param_groups[0]["params"]:
            if not flag:
                p.data -= p.grad / (1.0 if scale is None else scale)


@UNSCALE
def test_an_optimizer_of_the_protocol_is_handed_what_torch_hands_it(unscale):
    """Scale and flag, on an overflow too; 0-d, and gone afterwards."""
    seen = []
    for scaler in (cpu_scaler(), torch_scaler()):
        parameter = leaf(1.0)
        optimizer = Own([parameter])
        for gradient in (0.25, INF, 0.25):
            iteration(scaler, optimizer, parameter, gradient, unscale=unscale)
            assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
        seen.append([parameter.item(), *optimizer.seen])
    assert seen[0] == seen[1]


def momentum_after_skips(device: str) -> list[list[float]]:
    """A fused SGD whose first step overflows, and that which follows a parameter that came later.

    torch leaves a momentum buffer that was never written uninitialised.
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
        del garbage[:]  # what a new buffer finds
        scaler.step(optimizer)
        scaler.update()
    return [parameter.tolist() for parameter in parameters]


def test_a_skipped_step_leaves_no_momentum():
    # 1 - 0.25 - (0.125 + 0.25) - (0.1875 + 0.25), and one step from the start.
    assert momentum_after_skips("cpu") == [[-0.0625] * 4, [0.75] * 4]


# -- torch's older protocol: the scaler itself is an argument (Apex's fused LAMB) ------------------


class AsksTheScaler(torch.optim.SGD):
    """Unscales and skips by what it asks the scaler."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any) -> Any:
        grad_scaler.unscale_(self)
        if sum(flag.item() for flag in grad_scaler._found_inf_per_device(self).values()):
            return "skipped inside"
        super().step()
        return "stepped"


def _asked(make: Any = cpu_scaler) -> Any:
    """The second iteration overflows on one rank."""
    (parameter, scaler), returned = (leaf(1.0), make()), []
    optimizer = AsksTheScaler([parameter], lr=1.0)
    bad = 0.25 if dist.is_initialized() and dist.get_rank() else INF
    for gradient in (0.25, bad, 0.25):
        with pytest.warns(FutureWarning, match="stop passing itself"):
            returned.append(iteration(scaler, optimizer, parameter, gradient))
    return returned, parameter.item(), scaler.get_scale()


def test_an_optimizer_that_takes_the_scaler_is_given_it(ranks2):
    assert (
        _asked() == _asked(torch_scaler) == (["stepped", "skipped inside", "stepped"], 0.5, 512.0)
    )
    # Whatever it looks at, it is not called on several ranks where one of them overflowed.
    assert ranks2.run(_asked) == [(["stepped", None, "stepped"], 0.5, 512.0)] * 2


# -- wrappers --------------------------------------------------------------------------------------


class Lightning:
    """As lightning.pytorch.core.optimizer.LightningOptimizer: no Optimizer, passes on by name."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = self.optimizer = optimizer

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        return self._optimizer.step(closure, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)


class Accelerated(torch.optim.Optimizer):
    """As accelerate.optimizer.AcceleratedOptimizer: an Optimizer that has no groups of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class SharpnessAware(torch.optim.Optimizer):
    """As SAM: shares the groups of the optimizer under ``base_optimizer``."""

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


# A wrapper that forwards torch's mark of fused optimizers drops the flag, under torch's class too.
@pytest.mark.parametrize(
    ("through", "fused"), [("wrapper", False), ("inner", False), ("wrapper", True)]
)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_and_what_it_wraps_are_one_optimizer(name, through, fused):
    """Stepped through one, unscaled, clipped, refused and asked about through the other."""
    parameter, inner = sgd(fused=fused)
    both, scaler = [WRAPPERS[name](inner), inner], cpu_scaler()
    first, second = both if through == "wrapper" else both[::-1]
    for gradient in (0.25, INF, 0.5):
        inner.zero_grad()
        backward(scaler, parameter, gradient)
        scaler.unscale_(first)
        assert scaler.is_unscaled(second)
        assert "already been called" in error_of(scaler.unscale_, second)[1]
        scaler.step(second)
        assert "already been called" in error_of(scaler.step, first)[1]
        scaler.update()
        told = [(scaler.step_was_taken(o), scaler.found_inf(o).item()) for o in both]
        assert told == [(gradient != INF, float(gradient == INF))] * 2
    inner.zero_grad()
    backward(scaler, parameter, 4.0)
    assert scaler.clip_grad_norm_(first, 0.25).item() == 4.0
    scaler.step(second)
    assert parameter.item() == pytest.approx(0.0, abs=1e-5)
    assert [scaler.step_counts(o) for o in both] == [StepCounts(taken=3, skipped=1)] * 2


# -- a step that fails -----------------------------------------------------------------------------


class Breaks(torch.optim.SGD):
    """Its first step fails, as where memory runs out."""

    broken = True

    def step(self, closure: Any = None) -> Any:
        if self.broken:
            self.broken = False
            raise MemoryError("no memory left")
        return super().step(closure)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@UNSCALE
def test_after_an_exception_inside_a_step_the_next_step_waits_for_update(fused, unscale):
    parameter, scaler = leaf(1.0), cpu_scaler()
    optimizer = Breaks([parameter], lr=1.0, fused=fused)
    backward(scaler, parameter, 0.25)
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
    with pytest.raises(
        CallOrderError, match=r"After a step that raised, call zero_grad\(\) and upd"
    ):
        scaler.step(optimizer)
    assert not scaler.is_unscaled(optimizer)
    assert (parameter.item(), scaler.step_counts(optimizer).taken) == (1.0, 0)
    optimizer.zero_grad()
    scaler.update()
    iteration(scaler, optimizer, parameter, 0.25)
    assert (parameter.item(), scaler.step_counts(optimizer).taken) == (0.75, 1)


@pytest.mark.parametrize("settings", [{}, {"max_norm": 8.0}], ids=["step", "max_norm"])
def test_after_a_step_that_raised_no_scaled_gradient_is_taken_for_an_unscaled_one(settings):
    parameter, scaler = leaf(1.0), cpu_scaler()
    optimizer = Breaks([parameter], lr=1.0)
    with pytest.raises(MemoryError):
        iteration(scaler, optimizer, parameter, 0.5, **settings)
    with pytest.raises(
        CallOrderError, match=r"After a step that raised, call zero_grad\(\) and upd"
    ):
        iteration(scaler, optimizer, parameter, 0.25, **settings)
    scaler.update()
    iteration(scaler, optimizer, parameter, 0.25, **settings)
    assert parameter.item() == 0.75


def test_what_is_no_optimizer_is_named():
    (parameter, optimizer), scaler = sgd(), cpu_scaler()
    backward(scaler, parameter, 0.25)
    calls = (scaler.unscale_, scaler.step, scaler.register_optimizers)
    for wrong, call in itertools.product(([optimizer], parameter, None), calls):
        with pytest.raises(TypeError, match=f"an optimizer, not {type(wrong).__name__}"):
            call(wrong)
    with pytest.raises(TypeError, match="at least one optimizer"):
        scaler.unscale_()
    optimizer.param_groups[0]["params"] = [1.0]
    with pytest.raises(TypeError, match=r"expected param to be torch.Tensor, got float"):
        scaler.step(optimizer)
