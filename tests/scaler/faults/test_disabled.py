"""Switched off means inert: everything the documents' loop asks is what plain torch would do."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp import DistGradScaler
from tests.collectives import count_collectives
from tests.ranks import RankPool
from tests.scaler.faults.tools import error_of, value_of
from tests.scaler.steps import backward, cpu_scaler, leaf


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _batch() -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


def _without_cuda() -> DistGradScaler:
    """What a laptop gets from the loop that is written for a GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.warns(UserWarning, match="(?i)cuda"):
        return DistGradScaler("cuda")


SCALERS = {
    "enabled=False": lambda: DistGradScaler("cpu", enabled=False),
    "no such device": _without_cuda,
}


@pytest.mark.parametrize("made", SCALERS)
@pytest.mark.parametrize("given", ["optimizer", "parameters", "generator", "tensor"])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_a_disabled_scaler_clips_as_torch_does(
    made: str, given: str, max_norm: float, norm_type: float
) -> None:
    results = []
    for clips in (None, SCALERS[made]()):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(_batch()).square().sum().backward()
        parameters = list(model.parameters())
        what: Any = {
            "optimizer": optimizer,
            "parameters": parameters,
            "generator": (p for p in parameters),
            "tensor": parameters[0],
        }[given]
        if clips is None:
            what = parameters if given in ("optimizer", "generator") else what
            norm = torch.nn.utils.clip_grad_norm_(what, max_norm, norm_type)
        else:
            norm = clips.clip_grad_norm_(what, max_norm, norm_type)
        results.append([norm, *(p.grad for p in parameters)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def _documents_loop(scaler: Any, plain: bool) -> list[list[float]]:
    """The loops of README.md and docs/scaler.md, or what they are without a scaler."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(_batch()).square().sum()
        if plain:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        else:
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            if scaler.stepped(optimizer):
                schedule.step()
    return [value_of(p) for p in model.parameters()]


@pytest.mark.parametrize("made", SCALERS)
def test_the_documents_loop_is_plain_torch(made: str) -> None:
    assert _documents_loop(SCALERS[made](), plain=False) == _documents_loop(None, plain=True)


@pytest.mark.parametrize("made", SCALERS)
def test_every_question_has_an_answer_and_every_call_does_nothing(made: str) -> None:
    scaler = SCALERS[made]()
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    parameter.grad = torch.tensor([0.25])
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    assert scaler.step_all([optimizer]) == [None]
    assert scaler.step(optimizer, closure=lambda: torch.tensor(3.0)) == 3.0
    scaler.update()
    scaler.update(2.0)
    assert scaler.stepped(optimizer) is True
    assert scaler.found_inf(optimizer).item() == 0.0
    assert parameter.item() == 0.5
    for copied in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert not copied.is_enabled()
        assert copied.scale(parameter) is parameter


# -- ranks -----------------------------------------------------------------------------------------


def _everything(scaler: DistGradScaler) -> None:
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * 0.25).backward()
        scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.step_all([optimizer])
        scaler.update()
        scaler.stepped(optimizer)
    assert parameter.item() == 0.0


def _collectives_of_everything() -> int:
    with count_collectives() as counted:
        _everything(DistGradScaler("cpu", enabled=False))
    return counted.count


def test_a_disabled_scaler_sends_nothing(pair: RankPool) -> None:
    assert pair.run(_collectives_of_everything) == [0, 0]


def _clips_what_is_spread() -> list[float]:
    """What torch would do: the norm of what this rank holds."""
    parameter = leaf(1.0)
    parameter.grad = torch.tensor([3.0 + dist.get_rank()])
    scaler = DistGradScaler("cpu", enabled=False)
    return [scaler.clip_grad_norm_([parameter], 1.0).item(), parameter.grad.item()]


def test_a_disabled_scaler_clips_by_this_ranks_gradients_as_torch_does(pair: RankPool) -> None:
    results = pair.run(_clips_what_is_spread)
    assert [norm for norm, _ in results] == [3.0, 4.0]
    assert [left for _, left in results] == pytest.approx([1.0, 1.0], rel=1e-4)


def _one_is_disabled() -> Any:
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = cpu_scaler(enabled=dist.get_rank() == 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backward(scaler, parameter, 0.25)
        return error_of(scaler.step, optimizer), parameter.item()


def test_an_enabled_rank_among_disabled_ones_ends_at_the_timeout_and_says_why(
    new_ranks: Any,
) -> None:
    enabled, disabled = new_ranks(2, timeout=60.0, group_timeout=3.0).run(_one_is_disabled)
    assert enabled[0] is not None
    assert "enabled" in enabled[0][1], "a likely cause is named"
    assert enabled[1] == 1.0
    assert disabled == (None, 0.75)
