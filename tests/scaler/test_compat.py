"""torch's inner names, as frameworks that subclass the scaler read and override them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from distamp import DistGradScaler
from distamp.errors import SettingError
from tests.scaler.steps import INF, backward, cpu_scaler, iteration, leaf, sgd, torch_scaler


def test_every_method_and_inner_name_of_torchs_class_is_there():
    theirs = torch_scaler()
    theirs.scale(torch.ones(()))
    ours = cpu_scaler()
    ours.scale(torch.ones(()))
    names = {name for name in dir(theirs) if not name.startswith("__")}
    assert {name for name in names if not hasattr(ours, name)} == set()


@pytest.mark.parametrize(
    "name",
    [
        "_init_scale",
        "_init_growth_tracker",
        "_growth_factor",
        "_backoff_factor",
        "_growth_interval",
        "_enabled",
        "_device",
        "_scale",
        "_growth_tracker",
    ],
)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_inner_values_are_torchs(name, used):
    ours, theirs = cpu_scaler(growth_interval=3), torch_scaler(growth_interval=3)
    if used:
        for scaler in (ours, theirs):
            parameter, optimizer = sgd(1.0)
            for gradient in (0.0, INF, 0.0):
                iteration(scaler, optimizer, parameter, gradient)
    mine, torchs = getattr(ours, name), getattr(theirs, name)
    assert type(mine) is type(torchs)
    if isinstance(torchs, Tensor):
        assert (mine.dtype, mine.shape, mine.device) == (torchs.dtype, torchs.shape, torchs.device)
    assert mine == torchs


@pytest.mark.parametrize(
    ("name", "value", "getter"),
    [
        ("_growth_factor", 4.0, "get_growth_factor"),
        ("_backoff_factor", 0.25, "get_backoff_factor"),
        ("_growth_interval", 1, "get_growth_interval"),
    ],
)
def test_an_inner_setting_can_be_assigned_and_moves_the_scale(name, value, getter):
    traces = []
    for scaler in (cpu_scaler(growth_interval=2), torch_scaler(growth_interval=2)):
        parameter, optimizer = sgd(1.0)
        setattr(scaler, name, value)
        trace = [getattr(scaler, getter)()]
        for gradient in (0.0, 0.0, INF):
            iteration(scaler, optimizer, parameter, gradient)
            trace.append(scaler.get_scale())
        traces.append(trace)
    assert traces[0] == traces[1]
    assert traces[0][0] == value


@pytest.mark.parametrize(
    ("name", "value"), [("_growth_factor", 0.5), ("_backoff_factor", 2), ("_growth_interval", 0)]
)
def test_an_inner_setting_is_validated_too(name, value):
    scaler = cpu_scaler()
    before = getattr(scaler, name)
    with pytest.raises(SettingError):
        setattr(scaler, name, value)
    assert getattr(scaler, name) == before


def test_the_scale_may_be_made_early_on_a_device_of_choice():
    scaler = cpu_scaler()
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scale, tracker = scaler._check_scale_growth_tracker("unscale_")
    assert (scale.item(), tracker.item()) == (1024.0, 0)
    assert scaler._get_scale_async() is scaler._scale
    assert scale is scaler._scale


def test_a_scale_tensor_may_be_put_in_place_of_the_scalers():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    scaler.scale(torch.ones(()))
    scaler._scale = torch.tensor(8.0)
    backward(scaler, parameter, 0.25)
    assert parameter.grad.item() == 2.0
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.item(), scaler.get_scale()) == (0.75, 8.0)


def test_the_scale_tensor_keeps_its_identity_for_who_holds_it():
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler(growth_interval=1)
    scaler.scale(torch.ones(()))
    kept = (scaler._scale, scaler._growth_tracker)
    for gradient in (0.0, INF, 0.0):
        iteration(scaler, optimizer, parameter, gradient)
    scaler.update(4.0)
    scaler.load_state_dict(scaler.state_dict())
    assert (scaler._scale, scaler._growth_tracker)[0] is kept[0]
    assert scaler._growth_tracker is kept[1]


# -- per-optimizer records -------------------------------------------------------------------------


def test_the_record_goes_through_torchs_stages():
    parameter, optimizer = sgd(1.0)
    traces = []
    for scaler in (cpu_scaler(), torch_scaler()):
        stages = []

        def note(stages: list[OptState] = stages, scaler: Any = scaler) -> None:
            stages.append(scaler._per_optimizer_states[id(optimizer)]["stage"])

        optimizer.zero_grad()
        note()
        backward(scaler, parameter, 0.0)
        scaler.unscale_(optimizer)
        note()
        scaler.step(optimizer)
        note()
        scaler.update()
        note()
        traces.append(stages)
    assert traces[0] == traces[1]
    assert traces[0] == [OptState.READY, OptState.UNSCALED, OptState.STEPPED, OptState.READY]


@pytest.mark.parametrize("gradient", [0.25, INF], ids=["clean", "overflow"])
def test_found_inf_per_device_is_torchs(gradient):
    for scaler in (cpu_scaler(), torch_scaler()):
        parameter, optimizer = sgd(1.0)
        backward(scaler, parameter, gradient)
        scaler.unscale_(optimizer)
        record = scaler._per_optimizer_states[id(optimizer)]
        found = scaler._found_inf_per_device(optimizer)
        assert found is record["found_inf_per_device"]
        assert {device: (f.shape, f.item()) for device, f in found.items()} == {
            torch.device("cpu"): ((), float(gradient == INF))
        }


@pytest.mark.parametrize("gradient", [0.25, INF], ids=["clean", "overflow"])
def test_check_inf_per_device_looks_and_leaves_the_gradients(gradient):
    for scaler in (cpu_scaler(), torch_scaler()):
        parameter, optimizer = sgd(1.0)
        backward(scaler, parameter, gradient)
        before = parameter.grad.clone()
        found = scaler._check_inf_per_device(optimizer)
        assert [f.item() for f in found.values()] == [float(gradient == INF)]
        assert torch.equal(parameter.grad, before)
        assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


def checked_on_ranks() -> list[float]:
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, INF if dist.get_rank() == 1 else 0.25)
    return [f.item() for f in scaler._check_inf_per_device(optimizer).values()]


def test_check_inf_per_device_is_agreed_on_by_all_ranks(ranks2):
    assert ranks2.run(checked_on_ranks) == [[1.0], [1.0]]


def test_a_framework_may_write_the_records_itself():
    """As some do: set the stage and the flags from a found-inf of their own."""
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    record = scaler._per_optimizer_states[id(optimizer)]
    record["found_inf_per_device"] = {torch.device("cpu"): torch.ones(())}
    record["stage"] = OptState.UNSCALED
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.item(), scaler.get_scale()) == (1.0, 512.0)


# -- subclasses ------------------------------------------------------------------------------------


class AllowsFp16(DistGradScaler):
    """As recipes for pure fp16 models override it."""

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


class TorchAllowsFp16(torch.amp.GradScaler):
    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


@pytest.mark.parametrize("unscale", [False, True])
def test_an_override_of_unscale_grads_allows_fp16_as_under_torch(unscale):
    traces = []
    for kind in (AllowsFp16, TorchAllowsFp16):
        parameter = leaf(1.0, dtype=torch.float16)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler, trace = kind("cpu", init_scale=1024.0), []
        for gradient in (0.25, INF, 0.25):
            iteration(scaler, optimizer, parameter, gradient, unscale=unscale)
            trace.append((parameter.item(), scaler.get_scale()))
        traces.append(trace)
    assert traces[0] == traces[1] == [(0.75, 1024.0), (0.75, 512.0), (0.5, 512.0)]


class Unscales(DistGradScaler):
    """An override that finds an overflow of its own, on rank 1 alone."""

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if dist.get_rank() == 1:
            flags[torch.device("cpu")].fill_(1.0)
        return flags


def overridden_on_ranks() -> tuple[float, float]:
    parameter, optimizer = sgd(1.0)
    scaler = Unscales("cpu", init_scale=1024.0)
    iteration(scaler, optimizer, parameter, 0.25)
    return parameter.item(), scaler.get_scale()


def test_what_an_override_finds_is_agreed_on_by_all_ranks(ranks2):
    assert ranks2.run(overridden_on_ranks) == [(1.0, 512.0)] * 2


def test_a_subclass_that_unscales_through_the_inner_pass_alone_sees_torchs_flags():
    """``_unscale_grads_`` called directly, with flags of the caller's."""
    seen = []
    for scaler in (cpu_scaler(), torch_scaler()):
        first, second = leaf(1.0, 1.0), leaf(1.0)
        optimizer = torch.optim.SGD([first, second], lr=1.0)
        backward(scaler, first, [0.5, 0.25])
        backward(scaler, second, INF)
        flags = scaler._unscale_grads_(optimizer, torch.tensor(1 / 1024), torch.zeros(()), False)
        seen.append(
            ({d: f.item() for d, f in flags.items()}, first.grad.tolist(), second.grad.item())
        )
    assert seen[0] == seen[1]
    assert seen[0][:2] == ({torch.device("cpu"): 1.0}, [0.5, 0.25])
