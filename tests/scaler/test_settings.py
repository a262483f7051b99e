"""Every setting is checked where it is given; a message names the value, the range and the fix."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import nn

import distamp
from distamp import DistGradScaler
from distamp.errors import DistampError, SettingError
from distamp.scaler import DynamicSchedule, HysteresisSchedule, StaticSchedule
from tests.scaler.steps import INF, NAN, cpu_scaler, iteration, sgd, torch_scaler

NOT_NUMBERS = ["2", None, True, [2.0], NAN, INF, -INF]


# -- the constructor -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "values", "says"),
    [
        ("init_scale", [0.0, -1.0, 2.0**-25, 2.0**128, *NOT_NUMBERS], "init_scale must be"),
        ("growth_factor", [1.0, 0.5, -2.0], "growth factor must be > 1.0"),
        ("growth_factor", NOT_NUMBERS, "growth_factor must be a finite number"),
        ("backoff_factor", [1.0, 2.0, 0.0, -0.5], "backoff factor must be < 1.0 and > 0.0"),
        ("backoff_factor", NOT_NUMBERS, "backoff_factor must be a finite number"),
        ("growth_interval", [0, -1, 1.5, 2.0, True, None, "2"], "growth_interval must be an int"),
        ("min_scale", [0.0, -1.0, 2.0**20], "min_scale"),
        ("min_scale", NOT_NUMBERS, "min_scale must be a finite number"),
        ("max_scale", [1.0, 1e300], "max_scale"),
        ("max_scale", NOT_NUMBERS, "max_scale must be a finite number"),
        ("fp16_grads", ["eror", "", None, True], "fp16_grads must be one of"),
        ("max_consecutive_skips", [0, -1, 1.5, True, "3"], "max_consecutive_skips must be"),
    ],
)
def test_a_bad_setting_is_refused_with_its_name_value_and_range(setting, values, says):
    for value in values:
        with pytest.raises(SettingError) as caught:
            DistGradScaler("cpu", **{setting: value})
        message = str(caught.value)
        assert says in message
        assert setting in message or setting.replace("_", " ") in message
        shown = repr(float(value)) if type(value) in (int, float) else repr(value)
        assert shown in message or repr(value) in message


def test_a_refused_setting_is_what_torch_raises_there_too():
    for settings in ({"growth_factor": 1.0}, {"backoff_factor": 1.0}):
        with pytest.raises(AssertionError):
            torch.amp.GradScaler("cpu", **settings)
        with pytest.raises(AssertionError):
            DistGradScaler("cpu", **settings)
    assert issubclass(SettingError, (ValueError,))
    assert issubclass(SettingError, (DistampError,))


@pytest.mark.parametrize("scale", [65536.0, 65536, 2.0**24])
def test_a_scale_in_the_place_of_the_device_is_told_its_keyword(scale):
    with pytest.raises(TypeError, match=rf"init_scale={scale!r}"):
        DistGradScaler(scale)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match=r"'cdua' is not a device"):
        DistGradScaler("cdua")
    with pytest.raises(TypeError, match=r"device must be a device type such as"):
        DistGradScaler(["cpu"])


def test_a_torch_device_stands_for_its_type():
    assert DistGradScaler(torch.device("cpu")).scale(torch.tensor(1.0)).item() == 65536.0
    assert DistGradScaler("cpu:0")._device == "cpu"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_none_is_cpu_and_enabled():
    scaler = DistGradScaler()
    assert (scaler._device, scaler.is_enabled()) == ("cpu", True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there_warns_and_disables_as_torchs_does():
    raised = []
    for kind in (torch.amp.GradScaler, DistGradScaler):
        with pytest.warns(UserWarning, match=r"GradScaler is enabled, but .* not available") as w:
            scaler = kind("cuda")
        assert not scaler.is_enabled()
        raised.append(w[0].filename)
    assert raised == [__file__, __file__], "the warning points at the caller"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_disabled_scaler_for_a_device_that_is_not_there_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not DistGradScaler("cuda", enabled=False).is_enabled()


def test_the_positions_are_torchs():
    theirs = list(inspect.signature(torch.amp.GradScaler).parameters.values())
    ours = list(inspect.signature(DistGradScaler).parameters.values())
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    assert [p.default for p in ours[1 : len(theirs)]] == [p.default for p in theirs[1:]]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_the_class_is_a_torch_grad_scaler_under_both_names():
    assert distamp.GradScaler is distamp.DistGradScaler
    assert isinstance(cpu_scaler(), torch.amp.GradScaler)


def test_a_schedule_has_the_scales_settings_to_itself():
    for setting, value in (
        ("growth_factor", 3.0),
        ("backoff_factor", 0.25),
        ("growth_interval", 5),
        ("min_scale", 1.0),
        ("max_scale", 2.0**20),
    ):
        with pytest.raises(SettingError, match=r"belong to the schedule"):
            DistGradScaler("cpu", schedule=StaticSchedule(), **{setting: value})


def test_a_schedule_must_be_one():
    with pytest.raises(TypeError, match=r"schedule must be a Schedule, not str"):
        DistGradScaler("cpu", schedule="static")


def test_a_schedule_class_is_no_schedule():
    with pytest.raises(TypeError, match=r"schedule must be a Schedule, not"):
        DistGradScaler("cpu", schedule=StaticSchedule)


@pytest.mark.parametrize("hysteresis", [0, -1, 1.5, True, "2", None])
def test_a_bad_hysteresis_is_refused(hysteresis):
    with pytest.raises(SettingError, match=r"hysteresis must be an integer >= 1"):
        HysteresisSchedule(hysteresis=hysteresis)


def test_the_first_scale_must_lie_within_the_schedules_bounds():
    with pytest.raises(SettingError, match=r"init_scale must be between .*min_scale=1.0"):
        DistGradScaler("cpu", init_scale=0.5, schedule=DynamicSchedule(min_scale=1.0))


@pytest.mark.parametrize(
    "given", [nn.Linear(1, 1), nn.Linear(1, 1).parameters(), 3], ids=["module", "parameters", "3"]
)
def test_named_parameters_must_be_pairs(given):
    with pytest.raises(TypeError, match=r"pairs of name and parameter, as model.named_parameters"):
        DistGradScaler("cpu", named_parameters=given)


# -- setters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setter", "values"),
    [
        ("set_growth_factor", [1.0, 0.5, 0.0, *NOT_NUMBERS]),
        ("set_backoff_factor", [1.0, 0.0, -1.0, *NOT_NUMBERS]),
        ("set_growth_interval", [0, -1, 1.5, True, None, "2"]),
    ],
)
def test_a_refused_setter_changes_nothing(setter, values):
    scaler = cpu_scaler()
    getter = getattr(scaler, setter.replace("set", "get", 1))
    before = getter()
    for value in values:
        with pytest.raises(SettingError):
            getattr(scaler, setter)(value)
        assert getter() == before


# -- update(new_scale) -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "new_scale",
    [
        4.0,
        4,
        torch.tensor(4.0),
        torch.tensor(4.0, dtype=torch.float64),
        torch.tensor(4),
        torch.tensor([4.0]),
        torch.tensor([[4.0]]),
    ],
    ids=str,
)
def test_update_takes_one_number_in_any_form(new_scale):
    scaler = cpu_scaler()
    assert scaler.scale(torch.tensor(1.0)).item() == 1024.0
    scaler.update(new_scale)
    assert scaler.get_scale() == 4.0
    assert scaler.scale(torch.tensor(1.0)).item() == 4.0


def test_update_copies_the_tensor_it_is_given():
    scaler = cpu_scaler()
    scaler.scale(torch.tensor(1.0))
    given = torch.tensor(4.0)
    scaler.update(given)
    given.fill_(8.0)
    assert scaler.get_scale() == 4.0


def test_update_with_a_new_scale_leaves_the_tracker_as_torchs_does():
    seen = []
    for scaler in (cpu_scaler(growth_interval=3), torch_scaler(growth_interval=3)):
        parameter, optimizer = sgd(1.0)
        iteration(scaler, optimizer, parameter, 0.0)
        scaler.update(32.0)
        trace = [scaler._get_growth_tracker()]
        for _ in range(2):
            iteration(scaler, optimizer, parameter, 0.0)
            trace.append(scaler.get_scale())
        seen.append(trace)
    assert seen[0] == seen[1] == [1, 32.0, 64.0]


@pytest.mark.parametrize(
    "new_scale",
    [0.0, -1.0, 2.0**-25, 2.0**128, *NOT_NUMBERS[:-3], NAN, INF, torch.tensor(0.0)],
    ids=str,
)
def test_update_refuses_a_scale_out_of_bounds_and_changes_nothing(new_scale):
    if new_scale is None:
        return  # update() itself
    scaler = cpu_scaler()
    scaler.scale(torch.tensor(1.0))
    with pytest.raises(SettingError, match=r"new_scale must be"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 1024.0


@pytest.mark.parametrize(
    "new_scale",
    [torch.tensor([4.0, 4.0]), torch.tensor([]), torch.tensor(4.0, requires_grad=True)],
    ids=["two elements", "none", "requires grad"],
)
def test_update_refuses_a_tensor_that_is_not_one_plain_number(new_scale):
    scaler, torchs = cpu_scaler(), torch_scaler()
    for each in (scaler, torchs):
        each.scale(torch.tensor(1.0))
        with pytest.raises(AssertionError, match=r"float or a 1-element"):
            each.update(new_scale)
    assert scaler.get_scale() == 1024.0


def test_update_before_scale_is_torchs_error():
    for scaler in (cpu_scaler(), torch_scaler()):
        for arguments in ((), (4.0,)):
            with pytest.raises(AssertionError, match=r"Attempted update but _scale is None"):
                scaler.update(*arguments)
