"""Checkpoints, pickles and copies: torch's five keys both ways, and one of ours."""

import copy
import itertools
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from distamp import DistGradScaler
from distamp.errors import ConfigError, LossScaleCollapseError
from distamp.scaler import DynamicLossScale, HysteresisLossScale, StaticLossScale
from tests.scaler.steps import (
    INF,
    cpu_scaler,
    iteration,
    leaf,
    sgd,
    through_a_file,
    torch_scaler,
)

# What ``state_dict`` and ``train(scaler, AFTER)`` gave in the version that names the folder; never
# written again.
FILES = sorted((Path(__file__).parent / "states").glob("*/*.json"))
BEFORE = (0.25, 3.0, INF, 0.25, 0.25, 0.5, INF, 0.25)
AFTER = (0.25, 0.25, INF, INF, 0.25, 0.25, 0.25, 0.25)
OURS = "distamp"
KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
LOSS_SCALES: dict[str, Any] = {
    "default": None,
    "dynamic": DynamicLossScale(3.0, 0.25, 3, 2.0, 2.0**20),
    "hysteresis": HysteresisLossScale(growth_interval=3, hysteresis=3),
    "consecutive": HysteresisLossScale(growth_interval=3, hysteresis=2, consecutive=True),
    "static": StaticLossScale(),
}


def train(scaler: Any, gradients: Sequence[float]) -> list[list[float]]:
    """Parameter and scale after a step with each of these gradients."""
    (parameter, optimizer), trace = sgd(), []
    for gradient in gradients:
        iteration(scaler, optimizer, parameter, gradient)
        trace.append([parameter.item(), scaler.get_scale()])
    return trace


def _scaler(name: str, init_scale: float = 1024.0) -> Any:
    if name == "torch":
        return torch_scaler(init_scale, growth_interval=5)
    return cpu_scaler(init_scale, loss_scale=LOSS_SCALES[name])


def _five(state: dict[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in KEYS}


def _saved(scaler: Any, folder: Path) -> list[Any]:
    """The state as it is, and as each way to write one gives it back."""
    state = scaler.state_dict()
    there = copy.deepcopy(scaler)
    there.load_state_dict(_scaler("torch", 2.0).state_dict())
    dcp.save({"scaler": scaler}, checkpoint_id=folder, no_dist=True)
    dcp.load({"scaler": there}, checkpoint_id=folder, no_dist=True)
    return [state, through_a_file(state), json.loads(json.dumps(state)), there.state_dict()]


@pytest.mark.filterwarnings("ignore:.*torch.distributed is (disabled|unavailable)")
@pytest.mark.parametrize("by", ["torch", *LOSS_SCALES])
def test_a_state_has_torchs_keys_and_one_of_ours_and_loads_into_any_scaler(by, tmp_path):
    for used in ((), BEFORE):
        source = _scaler(by)
        train(source, used)
        state = source.state_dict()
        five, theirs = _five(state), torch_scaler().state_dict()
        assert list(state) == KEYS + [OURS] * (by != "torch")
        assert {k: type(v) for k, v in five.items()} == {k: type(v) for k, v in theirs.items()}
        assert five == theirs or used or by != "default"
        written = _saved(source, tmp_path / str(len(used)))
        for into, loaded in itertools.product(["torch", *LOSS_SCALES], written):
            target = _scaler(into, 2.0)
            train(target, (0.25, INF))
            target.load_state_dict(loaded)
            assert _five(target.state_dict()) == five, into
            assert "torch" in (by, into) or target.state_dict() == state


@pytest.mark.parametrize("name", LOSS_SCALES)
def test_states_copies_and_pickles_go_on_as_if_nothing_had_happened(name):
    for after in range(len(BEFORE)):
        source = _scaler(name)
        train(source, BEFORE[:after])
        loaded = cpu_scaler(2.0)
        loaded.load_state_dict(json.loads(json.dumps(source.state_dict())))
        twins = [loaded, pickle.loads(pickle.dumps(source)), copy.deepcopy(source)]
        twins.append(copy.copy(source))
        traces = [train(twin, (INF, *AFTER)) for twin in twins]
        assert traces == [train(source, (INF, *AFTER))] * len(twins), after


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_a_state_of_an_earlier_version_loads_and_goes_on(file):
    written = json.loads(file.read_text())
    scaler = cpu_scaler(2.0, loss_scale=LOSS_SCALES.get(file.stem.split("-")[-1]))
    scaler.load_state_dict(written["state"])
    assert (scaler.get_scale(), train(scaler, AFTER)) == (
        written["state"]["scale"],
        written["trace"],
    )


# -- Apex, and what cannot be right ----------------------------------------------------------------

ONE = {"loss_scale": 4096.0, "unskipped": 3}


@pytest.mark.parametrize("state", [{"loss_scaler0": ONE}, ONE], ids=["amp.state_dict", "one"])
def test_apexs_state_gives_scale_and_count(state):
    scaler = cpu_scaler(growth_interval=5, growth_factor=4.0)
    scaler.load_state_dict(state)
    assert list(_five(scaler.state_dict()).values()) == [4096.0, 4.0, 0.5, 5, 3]
    assert [scale for _, scale in train(scaler, (0.0, 0.0))] == [4096.0, 16384.0]
    with pytest.raises(ConfigError, match=r"2 of Apex's loss scalers.*state\['loss_scaler0'\]"):
        scaler.load_state_dict({"loss_scaler0": ONE, "loss_scaler1": ONE})


@pytest.mark.parametrize(("saved", "kept"), [(2.0**-30, 2.0**-24), (2.0**127 * 1.9, 2.0**127)])
def test_a_scale_outside_the_bounds_is_moved_onto_them_with_a_warning(saved, kept):
    scaler = cpu_scaler()
    with pytest.warns(UserWarning, match=r"loaded loss scale .* is outside .* becomes") as seen:
        scaler.load_state_dict({**scaler.state_dict(), "scale": saved})
    assert (scaler.get_scale(), seen[0].filename) == (kept, __file__)


# -- pickles and copies ----------------------------------------------------------------------------


class Subclass(DistGradScaler):
    """As NeMo's, with private names of its own."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=4.0, fp16_grads="inplace", max_consecutive_skips=1)
        self._ranks = self._states = self._settings = ["a"]


def test_a_pickle_and_a_copy_keep_settings_and_what_a_subclass_added():
    original = Subclass()
    twins = [pickle.loads(pickle.dumps(original)), copy.deepcopy(original), copy.copy(original)]
    for twin in (original, *twins):
        parameter = leaf(1.0, dtype=torch.float16)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        iteration(twin, optimizer, parameter, 0.25)
        with pytest.raises(LossScaleCollapseError):
            iteration(twin, optimizer, parameter, INF)
        assert (type(twin), twin._ranks, parameter.item()) == (Subclass, ["a"], 0.75)


def test_a_pickle_is_taken_only_between_iterations_as_torchs():
    for scaler in (cpu_scaler(), torch_scaler()):
        parameter, optimizer = sgd()
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(AssertionError, match=r"only be pickled at the beginning"):
            pickle.dumps(scaler)
        scaler.step(optimizer)
        scaler.update()
        pickle.loads(pickle.dumps(scaler))
