"""torch's interface: names, signatures, settings, `update(new_scale)`, and arguments of `scale`."""

import inspect
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distamp
from distamp import DistGradScaler, StepGuard
from distamp.errors import CallOrderError, ConfigError
from distamp.scaler import DynamicLossScale, HysteresisLossScale, StaticLossScale
from tests.scaler.steps import INF, NAN, cpu_scaler, torch_scaler

# -- names -----------------------------------------------------------------------------------------


def test_grad_scaler_is_another_name_of_the_class():
    assert distamp.GradScaler is DistGradScaler


def test_scaler_passes_isinstance_checks_for_torchs_class():
    assert isinstance(cpu_scaler(), torch.amp.GradScaler)


def test_scaler_has_every_attribute_of_torchs_scaler():
    scaler = cpu_scaler()
    scaler.scale(torch.ones(()))
    reference = torch_scaler()
    reference.scale(torch.ones(()))
    missing = set(dir(reference)) - set(dir(scaler))
    assert missing == set()


def signatures() -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """Return the parameters of our constructor, and of torch's."""
    parameters = inspect.signature(DistGradScaler).parameters.values()
    torch_parameters = inspect.signature(torch.amp.GradScaler).parameters.values()
    return list(parameters), list(torch_parameters)


def test_constructor_begins_with_torchs_parameters_in_torchs_order():
    parameters, torch_parameters = signatures()
    for parameter, torch_parameter in zip(parameters, torch_parameters, strict=False):
        assert parameter.name == torch_parameter.name
    assert len(parameters) >= len(torch_parameters)


def test_constructor_has_torchs_defaults_except_for_the_device():
    parameters, torch_parameters = signatures()
    for parameter, torch_parameter in zip(parameters[1:], torch_parameters[1:], strict=False):
        assert parameter.default == torch_parameter.default


def test_parameters_that_torch_lacks_are_keyword_only():
    parameters, torch_parameters = signatures()
    for parameter in parameters[len(torch_parameters) :]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY


def test_call_order_error_is_caught_as_the_errors_that_torch_raises():
    """torch raises RuntimeError for some wrong orders of calls, and AssertionError for others."""
    assert issubclass(CallOrderError, (RuntimeError, AssertionError))


def test_config_error_is_caught_as_the_errors_that_torch_raises():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, AssertionError)


# -- settings --------------------------------------------------------------------------------------

NOT_NUMBERS = ["2", None, True, [2.0], NAN, INF, -INF]
NOT_COUNTS = [0, -1, 1.5, True, "2"]
BAD_VALUES: dict[str, list[Any]] = {
    "init_scale": [0.0, -1.0, 2.0**-25, 2.0**128, *NOT_NUMBERS],
    "growth_factor": [1.0, 0.5, -2.0, *NOT_NUMBERS],
    "backoff_factor": [1.0, 2.0, 0.0, -0.5, *NOT_NUMBERS],
    "growth_interval": [2.0, None, *NOT_COUNTS],
    "min_scale": [0.0, -1.0, 2.0**20, *NOT_NUMBERS],
    "max_scale": [1.0, 1e300, *NOT_NUMBERS],
    "fp16_grads": ["eror", "", None, True],
    "max_consecutive_skips": NOT_COUNTS,
    "hysteresis": [None, *NOT_COUNTS],
}


@pytest.mark.parametrize("setting", BAD_VALUES)
def test_constructor_refuses_a_bad_setting_by_name_and_value(setting):
    construct = HysteresisLossScale if setting == "hysteresis" else cpu_scaler
    for value in BAD_VALUES[setting]:
        with pytest.raises(ConfigError) as error:
            construct(**{setting: value})
        message = str(error.value)
        # Messages about the factors have torch's spelling, with a space.
        assert setting in message.replace(" factor", "_factor"), value
        assert repr(value) in message or repr(float(value)) in message


@pytest.mark.parametrize("setting", ["growth_factor", "backoff_factor", "growth_interval"])
def test_setters_refuse_a_bad_setting_and_keep_the_old_one(setting):
    scaler = cpu_scaler()
    set_value = getattr(scaler, f"set_{setting}")
    get_value = getattr(scaler, f"get_{setting}")
    default = get_value()
    for value in BAD_VALUES[setting]:
        with pytest.raises(ConfigError):
            set_value(value)
        assert get_value() == default


@pytest.mark.parametrize("setting", ["growth_factor", "backoff_factor", "growth_interval"])
def test_torchs_private_attributes_refuse_a_bad_setting_and_keep_the_old_one(setting):
    """Subclasses and trainers write ``scaler._growth_factor``."""
    scaler = cpu_scaler()
    get_value = getattr(scaler, f"get_{setting}")
    default = get_value()
    for value in BAD_VALUES[setting]:
        with pytest.raises(ConfigError):
            setattr(scaler, f"_{setting}", value)
        assert get_value() == default


@pytest.mark.parametrize(
    ("setting", "value"), [("growth_factor", 3.0), ("growth_interval", 5), ("min_scale", 1.0)]
)
def test_settings_of_the_default_loss_scale_are_refused_beside_another_loss_scale(setting, value):
    with pytest.raises(ConfigError, match="arguments of that loss scale"):
        DistGradScaler("cpu", loss_scale=StaticLossScale(), **{setting: value})


def test_an_initial_scale_below_the_minimum_of_the_loss_scale_is_refused():
    loss_scale = DynamicLossScale(min_scale=1.0)
    with pytest.raises(ConfigError, match=r"init_scale must be between .*min_scale=1\.0"):
        DistGradScaler("cpu", init_scale=0.5, loss_scale=loss_scale)


@pytest.mark.parametrize("loss_scale", ["static", StaticLossScale], ids=["name", "class"])
def test_a_loss_scale_that_is_no_instance_is_refused(loss_scale):
    with pytest.raises(TypeError, match="loss_scale must be a LossScale, such as"):
        DistGradScaler("cpu", loss_scale=loss_scale)


def test_a_model_as_named_parameters_is_refused():
    model: Any = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="pairs of name and parameter"):
        DistGradScaler("cpu", named_parameters=model)


def test_parameters_without_names_as_named_parameters_are_refused():
    parameters: Any = nn.Linear(1, 1).parameters()
    with pytest.raises(TypeError, match="pairs of name and parameter"):
        DistGradScaler("cpu", named_parameters=parameters)


@pytest.mark.parametrize("process_group", ["gloo", [0, 1]], ids=["backend", "ranks"])
def test_a_process_group_of_another_type_is_refused(process_group):
    with pytest.raises(TypeError, match="must be a ProcessGroup, a DeviceMesh or None"):
        DistGradScaler("cpu", process_group=process_group)


# -- devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")], ids=repr)
def test_a_device_is_a_type_or_a_torch_device(device):
    scaled = DistGradScaler(device).scale(torch.tensor(1.0))
    assert scaled.item() == 65536.0


def test_a_scale_in_the_place_of_the_device_is_refused_with_the_right_argument():
    """Before torch 2.3 ``init_scale`` was the first argument."""
    device: Any = 65536.0
    with pytest.raises(TypeError, match=r"init_scale=65536\.0"):
        DistGradScaler(device)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="'cdua' is not a device"):
        DistGradScaler("cdua")


def test_a_device_of_another_type_is_refused():
    device: Any = ["cpu"]
    with pytest.raises(TypeError, match="device must be a device type"):
        DistGradScaler(device)


def test_a_scaler_for_mps_is_refused():
    with pytest.raises(ConfigError, match="MPS has no float64"):
        DistGradScaler("mps")


def test_a_guard_is_refused_on_mps_too():
    with pytest.raises(ConfigError, match=r"MPS has no float64"):
        StepGuard()._lazy_init_scale_growth_tracker(torch.device("mps"))


NO_ACCELERATOR = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this machine has an accelerator"
)


@NO_ACCELERATOR
def test_without_an_accelerator_the_default_device_is_the_cpu():
    assert DistGradScaler().is_enabled()


@NO_ACCELERATOR
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, DistGradScaler])
def test_without_cuda_a_scaler_for_cuda_warns_and_is_disabled_as_torchs(scaler_class):
    with pytest.warns(UserWarning, match=r"GradScaler is enabled, but .* not available") as caught:
        scaler = scaler_class("cuda")
    assert not scaler.is_enabled()
    assert caught[0].filename == __file__, "the warning points at the caller"


@NO_ACCELERATOR
def test_without_cuda_a_disabled_scaler_for_cuda_does_not_warn():
    assert not DistGradScaler("cuda", enabled=False).is_enabled()


# -- update(new_scale) -----------------------------------------------------------------------------


def used_scaler() -> DistGradScaler:
    """Return a scaler with a scale of 1024 on its device, as after the first loss."""
    scaler = cpu_scaler()
    scaler.scale(torch.tensor(1.0))
    return scaler


@pytest.mark.parametrize(
    "new_scale",
    [
        4.0,
        4,
        torch.tensor(4.0),
        torch.tensor(4.0, dtype=torch.float64),
        torch.tensor(4),
        torch.tensor([[4.0]]),
    ],
    ids=repr,
)
def test_update_accepts_one_number_in_any_form(new_scale):
    scaler = used_scaler()
    scaler.update(new_scale)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_update_copies_a_tensor_that_its_caller_overwrites_later(dtype):
    scaler = used_scaler()
    new_scale = torch.tensor([[4]], dtype=dtype)
    scaler.update(new_scale)
    new_scale.fill_(7)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize(
    "new_scale", [0.0, -1.0, 2.0**-25, 2.0**128, "2", True, [2.0], NAN, INF], ids=repr
)
def test_update_refuses_a_number_that_is_no_scale_and_keeps_the_old_scale(new_scale):
    scaler = used_scaler()
    with pytest.raises(ConfigError, match=r"new_scale|float or a 1-element"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 1024.0


@pytest.mark.parametrize(
    "new_scale",
    [
        torch.tensor(0.0),
        torch.tensor([4.0, 4.0]),
        torch.tensor([]),
        torch.tensor(4.0, requires_grad=True),
    ],
    ids=repr,
)
def test_update_refuses_a_tensor_that_is_no_scale_and_keeps_the_old_scale(new_scale):
    scaler = used_scaler()
    with pytest.raises(ConfigError, match=r"new_scale|float or a 1-element"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 1024.0


def test_update_before_the_first_loss_raises_as_torchs():
    with pytest.raises(AssertionError, match=r"Attempted update but _scale is None"):
        cpu_scaler().update(4.0)


# -- arguments of scale ----------------------------------------------------------------------------

Outputs = namedtuple("Outputs", ["loss", "extra"])


def loss(value: float = 1.0) -> Tensor:
    return torch.tensor(value)


def assert_scaled_by_two(outputs: Any, expected: Any) -> None:
    """Scale outputs by 2, and compare values, types and the order of keys."""
    text = repr(outputs)
    scaled = cpu_scaler(2.0).scale(outputs)
    assert type(scaled) is type(expected)
    assert repr(scaled) == repr(expected)
    assert repr(outputs) == text, "the argument is left unchanged"


def test_a_namedtuple_of_outputs_keeps_its_type():
    outputs = Outputs(loss(1.0), [loss(1.0)])
    expected = Outputs(loss(2.0), [loss(2.0)])
    assert_scaled_by_two(outputs, expected)


def test_a_dict_of_outputs_keeps_the_order_of_its_keys():
    outputs = {"b": loss(1.0), "a": (loss(1.0),)}
    expected = {"b": loss(2.0), "a": (loss(2.0),)}
    assert_scaled_by_two(outputs, expected)


def test_an_ordered_dict_of_outputs_keeps_its_type_and_the_order_of_its_keys():
    outputs = OrderedDict(b=loss(1.0), a=[loss(1.0)])
    expected = OrderedDict(b=loss(2.0), a=[loss(2.0)])
    assert_scaled_by_two(outputs, expected)


def test_a_defaultdict_of_outputs_keeps_its_type_and_its_factory():
    outputs = defaultdict(list, b=loss(1.0))
    expected = defaultdict(list, b=loss(2.0))
    assert_scaled_by_two(outputs, expected)


@pytest.mark.parametrize("shape", [(), (1,), (2, 2), (0,)], ids=str)
def test_a_float16_loss_is_scaled_in_float32_without_overflow(shape):
    outputs = torch.full(shape, 2.0, dtype=torch.float16)
    expected = torch.full(shape, 131072.0)
    scaled = cpu_scaler(2.0**16).scale(outputs)
    torch.testing.assert_close(scaled, expected, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(), (1,), (2, 2), (0,)], ids=str)
def test_float16_losses_in_a_list_are_scaled_in_float32_without_overflow(shape):
    outputs = torch.full(shape, 2.0, dtype=torch.float16)
    expected = torch.full(shape, 131072.0)
    (scaled,) = cpu_scaler(2.0**16).scale([outputs])
    torch.testing.assert_close(scaled, expected, rtol=0, atol=0)


@pytest.mark.parametrize("outputs", [1.5, None, "loss", [1.5], [loss(), None], {"a": 2}], ids=str)
def test_outputs_that_are_no_tensors_are_refused_in_torchs_words(outputs):
    with pytest.raises(ValueError, match=r"outputs must be a Tensor or an iterable of Tensors"):
        cpu_scaler().scale(outputs)
