"""What a fused optimizer is handed, what is left behind, and half-precision gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from distamp import DistGradScaler
from tests.scaler.steps import INF, backward, cpu_scaler, leaf, torch_scaler

# -- exceptions inside a fused step ----------------------------------------------------------------


class Breaks(torch.optim.SGD):
    """A fused SGD whose first step fails, as where memory runs out."""

    broken = True

    def step(self, closure: Any = None) -> Any:
        if self.broken:
            self.broken = False
            raise MemoryError("no memory left")
        return super().step(closure)


@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
@pytest.mark.parametrize("unscale", [False, True], ids=["step alone", "after unscale_"])
def test_an_exception_inside_a_step_leaves_nothing_behind_and_may_be_retried(fused, unscale):
    parameter = leaf(1.0)
    optimizer = Breaks([parameter], lr=1.0, fused=fused)
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(MemoryError, match=r"no memory left"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    assert parameter.item() == 1.0
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.75
    assert scaler.step_counts(optimizer).taken == 1


@pytest.mark.parametrize("gradient", [0.25, INF], ids=["clean", "overflow"])
def test_a_fused_step_leaves_no_flags_on_the_optimizer(gradient):
    parameter = leaf(1.0)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    scaler = cpu_scaler()
    backward(scaler, parameter, gradient)
    scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


class Reads(torch.optim.SGD):
    """A fused SGD that notes what it is handed."""

    seen: Any = None

    def step(self, closure: Any = None) -> Any:
        self.seen = (self.grad_scale, self.found_inf)
        return super().step(closure)


@pytest.mark.parametrize("unscale", [False, True], ids=["step alone", "after unscale_"])
def test_what_a_fused_optimizer_is_handed(unscale):
    parameter = leaf(1.0)
    optimizer = Reads([parameter], lr=1.0, fused=True)
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    grad_scale, found_inf = optimizer.seen
    assert (found_inf.shape, found_inf.dtype, found_inf.item()) == ((), torch.float32, 0.0)
    assert grad_scale is None if unscale else grad_scale.item() == 1024.0
    assert parameter.item() == 0.75


def test_a_grad_scale_of_the_users_multiplies_as_in_torch():
    values = []
    for scaler in (cpu_scaler(), torch_scaler()):
        parameter = leaf(1.0)
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
        optimizer.grad_scale = torch.tensor(2.0)
        backward(scaler, parameter, 0.5)
        scaler.step(optimizer)
        values.append(parameter.item())
    assert values == [0.75, 0.75]


class Counts(torch.optim.Optimizer):
    """A user's optimizer of the fused protocol, which logs what it is called with."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.calls: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.calls.append(self.found_inf.item())
        for p in self.param_groups[0]["params"]:
            if not self.found_inf:
                p.data -= p.grad / self.grad_scale


@pytest.mark.parametrize("make", [cpu_scaler, torch_scaler])
@pytest.mark.parametrize("kind", ["Counts", "CountsAsSGD"])
def test_a_users_fused_optimizer_is_called_on_an_overflow_too(make, kind):
    parameter = leaf(1.0)
    optimizer = globals()[kind]([parameter])
    scaler = make()
    for gradient in (0.25, INF, 0.25):
        optimizer.zero_grad()
        backward(scaler, parameter, gradient)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.calls == [0.0, 1.0, 0.0]
    assert parameter.item() == 0.5


class CountsAsSGD(Counts, torch.optim.SGD):
    """The same, derived from an optimizer whose own groups say ``fused=None``."""

    def __init__(self, parameters: Any) -> None:
        torch.optim.SGD.__init__(self, parameters, lr=1.0)
        self.calls: list[float] = []


class TakesScaler(torch.optim.SGD):
    """torch's older protocol: the scaler itself is an argument of ``step`` (Apex's fused LAMB)."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad.isfinite().all():
                factor = 1.0 if grad_scaler is None else grad_scaler.get_scale()
                parameter.data -= parameter.grad / factor


def test_an_optimizer_that_wants_the_scaler_itself_is_given_it():
    parameter = leaf(1.0)
    optimizer = TakesScaler([parameter], lr=1.0)
    scaler = cpu_scaler()
    for gradient in (0.25, INF, 0.25):
        optimizer.zero_grad()
        backward(scaler, parameter, gradient)
        with pytest.warns(FutureWarning, match="stop passing itself"):
            scaler.step(optimizer)
        scaler.update()
    assert parameter.item() == 0.5


@pytest.mark.parametrize("unscale", [False, True])
def test_a_fused_optimizer_that_a_loaded_state_made_unfused_steps_where_torch_fails(unscale):
    for scaler in (cpu_scaler(), torch_scaler()):
        parameter = leaf(1.0)
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
        optimizer.load_state_dict(torch.optim.SGD([leaf(1.0)], lr=1.0).state_dict())
        backward(scaler, parameter, 0.25)
        if unscale:
            scaler.unscale_(optimizer)
        if isinstance(scaler, DistGradScaler):
            scaler.step(optimizer)
            assert parameter.item() == 0.75
        else:
            with pytest.raises(AssertionError, match=r"Expected grad_scale and found_inf"):
                scaler.step(optimizer)


# -- fp16 and bf16 gradients -----------------------------------------------------------------------


def half(dtype: torch.dtype, **options: Any) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = leaf(1.0, 1.0, dtype=dtype)
    return parameter, torch.optim.SGD([parameter], lr=1.0, **options)


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_fp16_gradients_are_refused_where_torch_refuses_them(call):
    for scaler in (cpu_scaler(), torch_scaler()):
        parameter, optimizer = half(torch.float16)
        backward(scaler, parameter, 0.25)
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients"):
            getattr(scaler, call)(optimizer)
        assert parameter.tolist() == [1.0, 1.0]


def test_after_the_refusal_the_gradients_are_as_they_were():
    wide, narrow = leaf(1.0), leaf(1.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([wide, narrow], lr=1.0)
    scaler = cpu_scaler()
    backward(scaler, wide, 0.25)
    backward(scaler, narrow, 0.25)
    with pytest.raises(ValueError, match=r"FP16"):
        scaler.step(optimizer)
    assert (wide.grad.item(), narrow.grad.item()) == (256.0, 256.0)


def test_inplace_takes_fp16_gradients_and_skips_their_overflow():
    parameter, optimizer = half(torch.float16)
    scaler = cpu_scaler(fp16_grads="inplace")
    backward(scaler, parameter, 0.25)
    scaler.unscale_(optimizer)
    assert parameter.grad.tolist() == [0.25, 0.25]
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.75, 0.75]
    optimizer.zero_grad()
    backward(scaler, parameter, [0.25, 65000.0])
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.tolist(), scaler.get_scale()) == ([0.75, 0.75], 512.0)


def test_inplace_flushes_small_gradients_as_documented_and_as_the_sharded_scaler(ranks1):
    (sharded,) = ranks1.run(small_fp16_gradient, "sharded")
    assert sharded == small_fp16_gradient("ours") == 0.0


def small_fp16_gradient(which: str) -> float:
    """What is left of a gradient of 1e-3 (scaled by 65536) that is divided by 65536 in fp16."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    scaler = ShardedGradScaler("cpu") if which == "sharded" else cpu_scaler(fp16_grads="inplace")
    parameter, optimizer = half(torch.float16)
    if which != "sharded":
        scaler = cpu_scaler(2.0**16, fp16_grads="inplace")
    scaler.scale(torch.ones(()))
    parameter.grad = torch.full((2,), 1e-3, dtype=torch.float16)
    scaler.unscale_(optimizer)
    return parameter.grad[0].item()


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_bf16_with_an_enabled_scaler_works_without_a_warning(options):
    parameter, optimizer = half(torch.bfloat16, **options)
    scaler = cpu_scaler(2.0**16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(scaler, parameter, 0.25)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scaler.scale((parameter * 0.25).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert parameter.tolist() == [0.5, 0.5]
    optimizer.zero_grad()
    backward(scaler, parameter, INF)
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.tolist(), scaler.get_scale()) == ([0.5, 0.5], 2.0**15)
