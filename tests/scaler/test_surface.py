"""torch's surface: names, signatures, settings, the order of calls, what may be scaled."""

import functools
import inspect
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import distamp
from distamp import DistGradScaler, StepGuard
from distamp.errors import CallOrderError, ConfigError
from distamp.scaler import DynamicLossScale, HysteresisLossScale, StaticLossScale
from tests.scaler.steps import INF, NAN, cpu_scaler, torch_scaler

# -- names -----------------------------------------------------------------------------------------


def test_the_class_is_torchs_with_its_names_and_positions():
    ours, theirs = cpu_scaler(), torch_scaler()
    for scaler in (ours, theirs):
        scaler.scale(torch.ones(()))
    assert {name for name in dir(theirs) if not hasattr(ours, name)} == set()
    assert distamp.GradScaler is DistGradScaler
    assert isinstance(ours, torch.amp.GradScaler)
    mine, torchs = (
        list(inspect.signature(cls).parameters.values())
        for cls in (DistGradScaler, torch.amp.GradScaler)
    )
    same, more = mine[: len(torchs)], mine[len(torchs) :]
    assert [p.name for p in same] == [p.name for p in torchs]
    assert [p.default for p in same[1:]] == [p.default for p in torchs[1:]]
    assert all(p.kind is p.KEYWORD_ONLY for p in more)
    assert issubclass(CallOrderError, (RuntimeError, AssertionError))
    assert {ValueError, AssertionError} <= {*ConfigError.__mro__}


# -- settings --------------------------------------------------------------------------------------

NOT_NUMBERS = ["2", None, True, [2.0], NAN, INF, -INF]
NOT_COUNTS = [0, -1, 1.5, True, "2"]
BAD: dict[str, list[Any]] = {
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


@pytest.mark.parametrize("setting", BAD)
def test_a_bad_setting_is_refused_by_name_and_value_wherever_it_is_given(setting):
    cpu = functools.partial(DistGradScaler, "cpu")
    make, scaler = HysteresisLossScale if setting == "hysteresis" else cpu, cpu_scaler()
    setter = getattr(scaler, f"set_{setting}", None)
    for value in BAD[setting]:
        with pytest.raises(ConfigError) as caught:
            make(**{setting: value})
        said = str(caught.value)
        assert setting in said.replace(" factor", "_factor"), value
        assert repr(value) in said or repr(float(value)) in said
        if setter is not None:
            with pytest.raises(ConfigError):
                setter(value)
            with pytest.raises(ConfigError):
                setattr(scaler, f"_{setting}", value)
            assert getattr(scaler, f"get_{setting}")() == getattr(cpu_scaler(), f"get_{setting}")()


# Arguments beside ``device="cpu"``, or other devices.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({"loss_scale": StaticLossScale(), **setting}, ConfigError, "arguments of that loss scale")
        for setting in ({"growth_factor": 3.0}, {"growth_interval": 5}, {"min_scale": 1.0})
    ),
    (
        {"init_scale": 0.5, "loss_scale": DynamicLossScale(min_scale=1.0)},
        ConfigError,
        "init_scale must be between .*min_scale=1.0",
    ),
    ({"loss_scale": "static"}, TypeError, "loss_scale must be a LossScale, such as"),
    ({"loss_scale": StaticLossScale}, TypeError, "loss_scale must be a LossScale, such as"),
    ({"named_parameters": nn.Linear(1, 1)}, TypeError, "pairs of name and parameter"),
    ({"named_parameters": nn.Linear(1, 1).parameters()}, TypeError, "pairs of name and parameter"),
    ({"process_group": "gloo"}, TypeError, "must be a ProcessGroup, a DeviceMesh or None"),
    ({"process_group": [0, 1]}, TypeError, "must be a ProcessGroup, a DeviceMesh or None"),
    ({"device": 65536.0}, TypeError, "init_scale=65536.0"),
    ({"device": "cdua"}, ValueError, "'cdua' is not a device"),
    ({"device": ["cpu"]}, TypeError, "device must be a device type"),
    ({"device": "mps"}, ConfigError, "MPS has no float64"),
]


@pytest.mark.parametrize(("given", "error", "words"), REFUSED)
def test_what_a_scaler_cannot_be_made_of_is_refused_in_a_sentence(given, error, words):
    with pytest.raises(error, match=words):
        DistGradScaler(**{"device": "cpu", **given})


def test_a_device_is_a_type_or_a_torch_device():
    for device in ("cpu", "cpu:0", torch.device("cpu")):
        assert DistGradScaler(device).scale(torch.tensor(1.0)).item() == 65536.0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_none_is_cpu_and_cuda_warns_and_disables_as_torchs_does():
    assert DistGradScaler().is_enabled()
    for kind in (torch.amp.GradScaler, DistGradScaler):
        with pytest.warns(UserWarning, match=r"GradScaler is enabled, but .* not available") as w:
            assert not kind("cuda").is_enabled()
        assert w[0].filename == __file__, "the warning points at the caller"
    assert not DistGradScaler("cuda", enabled=False).is_enabled(), "without a warning"


def test_a_guard_is_refused_on_mps_too():
    with pytest.raises(ConfigError, match=r"MPS has no float64"):
        StepGuard()._lazy_init_scale_growth_tracker(torch.device("mps"))


# -- update(new_scale) -----------------------------------------------------------------------------


def test_update_takes_one_number_in_any_form_and_copies_it():
    forms = [torch.tensor(4.0, dtype=torch.float64), torch.tensor(4), torch.tensor([[4.0]])]
    for new_scale in (4.0, 4, torch.tensor(4.0), *forms):
        scaler = cpu_scaler()
        scaler.scale(one())
        scaler.update(new_scale)
        if isinstance(new_scale, Tensor):
            new_scale.fill_(7)
        assert scaler.get_scale() == 4.0, new_scale


def test_update_refuses_what_is_no_scale_and_changes_nothing():
    bad = [0.0, -1.0, 2.0**-25, 2.0**128, "2", True, [2.0], NAN, INF, torch.tensor(0.0)]
    tensors = [torch.tensor([4.0, 4.0]), torch.tensor([]), torch.tensor(4.0, requires_grad=True)]
    scaler = cpu_scaler()
    with pytest.raises(AssertionError, match=r"Attempted update but _scale is None"):
        scaler.update(4.0)
    scaler.scale(torch.tensor(1.0))
    for new_scale in (*bad, *tensors):
        with pytest.raises(ConfigError, match=r"new_scale|float or a 1-element"):
            scaler.update(new_scale)
    assert scaler.get_scale() == 1024.0


# -- what may be scaled ----------------------------------------------------------------------------

Pair = namedtuple("Pair", ["loss", "extra"])


def one(value: float = 1.0, **settings: Any) -> Tensor:
    return torch.tensor(value, **settings)


@pytest.mark.parametrize(
    "given",
    [
        Pair(one(), [one()]),
        {"b": one(), "a": (one(),)},
        OrderedDict({"b": one(), "a": [one()]}),
        defaultdict(list, {"b": one()}),
    ],
    ids=lambda given: type(given).__name__,
)
def test_mappings_and_namedtuples_keep_their_type_and_are_left_as_they_were(given):
    assert repr(cpu_scaler(2.0).scale(given)) == repr(given).replace("1.", "2.")
    assert all(leaf.item() == 1.0 for leaf in tree_leaves(given))


@pytest.mark.parametrize("shape", [(), (1,), (2, 2), (0,)], ids=str)
def test_float16_comes_back_as_float32_without_overflow(shape):
    outputs = torch.full(shape, 2.0, dtype=torch.float16)
    for scaled in (cpu_scaler(2.0**16).scale(outputs), *cpu_scaler(2.0**16).scale([outputs])):
        torch.testing.assert_close(scaled, torch.full(shape, 131072.0), rtol=0, atol=0)


@pytest.mark.parametrize("bad", [1.5, None, "loss", [1.5], [one(), None], {"a": 2}], ids=str)
def test_what_is_no_tensor_is_refused_with_torchs_words(bad):
    with pytest.raises(ValueError, match=r"outputs must be a Tensor or an iterable of Tensors"):
        cpu_scaler().scale(bad)
