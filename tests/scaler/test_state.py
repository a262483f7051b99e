"""Checkpoints and pickles: torch's keys, both ways, whoever wrote them."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from distamp import DistGradScaler
from distamp.errors import LossScaleCollapse, SettingError, StageError
from distamp.scaler import DynamicSchedule, HysteresisSchedule, StaticSchedule
from tests.scaler.steps import INF, NAN, cpu_scaler, iteration, leaf, sgd, torch_scaler

KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
HISTORY = [0.0, 0.0, INF, 0.0, 0.0, 0.0, 0.0]


def run(scaler: torch.amp.GradScaler, gradients: list[float] = HISTORY) -> list[float]:
    """Take these iterations; the scale after each."""
    parameter, optimizer = sgd(1.0)
    seen = []
    for gradient in gradients:
        iteration(scaler, optimizer, parameter, gradient)
        seen.append(scaler.get_scale())
    return seen


# -- keys ------------------------------------------------------------------------------------------


def test_a_fresh_scalers_state_is_torchs():
    ours, theirs = cpu_scaler().state_dict(), torch_scaler().state_dict()
    assert ours == theirs
    assert list(ours) == list(theirs) == KEYS
    assert [type(v) for v in ours.values()] == [type(v) for v in theirs.values()]


def test_a_used_scalers_state_is_torchs():
    settings = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 3}
    ours, theirs = cpu_scaler(**settings), torch_scaler(**settings)
    assert run(ours) == run(theirs)
    assert ours.state_dict() == theirs.state_dict()
    assert ours.state_dict()["_growth_tracker"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"min_scale": 1.0},
        {"max_scale": 2.0**20},
        {"schedule": HysteresisSchedule()},
        {"schedule": StaticSchedule()},
    ],
    ids=["min_scale", "max_scale", "hysteresis", "static"],
)
def test_what_torch_has_no_key_for_has_a_state_of_its_own(settings):
    scaler = cpu_scaler(**settings)
    state = scaler.state_dict()
    assert list(state) == KEYS
    assert scaler.schedule_state_dict()["version"] == 1
    torchs = torch_scaler()
    torchs.load_state_dict(state)
    assert torchs.state_dict() == state


# -- torch's classes -------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [False, True], ids=["into a fresh scaler", "into a used one"])
@pytest.mark.parametrize("ours_first", [False, True], ids=["from torch", "to torch"])
def test_states_pass_between_torchs_class_and_ours(used, ours_first):
    settings = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    make = (cpu_scaler, torch_scaler) if ours_first else (torch_scaler, cpu_scaler)
    source, target = make[0](512.0, **settings), make[1]()
    run(source, HISTORY[:5])
    if used:
        run(target)
    target.load_state_dict(source.state_dict())
    assert target.state_dict() == source.state_dict()
    assert run(target) == run(source)


def through_the_sharded_scaler() -> list[list[float]]:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    first = ShardedGradScaler("cpu", init_scale=512.0, growth_interval=3)
    run(first, HISTORY[:5])
    ours = cpu_scaler()
    ours.load_state_dict(first.state_dict())
    second = ShardedGradScaler("cpu")
    second.load_state_dict(ours.state_dict())
    return [run(scaler) for scaler in (first, ours, second)]


def test_states_pass_between_the_sharded_scaler_and_ours(ranks1):
    ((first, ours, second),) = ranks1.run(through_the_sharded_scaler)
    assert first == ours == second


def test_torchs_state_leaves_bounds_and_kind_of_the_schedule_as_they_are():
    scaler = cpu_scaler(schedule=HysteresisSchedule(hysteresis=3, min_scale=2.0, max_scale=2.0**20))
    scaler.load_state_dict(torch_scaler(64.0, growth_interval=7).state_dict())
    assert scaler.schedule_state_dict() == {
        "version": 1,
        "kind": "hysteresis",
        "min_scale": 2.0,
        "max_scale": 2.0**20,
        "hysteresis": 3,
        "consecutive": False,
        "hysteresis_tracker": 3,
    }
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (64.0, 7)


# -- ours ------------------------------------------------------------------------------------------

SCHEDULES = [
    DynamicSchedule(3.0, 0.25, 3, 2.0, 2.0**20),
    HysteresisSchedule(growth_interval=3, hysteresis=2),
    HysteresisSchedule(growth_interval=3, hysteresis=3, consecutive=True),
    StaticSchedule(),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
@pytest.mark.parametrize("after", range(len(HISTORY)))
def test_a_loaded_scaler_goes_on_as_the_saved_one(schedule, after):
    source, target = cpu_scaler(schedule=schedule), cpu_scaler(2.0)
    run(source, HISTORY[:after])
    target.load_schedule_state_dict(source.schedule_state_dict())
    target.load_state_dict(source.state_dict())
    rest = [INF, 0.0, INF, *HISTORY]
    assert run(target, rest) == run(source, rest)
    assert target.state_dict() == source.state_dict()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
def test_a_state_survives_torch_save_with_weights_only(schedule):
    source, target = cpu_scaler(schedule=schedule), cpu_scaler()
    run(source, HISTORY[:3])
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    assert target.state_dict() == source.state_dict()


def test_an_empty_state_is_refused_with_torchs_words():
    for scaler in (cpu_scaler(), torch_scaler()):
        with pytest.raises(RuntimeError, match=r"source state dict is empty, possibly because"):
            scaler.load_state_dict({})


# -- states that cannot be right -------------------------------------------------------------------


def changed(**values: Any) -> dict[str, Any]:
    return {**cpu_scaler(64.0).state_dict(), **values}


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (changed(scale=0.0), "loss scale 0.0, with which no step can be taken"),
        (changed(scale=INF), "loss scale inf"),
        (changed(scale=NAN), "loss scale nan"),
        (changed(scale=-2.0), "loss scale -2.0"),
        (changed(growth_factor=0.5), "growth factor must be > 1.0"),
        (changed(backoff_factor=2.0), "backoff factor must be < 1.0"),
        (changed(growth_interval=0), "growth_interval must be an integer >= 1"),
        (changed(_growth_tracker=-1), "_growth_tracker"),
        (changed(_growth_tracker="many"), "_growth_tracker"),
        (changed(scale="big"), "scale"),
        (changed(scale=None), "scale"),
        ({"scale": 4.0}, "has no 'growth_factor', only ['scale']"),
        ({"model": {}, "optimizer": {}}, "only ['model', 'optimizer']"),
    ],
    ids=str,
)
def test_a_state_that_cannot_be_right_is_refused_and_changes_nothing(state, says):
    scaler = cpu_scaler(512.0, growth_interval=3)
    run(scaler, HISTORY[:2])
    before = scaler.state_dict()
    with pytest.raises(SettingError) as caught:
        scaler.load_state_dict(state)
    assert says in str(caught.value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(("saved", "kept"), [(2.0**-30, 2.0**-24), (2.0**127 * 1.9, 2.0**127)])
def test_a_scale_outside_the_bounds_is_moved_onto_them_with_a_warning(saved, kept):
    scaler = cpu_scaler()
    with pytest.warns(UserWarning, match=r"loaded loss scale .* is outside .* becomes") as seen:
        scaler.load_state_dict(changed(scale=saved))
    assert scaler.get_scale() == kept
    assert seen[0].filename == __file__


# -- Apex ------------------------------------------------------------------------------------------

APEX = {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 3}}


@pytest.mark.parametrize("state", [APEX, APEX["loss_scaler0"]], ids=["amp.state_dict", "one"])
def test_apexs_state_gives_scale_and_count(state):
    scaler = cpu_scaler(growth_interval=5, growth_factor=4.0)
    scaler.load_state_dict(state)
    assert scaler.state_dict() == {
        "scale": 4096.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.5,
        "growth_interval": 5,
        "_growth_tracker": 3,
    }
    assert run(scaler, [0.0, 0.0]) == [4096.0, 16384.0]


def test_several_of_apexs_scalers_are_not_one():
    two = {"loss_scaler0": APEX["loss_scaler0"], "loss_scaler1": APEX["loss_scaler0"]}
    with pytest.raises(SettingError, match=r"2 of Apex's loss scalers.*state\['loss_scaler0'\]"):
        cpu_scaler().load_state_dict(two)


# -- torch.distributed.checkpoint ------------------------------------------------------------------


def test_the_scaler_is_stateful():
    assert isinstance(cpu_scaler(), Stateful)


def saved_by_dcp(folder: str) -> dict[str, Any]:
    """Two processes that agree: the state they wrote."""
    scaler = cpu_scaler(schedule=HysteresisSchedule(growth_interval=3))
    run(scaler, HISTORY[:4])
    dcp.save({"scaler": scaler}, checkpoint_id=folder)
    return scaler.state_dict()


def loaded_by_dcp(folder: str) -> tuple[dict[str, Any], list[float]]:
    scaler = cpu_scaler(2.0, schedule=HysteresisSchedule())
    dcp.load({"scaler": scaler}, checkpoint_id=folder)
    return scaler.state_dict(), run(scaler)


def test_a_distributed_checkpoint_passes_from_two_ranks_to_four(tmp_path, ranks2, ranks4):
    saved, _ = ranks2.run(saved_by_dcp, str(tmp_path))
    loaded = ranks4.run(loaded_by_dcp, str(tmp_path))
    assert [state for state, _ in loaded] == [saved] * 4
    alone = cpu_scaler(2.0, schedule=HysteresisSchedule())
    alone.load_state_dict(saved)
    assert [scales for _, scales in loaded] == [run(alone)] * 4


def dcp_in_one_process(source: Stateful, target: Stateful, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable)")
        dcp.save({"scaler": source}, checkpoint_id=folder, no_dist=True)
        dcp.load({"scaler": target}, checkpoint_id=folder, no_dist=True)


def test_a_distributed_checkpoint_of_ours_can_be_loaded_by_torch(tmp_path):
    source, target = cpu_scaler(512.0, growth_interval=3), torch_scaler()
    run(source, HISTORY[:4])
    dcp_in_one_process(source, target, tmp_path)
    assert target.state_dict() == source.state_dict()


def loads_what_its_rank_says() -> list[str]:
    scaler = cpu_scaler()
    parameter, optimizer = sgd(1.0)
    iteration(scaler, optimizer, parameter, 0.25)
    scaler.load_state_dict(changed(scale=64.0 if dist.get_rank() else 128.0))
    try:
        iteration(scaler, optimizer, parameter, 0.25)
    except RuntimeError as error:
        return [type(error).__name__, str(error), str(parameter.item())]
    return ["nothing"]


def test_ranks_that_load_different_states_are_told_at_the_first_message(ranks2):
    for name, message, value in ranks2.run(loads_what_its_rank_says):
        assert name == "LockstepError"
        assert "rank 0: scale=128.0" in message
        assert "rank 1: scale=64.0" in message
        assert value == "0.75"


# -- pickles ---------------------------------------------------------------------------------------


class Subclass(DistGradScaler):
    """As frameworks have it, with state of its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__("cpu", init_scale=1024.0, **settings)
        self.seen = ["a"]


def copies(scaler: Any) -> list[Any]:
    return [pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)]


@pytest.mark.parametrize("schedule", [None, *SCHEDULES], ids=lambda s: s and s.kind)
def test_a_pickled_scaler_goes_on_as_the_original(schedule):
    original = cpu_scaler(schedule=schedule)
    run(original, HISTORY[:3])
    for each in copies(original):
        assert each.state_dict() == original.state_dict()
    twin = copies(original)[0]
    assert run(twin, [INF, *HISTORY]) == run(original, [INF, *HISTORY])


def test_a_pickle_is_taken_only_between_iterations_as_torchs():
    for scaler in (cpu_scaler(), torch_scaler()):
        parameter, optimizer = sgd(1.0)
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(AssertionError, match=r"only be pickled at the beginning"):
            pickle.dumps(scaler)
        scaler.step(optimizer)
        scaler.update()
        pickle.loads(pickle.dumps(scaler))


def test_a_pickle_keeps_the_settings_that_no_checkpoint_has():
    for each in copies(cpu_scaler(fp16_grads="inplace", max_consecutive_skips=1)):
        parameter = leaf(1.0, dtype=torch.float16)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        iteration(each, optimizer, parameter, 0.25)
        assert parameter.item() == 0.75
        with pytest.raises(LossScaleCollapse):
            iteration(each, optimizer, parameter, INF)


def test_a_pickle_keeps_what_a_subclass_added_as_torchs_does():
    for each in copies(Subclass()):
        assert type(each) is Subclass
        assert each.seen == ["a"]


def pickled_with_a_group() -> list[Any]:
    group = dist.new_group([0, 1])
    scaler = cpu_scaler(process_group=group)
    parameter, optimizer = sgd(1.0)
    iteration(scaler, optimizer, parameter, 0.25)
    data = pickle.dumps(scaler)
    twin = pickle.loads(data)
    seen: list[Any] = []
    try:
        iteration(twin, optimizer, parameter, 0.25)
    except StageError as error:
        seen.append(str(error))
    twin.process_group = group
    iteration(twin, optimizer, parameter, INF if dist.get_rank() else 0.25)
    return [*seen, twin.get_scale(), parameter.item()]


def test_a_pickle_drops_the_group_and_says_so_until_it_is_set(ranks2):
    for message, scale, value in ranks2.run(pickled_with_a_group):
        assert "assign scaler.process_group" in message
        assert (scale, value) == (512.0, 0.75)


def pickled_with_the_default_group() -> float:
    twin = pickle.loads(pickle.dumps(cpu_scaler()))
    parameter, optimizer = sgd(1.0)
    iteration(twin, optimizer, parameter, INF if dist.get_rank() else 0.25)
    return parameter.item()


def test_a_pickle_of_a_scaler_for_the_default_group_finds_it_again(ranks2):
    assert ranks2.run(pickled_with_the_default_group) == [1.0, 1.0]


def test_every_pair_of_schedules_can_be_loaded_into_each_other():
    for first, second in itertools.product(SCHEDULES, repeat=2):
        source, target = cpu_scaler(schedule=first), cpu_scaler(schedule=second)
        run(source, [INF, 0.0])
        target.load_state_dict(source.state_dict())
        assert target.state_dict() == source.state_dict()
