"""What an Amp saves, and what it loads: its own, another level's, torch's and Apex's."""

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


def made(level: str | PrecisionLevel, seed: int = 0, **overrides: Any) -> Amp:
    model = net(seed)
    return initialize(model, adam(model), level, **overrides)


@pytest.mark.parametrize("level", ["fp32", "fp16", "fp16-O2", "fp16-O3", "bf16", "bf16-O2", SPLIT])
def test_a_resumed_run_goes_on_to_the_bit(level):
    amp = made(level)
    train(amp, BATCHES[:3])
    parts = (amp.model, amp.optimizers[0], amp)
    states = through_a_file([part.state_dict() for part in parts])
    resumed = made(level, seed=1)
    for part, state in zip((resumed.model, resumed.optimizers[0], resumed), states, strict=True):
        part.load_state_dict(state)
    assert train(resumed, BATCHES[3:6]) == train(amp, BATCHES[3:6])
    assert all(map(torch.equal, values(amp.model), values(resumed.model)))


def test_credit_for_overflows_goes_on_from_a_state():
    schedule = HysteresisLossScale(hysteresis=3, min_scale=2.0)
    amp, resumed = made("fp16", loss_scale=schedule), made("fp16", loss_scale=schedule)
    backward(amp, BATCHES[0], torch.inf)
    assert not amp.step()
    resumed.load_state_dict(amp.state_dict())
    saved = amp.scaler.state_dict()
    assert resumed.scaler.state_dict() == saved
    assert saved["distamp"]["hysteresis_tracker"] == 2


def old_format(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as it was before levels and the scaler's key had their present names."""
    old_names = {name: apex for apex, name in APEX_NAMES.items()}
    level = state["opt_level"]
    old = copy.deepcopy(state)
    old["opt_level"] = old_names.get(level, level)
    for scaler_state in old["loss_scalers"]:
        scaler_state["distamp_guard"] = scaler_state.pop("distamp")
    return old


@pytest.mark.parametrize("level", ["fp32", "fp16", "fp16-O2", "fp16-O3", "bf16", "bf16-O2"])
def test_a_state_with_the_old_names_goes_on_to_the_bit(level):
    amp = made(level)
    train(amp, BATCHES[:3])
    parts = (amp.model, amp.optimizers[0], amp)
    states = through_a_file([part.state_dict() for part in parts])
    resumed = made(level, seed=1)
    resumed.model.load_state_dict(states[0])
    resumed.optimizers[0].load_state_dict(states[1])
    resumed.load_state_dict(old_format(states[2]))
    assert train(resumed, BATCHES[3:6]) == train(amp, BATCHES[3:6])
    assert all(map(torch.equal, values(amp.model), values(resumed.model)))


APEX = {"loss_scale": 4096.0, "unskipped": 7}
TORCHS = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=77).state_dict()


@pytest.mark.parametrize(
    ("state", "scale", "tracker", "interval"),
    [
        ({"loss_scaler0": APEX}, 4096.0, 7, 2000),
        # Of several losses the smallest.
        ({"loss_scaler0": APEX, "loss_scaler1": APEX | {"loss_scale": 512.0}}, 512.0, 7, 2000),
        (TORCHS, 512.0, 0, 77),
    ],
    ids=["Apex's", "Apex's of two losses", "torch's"],
)
def test_the_state_of_another_library_is_read(state, scale, tracker, interval):
    amp = made("fp16-O2")
    amp.load_state_dict(state)
    found = amp.scaler.state_dict()
    keys = ("scale", "_growth_tracker", "growth_interval")
    assert [found[key] for key in keys] == [scale, tracker, interval]


def test_a_run_can_go_on_at_another_level():
    first, second = made("fp32"), made("fp16-O2", seed=1)
    train(first, BATCHES[:3])
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    train(second, BATCHES[:1])
    (masters,) = second.masters
    trained = [p.detach() for n, p in first.model.named_parameters() if "norm" not in n]
    for (parameter, master), wanted in zip(masters.pairs(), trained, strict=True):
        assert torch.equal(parameter, master.half())
        torch.testing.assert_close(master.detach(), wanted, rtol=0, atol=0.02)


STATIC = {"loss_scale": 128.0}


@pytest.mark.parametrize(
    ("before", "after", "scale", "kind"),
    [
        (("fp16-O3", {}), ("fp16-O2", {}), 65536.0, "dynamic"),
        (("fp16", {}), ("fp16-O3", {}), 1.0, "static"),
        (("fp16", {}), ("fp16-O2", {}), 4.0, "dynamic"),
        (("fp16-O2", {}), ("fp16-O2", STATIC), 128.0, "static"),
        (("fp16-O2", STATIC), ("fp16-O2", {}), 65536.0, "dynamic"),
        (("fp16-O2", STATIC), ("fp16-O2", {"loss_scale": 64.0}), 64.0, "static"),
        (
            ("fp16", {}),
            ("fp16-O2", {"loss_scale": HysteresisLossScale(hysteresis=3)}),
            4.0,
            "hysteresis",
        ),
    ],
)
def test_a_scale_is_loaded_where_both_are_dynamic(before, after, scale, kind):
    first, second = made(before[0], **before[1]), made(after[0], **after[1])
    state = first.scaler.state_dict()
    if state["distamp"]["kind"] == "dynamic":
        first.scaler.load_state_dict({**state, "scale": 4.0})
    second.load_state_dict(first.state_dict())
    loaded = second.scaler.state_dict()
    assert loaded["scale"] == scale
    assert loaded["distamp"]["kind"] == kind


def test_another_version_and_a_copy_are_refused():
    amp = made("fp16")
    with pytest.raises(ConfigError, match="version"):
        amp.load_state_dict({**amp.state_dict(), "version": 99})
    with pytest.raises(CallOrderError, match="copied"):
        copy.deepcopy(amp)


@pytest.mark.parametrize("level", ["fp32", "fp16", "fp16-O2", "fp16-O3", "bf16", "bf16-O2"])
@pytest.mark.parametrize(
    ("state", "given"),
    [({"model": 2}, "the keys 'model'"), ({}, "no keys")],
    ids=["model", "empty"],
)
def test_a_dict_that_is_no_state_is_refused_at_every_level(level, state, given):
    with pytest.raises(ConfigError, match=rf"a dict with {given}.*'loss_scalers'.*'scale'"):
        made(level).load_state_dict(state)


@pytest.mark.parametrize("level", ["fp32", "bf16", "bf16-O2"])
def test_states_of_a_guard_a_scaler_and_apex_load_without_a_loss_scale(level):
    amp = made(level)
    for state in (
        StepGuard().state_dict(),
        torch.amp.GradScaler("cpu").state_dict(),
        {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}},
    ):
        amp.load_state_dict(state)
    assert not isinstance(amp.scaler, DistGradScaler)


# -- one flat dict of weights and optimizer state --------------------------------------------------


def load(amp: Amp, path: Path) -> None:
    reader = dcp.FileSystemReader(path)
    state = amp.flat_state_dict(reader.read_metadata().state_dict_metadata)
    dcp.load(state, storage_reader=reader)
    amp.load_flat_state_dict(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *[
            ("fp32", "fp32"),
            ("fp32", "fp16-O2"),
            ("fp16-O2", "bf16"),
            ("fp16-O2", "fp16-O2"),
            ("fp8", "bf16"),
        ],
        *[("bf16", "fp8"), ("fp32", SPLIT), (SPLIT, SPLIT), (SPLIT, "bf16-O2")],
    ],
)
def test_any_level_has_what_another_stepped(tmp_path, before, after):
    if "fp8" in (before, after):
        pytest.importorskip("torchao")
    saved, fresh = made(before), made(after, seed=1)
    train(saved, BATCHES[:3])
    dcp.save(saved.flat_state_dict(), checkpoint_id=tmp_path)
    load(fresh, tmp_path)
    expected, found = saved.flat_state_dict(), fresh.flat_state_dict()
    assert found.keys() == expected.keys()
    assert sum("exp_avg_sq" in name for name in found) == 7
    for name, tensor in expected.items():
        if not isinstance(tensor, Tensor):
            assert tensor == found[name], name
        elif tensor.dtype == found[name].dtype:  # a batch norm's may stay in fp32
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)
    for name, parameter in fresh.model.named_parameters():
        torch.testing.assert_close(
            parameter.float(), found[f"model.{name}"], rtol=2**-8, atol=1e-7, msg=name
        )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_load_that_lacks_optimizer_states_warns_and_leaves_the_optimizer_unchanged(
    tmp_path, caplog
):
    saved, fresh = made("fp16-O2"), made("fp16-O2", seed=1)
    saved.optimizers[0].param_groups[0]["lr"] = 0.5
    train(saved, BATCHES[:1])
    dcp.save(saved.flat_state_dict(), checkpoint_id=tmp_path)
    state = fresh.flat_state_dict()  # without saved=, so it has no place for moments
    dcp.load(state, checkpoint_id=tmp_path)
    fresh.load_flat_state_dict(state)
    assert "no optimizer state of 7 weights, first model.embedding.weight" in caplog.text
    assert fresh.optimizers[0].param_groups[0]["lr"] == 0.01
    caplog.clear()
    load(fresh, tmp_path)
    assert "no optimizer state" not in caplog.text
    assert fresh.optimizers[0].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("level", ["bf16", "fp16-O2", SPLIT])
def test_weights_of_another_dict_are_copied_and_those_that_it_lacks_told(level, caplog):
    """As of one that torch.load returned."""
    saved, fresh = made(level), made(level, seed=1)
    train(saved, BATCHES[:1])
    flat = saved.flat_state_dict()
    state = {name: each.clone() for name, each in flat.items() if isinstance(each, Tensor)}
    lost = state.pop("model.hidden.bias")
    fresh.load_flat_state_dict(state)
    assert "the state has no model.hidden.bias and 0 more" in caplog.text
    found = fresh.flat_state_dict()
    for name, each in state.items():
        if name.startswith("model."):
            assert each.equal(found[name]), name
    assert not lost.equal(found["model.hidden.bias"])
