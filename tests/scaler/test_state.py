"""Checkpoints, pickles and copies: torch's five keys in both directions, and one key of ours."""

import copy
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
from tests.quick_cases import quick_cases
from tests.scaler.steps import (
    INF,
    cpu_scaler,
    iteration,
    leaf,
    sgd,
    through_a_file,
    torch_scaler,
)

# Each file has a ``state_dict`` and the trace of ``train(scaler, GRADIENTS_AFTER)`` by the version
# that names its folder. Nothing writes these files again.
FILES = sorted((Path(__file__).parent / "states").glob("*/*.json"))
GRADIENTS_BEFORE = (0.25, 3.0, INF, 0.25, 0.25, 0.5, INF, 0.25)
GRADIENTS_AFTER = (0.25, 0.25, INF, INF, 0.25, 0.25, 0.25, 0.25)
TORCH_KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
LOSS_SCALES: dict[str, Any] = {
    "default": None,
    "dynamic": DynamicLossScale(3.0, 0.25, 3, 2.0, 2.0**20),
    "hysteresis": HysteresisLossScale(growth_interval=3, hysteresis=3),
    "consecutive": HysteresisLossScale(growth_interval=3, hysteresis=2, consecutive=True),
    "static": StaticLossScale(),
}
LOSS_SCALE = pytest.mark.parametrize("loss_scale", LOSS_SCALES)
# The state with a hysteresis has a value for each setting.
MOST_GENERAL_LOSS_SCALE = pytest.mark.parametrize(
    "loss_scale", quick_cases(LOSS_SCALES, quick=["hysteresis"])
)


def make_scaler(loss_scale: str, init_scale: float = 1024.0) -> Any:
    """Return our scaler with a loss scale of `LOSS_SCALES`, or the scaler of torch."""
    if loss_scale == "torch":
        return torch_scaler(init_scale, growth_interval=5)
    return cpu_scaler(init_scale, loss_scale=LOSS_SCALES[loss_scale])


def train(scaler: Any, gradients: Sequence[float]) -> list[list[float]]:
    """Step by each gradient, and return the parameter and the scale after each step."""
    parameter, optimizer = sgd()
    trace = []
    for gradient in gradients:
        iteration(scaler, optimizer, parameter, gradient)
        trace.append([parameter.item(), scaler.get_scale()])
    return trace


def torch_part(state: dict[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in TORCH_KEYS}


# -- state_dict ------------------------------------------------------------------------------------


@LOSS_SCALE
def test_a_state_has_torchs_keys_in_torchs_order_and_one_of_ours(loss_scale):
    state = make_scaler(loss_scale).state_dict()
    assert list(state) == [*TORCH_KEYS, "distamp"]


@LOSS_SCALE
def test_the_values_under_torchs_keys_have_torchs_types(loss_scale):
    scaler = make_scaler(loss_scale)
    train(scaler, GRADIENTS_BEFORE)
    state = scaler.state_dict()
    for key, torch_value in torch_scaler().state_dict().items():
        assert type(state[key]) is type(torch_value)


def test_the_state_of_an_unused_scaler_has_torchs_values():
    state = make_scaler("default").state_dict()
    assert torch_part(state) == torch_scaler().state_dict()


def through_dcp(scaler: Any, folder: Path) -> dict[str, Any]:
    """Return the state of a copy that has loaded the state of a scaler by torch's DCP."""
    loaded = copy.deepcopy(scaler)
    loaded.load_state_dict(torch_scaler(2.0, growth_interval=5).state_dict())
    dcp.save({"scaler": scaler}, checkpoint_id=folder, no_dist=True)
    dcp.load({"scaler": loaded}, checkpoint_id=folder, no_dist=True)
    return loaded.state_dict()


def assert_loads_into_any_scaler(state: dict[str, Any], original: dict[str, Any]) -> None:
    """Load a state into used scalers of every kind, and compare their state with the original."""
    for kind in ("torch", *LOSS_SCALES):
        scaler = make_scaler(kind, 2.0)
        train(scaler, (0.25, INF))
        scaler.load_state_dict(state)
        loaded_state = scaler.state_dict()
        assert torch_part(loaded_state) == torch_part(original), kind
        if kind != "torch" and "distamp" in original:
            assert loaded_state == original, kind


KINDS = ["torch", *LOSS_SCALES]
KIND = pytest.mark.parametrize("kind", quick_cases(KINDS, quick=["torch", "hysteresis"]))
USED = pytest.mark.parametrize("gradients", [(), GRADIENTS_BEFORE], ids=["unused", "used"])


@KIND
@USED
def test_a_state_loads_into_any_scaler(kind, gradients):
    scaler = make_scaler(kind)
    train(scaler, gradients)
    state = scaler.state_dict()
    assert_loads_into_any_scaler(state, state)


@KIND
@USED
def test_a_state_from_a_file_loads_into_any_scaler(kind, gradients):
    scaler = make_scaler(kind)
    train(scaler, gradients)
    state = scaler.state_dict()
    assert_loads_into_any_scaler(through_a_file(state), state)


@KIND
@USED
def test_a_state_from_json_loads_into_any_scaler(kind, gradients):
    scaler = make_scaler(kind)
    train(scaler, gradients)
    state = scaler.state_dict()
    text = json.dumps(state)
    assert_loads_into_any_scaler(json.loads(text), state)


@KIND
@USED
@pytest.mark.filterwarnings("ignore:.*torch.distributed is (disabled|unavailable)")
def test_a_state_from_dcp_loads_into_any_scaler(kind, gradients, tmp_path):
    scaler = make_scaler(kind)
    train(scaler, gradients)
    state = scaler.state_dict()
    assert_loads_into_any_scaler(through_dcp(scaler, tmp_path), state)


def used_scaler_and_continuation(loss_scale: str, used: int) -> tuple[Any, list[list[float]]]:
    """Return a scaler after some gradients, and the trace of an equal scaler that goes on."""
    scaler = make_scaler(loss_scale)
    train(scaler, GRADIENTS_BEFORE[:used])
    uninterrupted = make_scaler(loss_scale)
    train(uninterrupted, GRADIENTS_BEFORE[:used])
    return scaler, train(uninterrupted, (INF, *GRADIENTS_AFTER))


@MOST_GENERAL_LOSS_SCALE
def test_a_scaler_that_loads_a_state_goes_on_as_the_original(loss_scale):
    for used in range(len(GRADIENTS_BEFORE)):
        scaler, expected = used_scaler_and_continuation(loss_scale, used)
        text = json.dumps(scaler.state_dict())
        loaded = cpu_scaler(2.0)
        loaded.load_state_dict(json.loads(text))
        assert train(loaded, (INF, *GRADIENTS_AFTER)) == expected, used


@MOST_GENERAL_LOSS_SCALE
def test_a_pickled_scaler_goes_on_as_the_original(loss_scale):
    for used in range(len(GRADIENTS_BEFORE)):
        scaler, expected = used_scaler_and_continuation(loss_scale, used)
        unpickled = pickle.loads(pickle.dumps(scaler))
        assert train(unpickled, (INF, *GRADIENTS_AFTER)) == expected, used


@MOST_GENERAL_LOSS_SCALE
@pytest.mark.parametrize("copy_function", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copied_scaler_goes_on_beside_the_original(loss_scale, copy_function):
    for used in (0, 3, 7):
        scaler, expected = used_scaler_and_continuation(loss_scale, used)
        copied = copy_function(scaler)
        assert train(copied, (INF, *GRADIENTS_AFTER)) == expected, used
        assert train(scaler, (INF, *GRADIENTS_AFTER)) == expected, "the copy shares no state"


# -- states of earlier versions and of Apex --------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_state_of_an_earlier_version_loads_and_goes_on(file):
    content = json.loads(file.read_text())
    loss_scale = file.stem.split("-")[-1]
    scaler = cpu_scaler(2.0, loss_scale=LOSS_SCALES.get(loss_scale))
    scaler.load_state_dict(content["state"])
    assert scaler.get_scale() == content["state"]["scale"]
    assert train(scaler, GRADIENTS_AFTER) == content["trace"]


APEX_LOSS_SCALER = {"loss_scale": 4096.0, "unskipped": 3}


@pytest.mark.parametrize(
    "state",
    [{"loss_scaler0": APEX_LOSS_SCALER}, APEX_LOSS_SCALER],
    ids=["amp.state_dict", "one"],
)
def test_apexs_state_gives_scale_and_count(state):
    scaler = cpu_scaler(growth_interval=5, growth_factor=4.0)
    scaler.load_state_dict(state)
    values = torch_part(scaler.state_dict())
    assert list(values.values()) == [4096.0, 4.0, 0.5, 5, 3]
    # The count goes on from 3, so the second step reaches the interval of 5.
    (_, first_scale), (_, second_scale) = train(scaler, (0.0, 0.0))
    assert first_scale == 4096.0
    assert second_scale == 16384.0


def test_apexs_state_of_two_loss_scalers_is_refused_with_the_way_to_choose_one():
    state = {"loss_scaler0": APEX_LOSS_SCALER, "loss_scaler1": APEX_LOSS_SCALER}
    with pytest.raises(ConfigError, match=r"2 of Apex's loss scalers.*state\['loss_scaler0'\]"):
        cpu_scaler().load_state_dict(state)


@pytest.mark.parametrize(
    ("saved_scale", "bound"),
    [(2.0**-30, 2.0**-24), (2.0**127 * 1.9, 2.0**127)],
    ids=["too small", "too large"],
)
def test_a_scale_outside_the_bounds_is_moved_onto_them_with_a_warning(saved_scale, bound):
    scaler = cpu_scaler()
    state = {**scaler.state_dict(), "scale": saved_scale}
    with pytest.warns(UserWarning, match=r"loaded loss scale .* is outside .* becomes") as caught:
        scaler.load_state_dict(state)
    assert scaler.get_scale() == bound
    assert caught[0].filename == __file__


# -- pickles and copies ----------------------------------------------------------------------------


class Subclass(DistGradScaler):
    """A subclass with private attributes, as NeMo has one."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=4.0, fp16_grads="inplace", max_consecutive_skips=1)
        self._ranks = ["a"]
        self._states = ["b"]
        self._settings = ["c"]


def unchanged(scaler: Subclass) -> Subclass:
    return scaler


def unpickled(scaler: Subclass) -> Subclass:
    return pickle.loads(pickle.dumps(scaler))


COPY = pytest.mark.parametrize(
    "copy_function",
    [unchanged, unpickled, copy.deepcopy, copy.copy],
    ids=["original", "pickle", "deepcopy", "copy"],
)


@COPY
def test_a_copy_has_the_attributes_of_a_subclass(copy_function):
    scaler = copy_function(Subclass())
    assert type(scaler) is Subclass
    assert scaler._ranks == ["a"]
    assert scaler._states == ["b"]
    assert scaler._settings == ["c"]


@COPY
def test_a_copy_keeps_the_settings(copy_function):
    """The settings allow gradients in float16 and no skipped step."""
    scaler = copy_function(Subclass())
    parameter = leaf(1.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    iteration(scaler, optimizer, parameter, 0.25)
    with pytest.raises(LossScaleCollapseError):
        iteration(scaler, optimizer, parameter, INF)
    assert parameter.item() == 0.75


@pytest.mark.parametrize("make", [cpu_scaler, torch_scaler])
def test_a_pickle_is_taken_only_between_iterations_as_torchs(make):
    scaler = make()
    parameter, optimizer = sgd()
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match=r"only be pickled at the beginning"):
        pickle.dumps(scaler)
    scaler.step(optimizer)
    scaler.update()
    pickle.loads(pickle.dumps(scaler))
