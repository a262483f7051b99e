"""States: torch's five keys, into any settings; what a schedule remembers beyond them by itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from distamp import DistGradScaler
from distamp.errors import SettingError
from distamp.scaler import DynamicSchedule, HysteresisSchedule, StaticSchedule
from tests.ranks import RankPool
from tests.scaler.states.samples import AFTER, BEFORE, SAMPLES, train

FILES = sorted((Path(__file__).parents[1] / "states").glob("*/*.json"))
TORCH_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
SCHEDULES: dict[str, Any] = {
    "default": {},
    "max_scale": {"max_scale": 2.0**24},
    "dynamic": {"schedule": DynamicSchedule(growth_interval=3, max_scale=2.0**24)},
    "hysteresis": {"schedule": HysteresisSchedule(growth_interval=3, hysteresis=3)},
    "static": {"schedule": StaticSchedule()},
}


def _scaler(name: str) -> DistGradScaler:
    return DistGradScaler("cpu", init_scale=1024.0, **SCHEDULES[name])


# -- files of every version ------------------------------------------------------------------------


def _read(file: Path) -> tuple[Any, dict[str, Any]]:
    by_file = {name.replace(", ", "-").replace(" ", "-"): make for name, make in SAMPLES.items()}
    return by_file[file.stem](), json.loads(file.read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_a_state_of_an_earlier_version_loads_and_goes_on(file: Path) -> None:
    scaler, written = _read(file)
    if not written["state"]:
        if scaler.is_enabled():
            raise AssertionError("only a disabled scaler's state is empty")
        scaler.load_state_dict(written["state"])
    else:
        if file.stem.startswith("torch"):
            settings = written["state"]["growth_interval"]
            scaler = DistGradScaler("cpu", growth_interval=settings)
        scaler.load_state_dict(written["state"])
        if written.get("schedule_state"):
            scaler.load_schedule_state_dict(written["schedule_state"])
        assert scaler.get_scale() == written["state"]["scale"]
    trace = train(scaler, AFTER)
    # What a schedule does is kept; a parameter's value is a sum of powers of two and exact.
    assert trace == written["trace"]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}-{f.stem}")
@pytest.mark.parametrize("name", SCHEDULES)
def test_such_a_state_loads_under_any_settings(file: Path, name: str) -> None:
    written = json.loads(file.read_text())
    scaler = _scaler(name)
    if not written["state"]:
        with pytest.raises(RuntimeError, match="disabled instance"):
            scaler.load_state_dict(written["state"])
        return
    scaler.load_state_dict(copy.deepcopy(written["state"]))
    assert scaler.get_scale() == written["state"]["scale"]
    train(scaler, AFTER)


# -- what is written now ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_state_has_exactly_torchs_keys(name: str, used: bool) -> None:
    scaler = _scaler(name)
    if used:
        train(scaler, BEFORE)
    state = scaler.state_dict()
    assert set(state) == TORCH_KEYS
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(state)
    assert theirs.state_dict() == state
    assert {key: type(value) for key, value in state.items()} == {
        key: type(value) for key, value in torch.amp.GradScaler("cpu").state_dict().items()
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_both_states_together_go_on_as_if_nothing_had_happened(name: str) -> None:
    first = _scaler(name)
    train(first, BEFORE)
    state = json.loads(json.dumps([first.state_dict(), first.schedule_state_dict()]))
    second = _scaler(name)
    second.load_state_dict(state[0])
    second.load_schedule_state_dict(state[1])
    assert train(second, AFTER) == train(first, AFTER)


@pytest.mark.parametrize("bad", [{"version": 99}, {"schedule": "none"}])
def test_a_bad_schedule_state_is_refused_and_changes_nothing(bad: dict[str, Any]) -> None:
    scaler = _scaler("hysteresis")
    train(scaler, BEFORE)
    before = scaler.schedule_state_dict()
    with pytest.raises((SettingError, RuntimeError)):
        scaler.load_schedule_state_dict(bad)
    assert scaler.schedule_state_dict() == before


def test_a_disabled_scaler_has_neither() -> None:
    scaler = DistGradScaler("cpu", enabled=False)
    assert scaler.state_dict() == {}
    assert scaler.schedule_state_dict() == {}
    scaler.load_schedule_state_dict({})


# -- torch.distributed.checkpoint ------------------------------------------------------------------


def _through_a_checkpoint(saved: dict[str, Any], into: str, folder: str) -> Any:
    scaler = _scaler(into)
    dcp.save({"scaler": saved}, checkpoint_id=folder)
    state = {"scaler": scaler.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    scaler.load_state_dict(state["scaler"])
    return scaler.get_scale(), scaler.state_dict()["_growth_tracker"]


@pytest.mark.parametrize("into", SCHEDULES)
@pytest.mark.parametrize("written_by", ["torch", *SCHEDULES])
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")
def test_checkpoints_load_under_any_settings(written_by: str, into: str, tmp_path: Path) -> None:
    if written_by == "torch":
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    else:
        scaler = _scaler(written_by)
    train(scaler, (0.25, 0.25, 0.25))
    state = scaler.state_dict()
    scale, tracker = _through_a_checkpoint(state, into, str(tmp_path))
    assert scale == state["scale"]
    if into != "static":
        assert tracker == state["_growth_tracker"]


def _on_ranks(folder: str) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(scaler, (0.25, float("inf")))
    scale, tracker = _through_a_checkpoint(scaler.state_dict(), "max_scale", folder)
    dist.barrier()
    return scale, tracker


def test_checkpoints_load_on_ranks(pair: RankPool, tmp_path: Path) -> None:
    assert pair.run(_on_ranks, str(tmp_path)) == [(512.0, 0)] * 2
