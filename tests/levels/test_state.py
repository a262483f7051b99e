"""The state of an Amp: saved, and loaded from a run, another level, torch and Apex."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from distamp import DistGradScaler, PrecisionLevel, StepGuard, initialize
from distamp.errors import CallOrderError, ConfigError
from distamp.levels import Amp
from distamp.precision_level import APEX_NAMES
from distamp.scaler import HysteresisLossScale
from tests.levels.nets import adam, backward, batches, net, train, values
from tests.scaler.steps import through_a_file

BATCHES = [*batches(6)]
SPLIT = PrecisionLevel.from_name("bf16-O2", master_weights="split")


def amp_at(level: str | PrecisionLevel, seed: int = 0, **settings: Any) -> Amp:
    model = net(seed)
    return initialize(model, adam(model), level, **settings)


def save(amp: Amp) -> list[dict[str, Any]]:
    """Return the states of the model, the optimizer and the Amp, as they are read from a file."""
    parts = (amp.model, amp.optimizers[0], amp)
    return through_a_file([part.state_dict() for part in parts])


def load(amp: Amp, states: list[dict[str, Any]]) -> None:
    model_state, optimizer_state, amp_state = states
    amp.model.load_state_dict(model_state)
    amp.optimizers[0].load_state_dict(optimizer_state)
    amp.load_state_dict(amp_state)


def assert_trains_as(resumed: Amp, amp: Amp) -> None:
    """Check that both runs have the same losses and weights in three more steps."""
    assert train(resumed, BATCHES[3:6]) == train(amp, BATCHES[3:6])
    assert all(map(torch.equal, values(amp.model), values(resumed.model)))


SLOW_LEVELS = []
for level_name in ("fp32", "fp16-O2", "fp16-O3", "bf16"):
    SLOW_LEVELS.append(pytest.param(level_name, marks=pytest.mark.slow))


@pytest.mark.parametrize("level", ["fp16", "bf16-O2", SPLIT, *SLOW_LEVELS])
def test_a_resumed_run_is_bit_identical(level):
    amp = amp_at(level)
    train(amp, BATCHES[:3])
    resumed = amp_at(level, seed=1)
    load(resumed, save(amp))
    assert_trains_as(resumed, amp)


def test_credit_for_overflows_goes_on_from_a_state():
    loss_scale = HysteresisLossScale(hysteresis=3, min_scale=2.0)
    amp = amp_at("fp16", loss_scale=loss_scale)
    resumed = amp_at("fp16", loss_scale=loss_scale)
    backward(amp, BATCHES[0], torch.inf)
    assert not amp.step()
    resumed.load_state_dict(amp.state_dict())
    saved = amp.scaler.state_dict()
    assert resumed.scaler.state_dict() == saved
    assert saved["distamp"]["hysteresis_tracker"] == 2


# -- states of other libraries and versions --------------------------------------------------------


def old_format(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as it was before levels and the scaler's key had their present names."""
    old_names = {name: apex for apex, name in APEX_NAMES.items()}
    level = state["opt_level"]
    old = copy.deepcopy(state)
    old["opt_level"] = old_names.get(level, level)
    for scaler_state in old["loss_scalers"]:
        scaler_state["distamp_guard"] = scaler_state.pop("distamp")
    return old


@pytest.mark.parametrize("level", ["fp16", "bf16-O2", *SLOW_LEVELS])
def test_a_state_with_the_old_names_resumes_bit_identical(level):
    amp = amp_at(level)
    train(amp, BATCHES[:3])
    model_state, optimizer_state, amp_state = save(amp)
    resumed = amp_at(level, seed=1)
    load(resumed, [model_state, optimizer_state, old_format(amp_state)])
    assert_trains_as(resumed, amp)


APEX_SCALER = {"loss_scale": 4096.0, "unskipped": 7}
APEX_SCALER_WITH_SMALL_SCALE = {"loss_scale": 512.0, "unskipped": 7}
TORCH_SCALER = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=77)


@pytest.mark.parametrize(
    ("state", "scale", "tracker", "interval"),
    [
        pytest.param({"loss_scaler0": APEX_SCALER}, 4096.0, 7, 2000, id="Apex's"),
        pytest.param(
            {"loss_scaler0": APEX_SCALER, "loss_scaler1": APEX_SCALER_WITH_SMALL_SCALE},
            512.0,
            7,
            2000,
            id="Apex's of two losses",
        ),
        pytest.param(TORCH_SCALER.state_dict(), 512.0, 0, 77, id="torch's"),
    ],
)
def test_the_state_of_another_library_is_read(state, scale, tracker, interval):
    """The smallest scale of several losses is taken."""
    amp = amp_at("fp16-O2")
    amp.load_state_dict(state)
    loaded = amp.scaler.state_dict()
    assert loaded["scale"] == scale
    assert loaded["_growth_tracker"] == tracker
    assert loaded["growth_interval"] == interval


@pytest.mark.parametrize("level", ["fp32", "bf16", "bf16-O2"])
@pytest.mark.parametrize(
    "state",
    [
        pytest.param(StepGuard().state_dict(), id="a guard's"),
        pytest.param(TORCH_SCALER.state_dict(), id="torch's"),
        pytest.param({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}}, id="Apex's"),
    ],
)
def test_a_level_without_loss_scale_loads_the_state_of_a_scaler(level, state):
    amp = amp_at(level)
    amp.load_state_dict(state)
    assert not isinstance(amp.scaler, DistGradScaler)


# -- states of another level -----------------------------------------------------------------------


def test_a_run_can_go_on_at_another_level():
    full = amp_at("fp32")
    half = amp_at("fp16-O2", seed=1)
    train(full, BATCHES[:3])
    half.model.load_state_dict(full.model.state_dict())
    half.load_state_dict(full.state_dict())
    train(half, BATCHES[:1])
    (masters,) = half.masters
    weights = [param.detach() for n, param in full.model.named_parameters() if "norm" not in n]
    for (param, master), weight in zip(masters.pairs(), weights, strict=True):
        assert torch.equal(param, master.half())
        torch.testing.assert_close(master.detach(), weight, rtol=0, atol=0.02)


def state_with_scale_4(level: str) -> dict[str, Any]:
    """Return the state of a run after its dynamic scale has moved to 4."""
    amp = amp_at(level)
    scaler_state = amp.scaler.state_dict()
    amp.scaler.load_state_dict({**scaler_state, "scale": 4.0})
    return amp.state_dict()


def load_scale(amp: Amp, state: dict[str, Any]) -> tuple[str, float]:
    """Load a state, and return the kind of the loss scale and its value."""
    amp.load_state_dict(state)
    loaded = amp.scaler.state_dict()
    return loaded["distamp"]["kind"], loaded["scale"]


def test_a_dynamic_scale_is_loaded_at_another_level():
    amp = amp_at("fp16-O2")
    assert load_scale(amp, state_with_scale_4("fp16")) == ("dynamic", 4.0)


def test_a_dynamic_scale_is_loaded_by_one_with_hysteresis():
    amp = amp_at("fp16-O2", loss_scale=HysteresisLossScale(hysteresis=3))
    assert load_scale(amp, state_with_scale_4("fp16")) == ("hysteresis", 4.0)


def test_a_level_without_scale_stays_without_one():
    amp = amp_at("fp16-O3")
    assert load_scale(amp, state_with_scale_4("fp16")) == ("static", 1.0)


def test_a_dynamic_scale_begins_again_after_a_level_without_scale():
    amp = amp_at("fp16-O2")
    state = amp_at("fp16-O3").state_dict()
    assert load_scale(amp, state) == ("dynamic", 65536.0)


def test_a_constant_scale_stays_as_it_was_passed():
    amp = amp_at("fp16-O2", loss_scale=128.0)
    assert load_scale(amp, state_with_scale_4("fp16-O2")) == ("static", 128.0)


def test_a_constant_scale_is_not_loaded():
    state = amp_at("fp16-O2", loss_scale=128.0).state_dict()
    dynamic = amp_at("fp16-O2")
    assert load_scale(dynamic, state) == ("dynamic", 65536.0)
    constant = amp_at("fp16-O2", loss_scale=64.0)
    assert load_scale(constant, state) == ("static", 64.0)


# -- refusals --------------------------------------------------------------------------------------


def test_the_state_of_another_version_is_refused():
    amp = amp_at("fp16")
    with pytest.raises(ConfigError, match="version"):
        amp.load_state_dict({**amp.state_dict(), "version": 99})


def test_a_copy_is_refused():
    amp = amp_at("fp16")
    with pytest.raises(CallOrderError, match="copied"):
        copy.deepcopy(amp)


@pytest.mark.parametrize("level", ["fp32", "fp16", "fp16-O2", "fp16-O3", "bf16", "bf16-O2"])
def test_a_dict_that_is_no_state_is_refused_at_every_level(level):
    amp = amp_at(level)
    with pytest.raises(ConfigError, match=r"a dict with the keys 'model'.*'loss_scalers'.*'scale'"):
        amp.load_state_dict({"model": 2})
    with pytest.raises(ConfigError, match=r"a dict with no keys.*'loss_scalers'.*'scale'"):
        amp.load_state_dict({})


# -- one flat dict of weights and optimizer state --------------------------------------------------


def save_flat(amp: Amp, path: Path) -> None:
    dcp.save(amp.flat_state_dict(), checkpoint_id=path)


def load_flat(amp: Amp, path: Path) -> None:
    reader = dcp.FileSystemReader(path)
    saved = reader.read_metadata().state_dict_metadata
    state = amp.flat_state_dict(saved)
    dcp.load(state, storage_reader=reader)
    amp.load_flat_state_dict(state)


def assert_equal_values(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not isinstance(value, Tensor):
            assert found[name] == value, name
        elif value.dtype == found[name].dtype:  # a batch norm's may stay in fp32
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fp32", "fp32"),
        ("fp32", "fp16-O2"),
        ("fp16-O2", "bf16"),
        ("fp16-O2", "fp16-O2"),
        ("fp8", "bf16"),
        ("bf16", "fp8"),
        ("fp32", SPLIT),
        (SPLIT, SPLIT),
        (SPLIT, "bf16-O2"),
    ],
)
def test_a_level_loads_the_weights_and_moments_that_another_one_stepped(tmp_path, before, after):
    if "fp8" in (before, after):
        pytest.importorskip("torchao")
    amp = amp_at(before)
    train(amp, BATCHES[:3])
    save_flat(amp, tmp_path)
    loaded = amp_at(after, seed=1)
    load_flat(loaded, tmp_path)
    state = loaded.flat_state_dict()
    assert_equal_values(state, amp.flat_state_dict())
    assert sum("exp_avg_sq" in name for name in state) == 7
    for name, param in loaded.model.named_parameters():
        weight = state[f"model.{name}"]
        torch.testing.assert_close(param.float(), weight, rtol=2**-8, atol=1e-7, msg=name)


def learning_rate(amp: Amp) -> float:
    return amp.optimizers[0].param_groups[0]["lr"]


def save_with_rate_of_a_half(path: Path) -> None:
    amp = amp_at("fp16-O2")
    amp.optimizers[0].param_groups[0]["lr"] = 0.5
    train(amp, BATCHES[:1])
    save_flat(amp, path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_load_that_lacks_optimizer_states_warns_and_leaves_the_optimizer_unchanged(
    tmp_path, caplog
):
    save_with_rate_of_a_half(tmp_path)
    amp = amp_at("fp16-O2", seed=1)
    state = amp.flat_state_dict()  # without saved=, so it has no place for moments
    dcp.load(state, checkpoint_id=tmp_path)
    amp.load_flat_state_dict(state)
    assert "no optimizer state of 7 weights, first model.embedding.weight" in caplog.text
    assert learning_rate(amp) == 0.01


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_complete_load_sets_the_learning_rate_without_a_warning(tmp_path, caplog):
    save_with_rate_of_a_half(tmp_path)
    amp = amp_at("fp16-O2", seed=1)
    load_flat(amp, tmp_path)
    assert "no optimizer state" not in caplog.text
    assert learning_rate(amp) == 0.5


@pytest.mark.parametrize("level", ["bf16", "fp16-O2", SPLIT])
def test_weights_of_another_dict_are_copied_and_missing_ones_are_logged(level, caplog):
    """torch.load may have returned the dict."""
    saved = amp_at(level)
    train(saved, BATCHES[:1])
    state = {}
    for name, value in saved.flat_state_dict().items():
        if isinstance(value, Tensor):
            state[name] = value.clone()
    missing = state.pop("model.hidden.bias")
    amp = amp_at(level, seed=1)
    amp.load_flat_state_dict(state)
    assert "the state has no model.hidden.bias and 0 more" in caplog.text
    loaded = amp.flat_state_dict()
    for name, value in state.items():
        if name.startswith("model."):
            assert value.equal(loaded[name]), name
    assert not missing.equal(loaded["model.hidden.bias"])
