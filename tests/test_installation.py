"""install: which names change, when, and what a script written for torch then gets."""

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
# Its arguments have an order of their own.
SHARDED = (8.0, 0.25, 8.0, 3)


def classes() -> list[type]:
    return [getattr(importlib.import_module(module), name) for module, name in PLACES]


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    before = classes()
    yield
    assert classes() == before


@contextlib.contextmanager
def installed(**settings: object) -> Iterator[distamp.installation.Installation]:
    """``with distamp.patch_torch()``, whatever trainers this process has imported before."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was called after.*")
        installation = distamp.patch_torch(**settings)
    with installation:
        yield installation


def train(scaler: torch.amp.GradScaler, *gradients: float) -> float:
    """A weight of 1 after a step of 0.25 for each gradient."""
    weight, optimizer = sgd(1.0, lr=0.25)
    for gradient in gradients:
        iteration(scaler, optimizer, weight, gradient, unscale=True)
    return weight.item()


@pytest.mark.parametrize("settings", [{}, {"min_scale": 0.5}])
def test_every_name_is_ours_until_the_end_and_scalers_outlive_it(settings):
    theirs = sharded_grad_scaler.ShardedGradScaler("cpu", *SHARDED)
    with installed(**settings):
        assert all(issubclass(cls, DistGradScaler) for cls in classes())
        assert torch.amp.GradScaler is torch.GradScaler is torch.amp.grad_scaler.GradScaler
        assert settings or torch.amp.GradScaler is DistGradScaler
        made = [
            torch.amp.GradScaler("cpu", init_scale=8.0),
            torch.cpu.amp.GradScaler(8.0),
            sharded_grad_scaler.ShardedGradScaler("cpu", *SHARDED),
        ]
        copies = [pickle.loads(pickle.dumps(scaler)) for scaler in made]
        assert theirs.state_dict().items() <= made[-1].state_dict().items()
        with distamp.patch_torch() as inner:
            assert not inner.first
        assert issubclass(torch.amp.GradScaler, DistGradScaler)
    for scaler, other in zip(made * 2, copies + copy.deepcopy(made), strict=True):
        assert (type(other), other.get_scale()) == (type(scaler), 8.0)
    with pytest.raises(KeyError), installed():
        raise KeyError
    distamp.unpatch_torch()
    assert not any(issubclass(cls, DistGradScaler) for cls in classes())


def test_it_says_which_modules_had_the_class_or_one_of_its_own_before(monkeypatch):
    early = types.ModuleType("early_trainer")
    monkeypatch.setitem(sys.modules, "early_trainer", early)
    early.Taken = torch.cuda.amp.GradScaler
    early.Derived = type("Derived", (torch.amp.GradScaler,), {})
    early.Other, early.ours = torch.optim.Adam, DistGradScaler
    with pytest.warns(RuntimeWarning, match=r"early_trainer\.Derived"):
        done = distamp.patch_torch()
    with done:
        named = [name for name in done.late if name.startswith("early_trainer.")]
    assert named == ["early_trainer.Derived", "early_trainer.Taken"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.amp.GradScaler("cpu", init_scale=1.0),
        lambda: torch.cpu.amp.GradScaler(1.0),
        lambda: sharded_grad_scaler.ShardedGradScaler("cpu", 1.0),
        lambda: type("Mine", (torch.amp.GradScaler,), {})("cpu", init_scale=1.0),
    ],
)
def test_a_scaler_that_a_trainer_makes_takes_the_settings(make):
    with installed(min_scale=0.5, max_consecutive_skips=2, growth_interval=7):
        scaler = make()
        own = torch.amp.GradScaler("cpu", growth_interval=3)
    assert (scaler.get_growth_interval(), own.get_growth_interval()) == (7, 3)
    for other in (copy.deepcopy(scaler), scaler):
        with pytest.raises(LossScaleCollapseError):
            train(other, *[torch.inf] * 3)
        assert other.get_scale() == 0.5


@pytest.mark.parametrize("guard", [True, False])
def test_a_scaler_that_is_made_disabled_guards_where_that_was_asked_for(guard):
    """As karpathy's nanoGPT and many others make it in bf16."""
    with installed(guard=guard):
        left = train(torch.amp.GradScaler("cpu", enabled=False), 1.0, torch.nan)
    assert math.isnan(left) is not guard, "without a guard as with torch's"


def test_a_setting_that_cannot_be_is_refused_at_once():
    with pytest.raises(ConfigError, match="min_scale"):
        distamp.patch_torch(min_scale=-1.0)
    with pytest.raises(TypeError, match="no_such"):
        distamp.patch_torch(no_such=1)
    with installed(), pytest.raises(CallOrderError, match="unpatch_torch"):
        distamp.patch_torch(min_scale=0.5)


@on_ranks(2)
def test_where_only_some_ranks_train_a_group_says_which():
    """Without a group the scaler of rank 0 would wait for the other."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    if dist.get_rank() == 0:
        with installed(process_group=groups[0]):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        assert train(scaler, 1.0) == 0.75
