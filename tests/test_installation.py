"""patch_torch: the names that change, the time of the change, and scripts written for torch."""

import contextlib
import copy
import importlib
import math
import pickle
import sys
import types
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import sharded_grad_scaler

import distamp
from distamp import DistGradScaler
from distamp.errors import CallOrderError, ConfigError, LossScaleCollapseError
from tests.on_ranks import on_ranks
from tests.scaler.steps import iteration, sgd

PLACES = [
    ("torch", "GradScaler"),
    ("torch.amp", "GradScaler"),
    ("torch.amp.grad_scaler", "GradScaler"),
    ("torch.cuda.amp", "GradScaler"),
    ("torch.cuda.amp.grad_scaler", "GradScaler"),
    ("torch.cpu.amp", "GradScaler"),
    ("torch.cpu.amp.grad_scaler", "GradScaler"),
    ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler"),
]
# The order of the arguments differs from that of torch.amp.GradScaler.
SHARDED = (8.0, 0.25, 8.0, 3)
# patch_torch searches all modules that are loaded, so a few cases stand for the others.
slow = pytest.mark.slow
MIN_SCALE = {"min_scale": 0.5}


def scaler_classes() -> list[type]:
    """Return the classes behind the names in ``PLACES``."""
    return [getattr(importlib.import_module(module), name) for module, name in PLACES]


@pytest.fixture(autouse=True)
def _torch_is_restored() -> Iterator[None]:
    original_classes = scaler_classes()
    yield
    assert scaler_classes() == original_classes


@contextlib.contextmanager
def installed(**settings: object) -> Iterator[distamp.installation.Installation]:
    """Enter ``distamp.patch_torch()`` without a warning about trainers imported before."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was called after.*")
        installation = distamp.patch_torch(**settings)
    with installation:
        yield installation


def train(scaler: torch.amp.GradScaler, *gradients: float) -> float:
    """Return a weight of 1 after a step of 0.25 for each gradient."""
    weight, optimizer = sgd(1.0, lr=0.25)
    for gradient in gradients:
        iteration(scaler, optimizer, weight, gradient, unscale=True)
    return weight.item()


@pytest.mark.parametrize("settings", [{}, MIN_SCALE])
def test_each_name_of_torch_is_a_dist_grad_scaler_while_torch_is_patched(settings):
    with installed(**settings):
        for cls in scaler_classes():
            assert issubclass(cls, DistGradScaler)
        assert torch.amp.GradScaler is torch.GradScaler
        assert torch.amp.GradScaler is torch.amp.grad_scaler.GradScaler
    for cls in scaler_classes():
        assert not issubclass(cls, DistGradScaler)


def test_without_settings_the_class_is_dist_grad_scaler_itself():
    with installed():
        assert torch.amp.GradScaler is DistGradScaler


def make_amp_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0)


def make_cpu_scaler() -> torch.amp.GradScaler:
    return torch.cpu.amp.GradScaler(8.0)


def make_sharded_scaler() -> torch.amp.GradScaler:
    return sharded_grad_scaler.ShardedGradScaler("cpu", *SHARDED)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        pytest.param(make_amp_scaler, {}, id="amp"),
        pytest.param(make_amp_scaler, MIN_SCALE, id="amp, settings", marks=slow),
        pytest.param(make_cpu_scaler, {}, id="cpu.amp", marks=slow),
        pytest.param(make_cpu_scaler, MIN_SCALE, id="cpu.amp, settings"),
        pytest.param(make_sharded_scaler, {}, id="sharded", marks=slow),
        pytest.param(make_sharded_scaler, MIN_SCALE, id="sharded, settings"),
    ],
)
def test_a_scaler_can_be_copied_and_pickled_after_torch_is_restored(make, settings):
    with installed(**settings):
        scaler = make()
        pickled = pickle.loads(pickle.dumps(scaler))
    for twin in (pickled, copy.deepcopy(scaler)):
        assert type(twin) is type(scaler)
        assert twin.get_scale() == 8.0


@pytest.mark.parametrize("settings", [pytest.param({}, marks=slow), MIN_SCALE])
def test_the_sharded_scaler_takes_its_arguments_in_torchs_order(settings):
    original = make_sharded_scaler()
    with installed(**settings):
        scaler = make_sharded_scaler()
    state = scaler.state_dict()
    for key, value in original.state_dict().items():
        assert state[key] == value, key


@pytest.mark.parametrize("settings", [pytest.param({}, marks=slow), MIN_SCALE])
def test_the_end_of_an_inner_patch_leaves_the_outer_patch(settings):
    with installed(**settings):
        with distamp.patch_torch() as inner:
            assert not inner.first
        assert issubclass(torch.amp.GradScaler, DistGradScaler)


def test_torch_is_restored_after_an_error():
    with pytest.raises(KeyError), installed():
        raise KeyError
    distamp.unpatch_torch()
    assert not issubclass(torch.amp.GradScaler, DistGradScaler)


def test_modules_that_imported_or_subclassed_the_class_before_are_named(monkeypatch):
    early = types.ModuleType("early_trainer")
    monkeypatch.setitem(sys.modules, "early_trainer", early)
    early.Taken = torch.cuda.amp.GradScaler
    early.Derived = type("Derived", (torch.amp.GradScaler,), {})
    early.Other, early.ours = torch.optim.Adam, DistGradScaler
    with pytest.warns(RuntimeWarning, match=r"early_trainer\.Derived"):
        installation = distamp.patch_torch()
    with installation:
        late_names = [name for name in installation.late if name.startswith("early_trainer.")]
    assert late_names == ["early_trainer.Derived", "early_trainer.Taken"]


def make_a_subclass() -> torch.amp.GradScaler:
    """Return a scaler of a class that derives from torch's name, as a trainer defines it."""

    class TrainersScaler(torch.amp.GradScaler):
        pass

    return TrainersScaler("cpu", init_scale=1.0)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.amp.GradScaler("cpu", init_scale=1.0), id="amp"),
        pytest.param(lambda: torch.cpu.amp.GradScaler(1.0), id="cpu.amp"),
        pytest.param(lambda: sharded_grad_scaler.ShardedGradScaler("cpu", 1.0), id="sharded"),
        pytest.param(make_a_subclass, id="subclass"),
    ],
)
def test_a_scaler_that_a_trainer_makes_takes_the_settings(make):
    with installed(min_scale=0.5, max_consecutive_skips=2, growth_interval=7):
        scaler = make()
    assert scaler.get_growth_interval() == 7
    for trained in (copy.deepcopy(scaler), scaler):
        with pytest.raises(LossScaleCollapseError):
            train(trained, torch.inf, torch.inf, torch.inf)
        assert trained.get_scale() == 0.5


def test_an_argument_of_the_trainer_overrides_a_setting():
    with installed(growth_interval=7):
        scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    assert scaler.get_growth_interval() == 3


def test_a_disabled_scaler_skips_a_nan_if_guard_is_set():
    """karpathy's nanoGPT and many other scripts make a disabled scaler for bf16."""
    with installed(guard=True):
        weight = train(torch.amp.GradScaler("cpu", enabled=False), 1.0, torch.nan)
    assert not math.isnan(weight)


def test_a_disabled_scaler_steps_with_a_nan_without_guard_as_torchs_does():
    with installed(guard=False):
        weight = train(torch.amp.GradScaler("cpu", enabled=False), 1.0, torch.nan)
    assert math.isnan(weight)


def test_an_impossible_setting_is_refused_at_once():
    with pytest.raises(ConfigError, match="min_scale"):
        distamp.patch_torch(min_scale=-1.0)


def test_an_unknown_setting_is_refused_at_once():
    with pytest.raises(TypeError, match="no_such"):
        distamp.patch_torch(no_such=1)


def test_other_settings_are_refused_while_torch_is_patched():
    with installed(), pytest.raises(CallOrderError, match="unpatch_torch"):
        distamp.patch_torch(min_scale=0.5)


@on_ranks(2)
def test_a_process_group_of_one_rank_lets_that_rank_train_alone():
    """With the default group, the scaler of rank 0 would wait for rank 1."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    if dist.get_rank() == 0:
        with installed(process_group=groups[0]):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        assert train(scaler, 1.0) == 0.75
