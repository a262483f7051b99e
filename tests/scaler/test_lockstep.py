"""Ranks that part raise, on every rank; ranks that only differ in what they hold do not."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import DistGradScaler
from distamp.errors import LockstepError, StageError
from tests.ranks import RankPool, mesh, subgroup

INF = float("inf")


def _fill(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def _ready(scaler: DistGradScaler) -> DistGradScaler:
    scaler.scale(torch.ones(()))
    return scaler


def _error_of(function: Callable[[], Any]) -> tuple[str, str] | None:
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _two(alike: bool) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4 if alike else 3)]
    return models, [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]


def _one_leaves_out_a_step() -> Any:
    models, optimizers = _two(alike=False)
    scaler = DistGradScaler("cpu")

    def iterate() -> None:
        for _ in range(2):
            _ready(scaler)
            for model in models:
                _fill(model, 1.0)
            scaler.step(optimizers[0])
            if dist.get_rank() == 0:
                scaler.step(optimizers[1])
            scaler.update()

    return _error_of(iterate)


def test_a_step_left_out_on_one_rank_is_named(ranks2: RankPool) -> None:
    for error in ranks2.run(_one_leaves_out_a_step):
        assert error is not None
        assert error[0] == "LockstepError"
        assert "iteration=" in error[1]


def _one_leaves_out(what: str) -> Any:
    models, optimizers = _two(alike=True)
    scaler = DistGradScaler("cpu", init_scale=16.0)

    def iterate() -> None:
        for iteration in range(3):
            leaves_out = iteration == 1 and dist.get_rank() == 0
            _ready(scaler)
            _fill(models[0], 1.0)
            scaler.unscale_(optimizers[0])
            if not (leaves_out and what == "step"):
                scaler.step(optimizers[0])
            scaler.update(None if leaves_out and what == "new scale" else 16.0)

    return _error_of(iterate)


@pytest.mark.parametrize("what", ["step", "new scale"])
def test_a_call_left_out_that_sends_no_message_is_named_at_the_next(
    ranks2: RankPool, what: str
) -> None:
    for error in ranks2.run(_one_leaves_out, what):
        assert error is not None
        assert error[0] == "LockstepError"
        assert "rank 0: steps=" in error[1]


def _loaded(scaler: DistGradScaler) -> DistGradScaler:
    scaler.load_state_dict(scaler.state_dict())
    return scaler


_COUNT_FROM_0: dict[str, Callable[[DistGradScaler], DistGradScaler]] = {
    "load_state_dict": _loaded,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
}


def _one_begins_to_count_again(how: str, ranks: tuple[int, ...]) -> Any:
    models, (optimizer, _) = _two(alike=True)
    scaler = DistGradScaler("cpu")

    def iterate() -> None:
        nonlocal scaler
        for iteration in range(4):
            if iteration == 2 and dist.get_rank() in ranks:
                scaler = _COUNT_FROM_0[how](scaler)
            _ready(scaler)
            _fill(models[0], 1.0)
            scaler.step(optimizer)
            scaler.update()

    return _error_of(iterate)


@pytest.mark.parametrize("how", _COUNT_FROM_0)
def test_a_scaler_that_counts_from_0_on_one_rank_is_named_with_its_cause(
    ranks2: RankPool, how: str
) -> None:
    for error in ranks2.run(_one_begins_to_count_again, how, (1,)):
        assert error is not None
        assert error[0] == "LockstepError"
        assert "rank 0: iteration=2" in error[1]
        assert "rank 1: iteration=0" in error[1]
        assert "left out an update()" in error[1]
        assert how in error[1]
    assert ranks2.run(_one_begins_to_count_again, how, (0, 1)) == [None, None]


def _one_clips() -> Any:
    models, optimizers = _two(alike=False)
    scaler = _ready(DistGradScaler("cpu"))
    _fill(models[0], 1.0)
    if dist.get_rank() == 0:
        return _error_of(lambda: scaler.clip_grad_norm_(optimizers[0], 1.0))
    return _error_of(lambda: scaler.step(optimizers[0]))


def test_different_calls_are_named(ranks2: RankPool) -> None:
    for error in ranks2.run(_one_clips):
        assert error is not None
        assert error[0] == "LockstepError"
        assert "rank 0: call='clip_grad_norm_'" in error[1]
        assert "rank 1: call='step'" in error[1]


def _settings_differ(what: str) -> Any:
    rank = dist.get_rank()
    models, optimizers = _two(alike=False)
    scaler = DistGradScaler("cpu")
    if what == "loaded scale" and rank == 1:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 1024.0})
    if what == "loaded tracker" and rank == 1:
        scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 7})
    if what == "growth_interval" and rank == 1:
        scaler.set_growth_interval(5)
    _ready(scaler)
    _fill(models[0], 1.0)
    return _error_of(lambda: scaler.step(optimizers[0]))


@pytest.mark.parametrize("what", ["loaded scale", "loaded tracker", "growth_interval"])
def test_ranks_with_other_settings_are_told_at_the_first_message(
    ranks2: RankPool, what: str
) -> None:
    for error in ranks2.run(_settings_differ, what):
        assert error is not None
        assert error[0] == "LockstepError"


def _pipeline(same_shapes: bool) -> Any:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Linear(4, 4 if same_shapes else 3 + rank)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    scaler = DistGradScaler("cpu")
    answers = []
    for iteration in range(4):
        if rank == dist.get_world_size() - 1:  # only the last stage holds the loss
            _ready(scaler)
        _fill(stage, INF if iteration == 1 and rank == 0 else 65536.0)
        scaler.step(optimizer)
        scaler.update()
        answers.append(scaler.stepped(optimizer))
    return answers, scaler.get_scale()


@pytest.mark.parametrize("same_shapes", [True, False])
def test_pipeline_stages_are_no_mismatch(ranks4: RankPool, same_shapes: bool) -> None:
    expected = [True, False, True, True]
    assert ranks4.run(_pipeline, same_shapes) == [(expected, 2.0**15)] * 4


def _nobody_scales() -> Any:
    models, optimizers = _two(alike=False)
    _fill(models[0], 1.0)
    return _error_of(lambda: DistGradScaler("cpu").step(optimizers[0]))


def test_a_forgotten_scale_is_an_error_on_every_rank(ranks2: RankPool) -> None:
    for error in ranks2.run(_nobody_scales):
        assert error is not None
        assert error[0] == "StageError"
        assert "scaler.scale(loss or outputs)" in error[1]


def _one_refuses() -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    if dist.get_rank() == 1:
        model = model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _fill(model, 1.0)
    return _error_of(lambda: _ready(DistGradScaler("cpu")).step(optimizer))


def test_an_error_on_one_rank_is_raised_on_all(ranks2: RankPool) -> None:
    here, there = ranks2.run(_one_refuses)
    assert there == ("ValueError", "Attempting to unscale FP16 gradients.")
    assert here[0] == "ValueError"
    assert "FP16" in here[1]
    assert "rank 1" in here[1]


def _in_group(kind: str) -> Any:
    """Overflow on rank 1 of 4; groups {0, 1} and {2, 3}, or everybody."""
    models, optimizers = _two(alike=False)
    group: Any = None
    if kind == "subgroup":
        pairs = [subgroup((0, 1)), subgroup((2, 3))]
        group = pairs[dist.get_rank() // 2]
    elif kind == "mesh":
        group = mesh((2, 2), ("dp", "tp"))
    elif kind == "mesh dimension":
        group = mesh((2, 2), ("dp", "tp"))["tp"]
    scaler = _ready(DistGradScaler("cpu", process_group=group))
    _fill(models[0], INF if dist.get_rank() == 1 else 1.0)
    scaler.step(optimizers[0])
    return scaler.stepped(optimizers[0])


@pytest.mark.parametrize(
    ("kind", "stepped"),
    [
        ("default", [False] * 4),
        ("mesh", [False] * 4),
        ("subgroup", [False, False, True, True]),
        ("mesh dimension", [False, False, True, True]),
    ],
)
def test_the_group_decides_who_agrees(ranks4: RankPool, kind: str, stepped: list[bool]) -> None:
    assert ranks4.run(_in_group, kind) == stepped


def _made_anew(rank: int, world: int, path: str) -> Any:
    def join(name: str) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{path}{name}", rank=rank, world_size=world
        )

    models, optimizers = _two(alike=False)
    other = nn.Linear(4, 4)
    later = torch.optim.SGD(other.parameters(), lr=0.1)
    scaler = DistGradScaler("cpu")
    answers: list[Any] = []
    for name, bad, model, optimizer in (
        ("a", None, models[0], optimizers[0]),
        ("b", 1, models[0], optimizers[0]),
        ("c", None, other, later),
    ):
        join(name)
        _ready(scaler)
        _fill(model, INF if bad == rank else 1.0)
        scaler.step(optimizer)
        scaler.update()
        answers.append(scaler.stepped(optimizer))
        if name == "b":  # one rank alone sees its second optimizer
            _ready(scaler)
            error = _error_of(lambda: scaler.step(optimizers[rank]))
            answers.append(None if error is None else error[0])
        dist.destroy_process_group()
    return answers


def _remake(path: str) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    return _made_anew(rank, world, path)


def test_a_default_group_made_anew_is_picked_up(
    new_ranks: Callable[..., RankPool], tmp_path: Any
) -> None:
    results = new_ranks(2).run(_remake, str(tmp_path / "store"))
    assert results == [[True, False, "LockstepError", True]] * 2


def _after_unpickling() -> Any:
    import pickle

    models, optimizers = _two(alike=False)
    group = subgroup((0, 1))
    scaler = DistGradScaler("cpu", process_group=group)
    loaded: DistGradScaler = pickle.loads(pickle.dumps(scaler))
    _fill(models[0], 1.0)
    refused = _error_of(lambda: _ready(loaded).step(optimizers[0]))
    loaded.process_group = group
    _ready(loaded).step(optimizers[0])
    return refused, loaded.stepped(optimizers[0])


def test_a_group_of_its_own_must_be_set_again_after_unpickling(ranks2: RankPool) -> None:
    for refused, stepped in ranks2.run(_after_unpickling):
        assert refused[0] == StageError.__name__
        assert "process_group" in refused[1]
        assert stepped


def _one_dies() -> Any:
    models, optimizers = _two(alike=False)
    scaler = _ready(DistGradScaler("cpu"))
    _fill(models[0], 1.0)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    scaler.step(optimizers[0])


def test_a_rank_that_dies_leaves_the_others_with_a_clear_error(
    new_ranks: Callable[..., RankPool],
) -> None:
    from tests.ranks import RankError

    with pytest.raises(RankError) as caught:
        new_ranks(2).run(_one_dies)
    assert LockstepError.__name__ in str(caught.value)
    assert "lost its peers" in str(caught.value)


def _retried_after_an_error(call: str) -> Any:
    """Rank 1 holds a float16 gradient; the user drops it and tries once more."""
    model, odd = nn.Linear(2, 2), nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD([*model.parameters(), *odd.parameters()], lr=1.0, foreach=False)
    scaler = _ready(DistGradScaler("cpu", init_scale=1024.0))
    _fill(model, 1024.0)
    if dist.get_rank() == 1:
        _fill(odd, 1.0)
    first = _error_of(lambda: getattr(scaler, call)(optimizer))
    odd.zero_grad()
    again = _error_of(lambda: getattr(scaler, call)(optimizer))
    scaler.update()
    _ready(scaler)
    _fill(model, scaler.get_scale())
    before = model.weight.detach().clone()
    scaler.step(optimizer)
    return first, again, (before - model.weight.detach()).tolist()


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_an_error_closes_the_iteration_on_every_rank(ranks2: RankPool, call: str) -> None:
    for first, again, moved in ranks2.run(_retried_after_an_error, call):
        assert first[0] == "ValueError"
        assert again[0] == "StageError"
        torch.testing.assert_close(moved, [[1.0, 1.0], [1.0, 1.0]])


def test_alone_an_error_leaves_the_other_optimizers_as_they_are() -> None:
    good, odd = nn.Linear(2, 2), nn.Linear(2, 2).half()
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (good, odd)]
    scaler = _ready(DistGradScaler("cpu", init_scale=1024.0))
    _fill(good, 1024.0)
    _fill(odd, 1.0)
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(*optimizers)
    before = good.weight.detach().clone()
    scaler.step(optimizers[0])
    torch.testing.assert_close(before - good.weight.detach(), torch.ones(2, 2))


def _many_optimizers(count: int) -> Any:
    models = [nn.Linear(1, 1) for _ in range(count)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    scaler = DistGradScaler("cpu")
    stepped = []
    for _ in range(3):
        _ready(scaler)
        for index, model in enumerate(models):
            bad = index == count - 1 and dist.get_rank() == 1
            _fill(model, INF if bad else 1.0)
        scaler.step_all(optimizers)
        scaler.update()
        stepped.append([scaler.stepped(o) for o in optimizers])
    return stepped


@pytest.mark.parametrize("count", [3, 14, 40])
def test_of_a_whole_set_each_is_stepped_by_its_own_flag(ranks4: RankPool, count: int) -> None:
    for stepped in ranks4.run(_many_optimizers, count):
        assert stepped == [[True] * (count - 1) + [False]] * 3


def _a_scaler_made_anew_on_one_rank() -> Any:
    """Ten messages in, rank 1 alone begins again with a new scaler."""
    models, optimizers = _two(alike=False)
    scaler = DistGradScaler("cpu")

    def iterate() -> None:
        _ready(scaler)
        _fill(models[0], 1.0)
        scaler.step(optimizers[0])
        scaler.update()

    for _ in range(10):
        iterate()
    if dist.get_rank() == 1:
        scaler = DistGradScaler("cpu")
    return _error_of(iterate)


def test_a_scaler_made_anew_on_one_rank_is_named(ranks2: RankPool) -> None:
    for error in ranks2.run(_a_scaler_made_anew_on_one_rank):
        assert error is not None
        assert error[0] == "LockstepError"
        assert "iteration=10" in error[1]
