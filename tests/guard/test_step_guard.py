"""StepGuard: a scaler's methods and promises where nothing scales the loss."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from distamp import DistGradScaler, NonFiniteGradients, StepGuard
from distamp.errors import LossScaleCollapse, SettingError, StageError
from tests.ranks import logged, mesh
from tests.scaler.steps import INF, NAN, error_of, sgd


def guarded(fused: bool, calls: str) -> Any:
    """A sharded model in bf16; a gradient of rank 1 alone is NaN in the third of four steps."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).bfloat16()
    fully_shard(net, mesh=mesh((2,), ("shard",)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    guard, taken = StepGuard(), []
    for number in range(4):
        optimizer.zero_grad()
        guard.scale(net(torch.ones(2, 6, dtype=torch.bfloat16)).float().square().mean()).backward()
        if number == 2 and dist.get_rank() == 1:
            net[0].weight.grad.to_local().fill_(NAN)
        before = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        if calls == "unscale_":
            guard.unscale_(optimizer)
        elif calls == "clip":
            guard.clip_grad_norm_(optimizer, 1.0)
        guard.step_all([optimizer]) if calls == "step_all" else guard.step(optimizer)
        guard.update()
        taken.append(guard.stepped(optimizer))
        if not taken[-1]:
            after = (net.state_dict(), optimizer.state_dict())
            torch.testing.assert_close(after, before, rtol=0, atol=0)
    counts = guard.step_counts(optimizer)
    return taken, (counts.taken, counts.skipped)


@pytest.mark.parametrize("calls", ["step", "unscale_", "clip", "step_all"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_nan_on_one_rank_is_stepped_on_none_and_leaves_all_state_as_it_was(ranks2, fused, calls):
    assert ranks2.run(guarded, fused, calls) == [([True, True, False, True], (3, 1))] * 2


def test_it_is_no_scaler_and_answers_as_one():
    guard, (parameter, optimizer) = StepGuard(), sgd()
    assert not isinstance(guard, torch.amp.GradScaler)
    loss = parameter.sum()
    assert guard.scale(loss) is loss
    assert (guard.get_scale(), guard.is_enabled()) == (1.0, True)
    loss.backward()
    guard.unscale_(optimizer)
    assert parameter.grad.item() == 1.0
    with pytest.raises(StageError, match="already been called"):
        guard.unscale_(optimizer)
    guard.step(optimizer)
    with pytest.raises(StageError, match="already been called"):
        guard.step(optimizer)
    guard.update()
    with pytest.raises(StageError, match="No inf checks"):
        guard.update()
    names = [name for name in dir(torch.amp.GradScaler) if not name.startswith("_")]
    assert [name for name in names if not hasattr(guard, name)] == []


def test_states_of_guards_and_scalers_are_told_apart():
    guard, scaler = StepGuard(), DistGradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    state = guard.state_dict()
    assert [*state] == ["distamp_guard"]
    scaler.load_state_dict(state)
    assert scaler.get_scale() == 64.0
    guard.load_state_dict(scaler.state_dict())
    guard.load_state_dict(state)
    for bad in (3, {"distamp_guard": {"version": 2}}, {"distamp_guard": 1}):
        with pytest.raises(SettingError):
            guard.load_state_dict(bad)
    for again in (copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
        parameter, optimizer = sgd()
        parameter.grad = torch.ones_like(parameter)
        again.step(optimizer)
        assert parameter.item() == 0.0


def _limit() -> list[Any]:
    (parameter, optimizer), guard = sgd(), StepGuard(max_consecutive_skips=2)
    errors = []
    for _ in range(2):
        parameter.grad = torch.full_like(parameter, INF if dist.get_rank() else 1.0)
        errors.append(error_of(guard.step, optimizer))
        guard.update()
    return errors


def test_the_limit_of_skips_raises_its_own_error(ranks2):
    for first, (name, text) in ranks2.run(_limit):
        assert (first, name) == (None, "NonFiniteGradients")
        assert "2 steps in a row were skipped. Which gradients" in text
    assert issubclass(LossScaleCollapse, NonFiniteGradients)
    for bad in (0, True, 1.5):
        with pytest.raises(SettingError, match="max_consecutive_skips must be an integer"):
            StepGuard(max_consecutive_skips=bad)


def _limit_with_a_new_rank() -> list[Any]:
    (parameter, optimizer), guard = sgd(), StepGuard(max_consecutive_skips=3)
    errors = []
    for number in range(5):
        if number == 2:
            guard = StepGuard(max_consecutive_skips=3) if dist.get_rank() else guard
            guard.process_group = dist.new_group()
        parameter.grad = torch.full_like(parameter, INF)
        errors.append(error_of(guard.step, optimizer))
        guard.update()
    return [error and error[0] for error in errors]


def test_with_a_rank_that_was_replaced_all_count_skips_in_a_row_anew(ranks2):
    expected = [None, None, None, None, "NonFiniteGradients"]
    assert ranks2.run(_limit_with_a_new_rank, timeout=20) == [expected] * 2


def _logged() -> list[str]:
    groups = mesh((2, 2), ("other", "one"))
    (parameter, optimizer), guard = sgd(), StepGuard(groups["one"])
    parameter.grad = torch.full_like(parameter, NAN if dist.get_rank() == 3 else 1.0)
    with logged("distamp.guard") as lines:
        guard.step(optimizer)
    return lines


def test_a_skip_is_logged_by_the_first_rank_of_its_group(ranks4):
    first, second, (line,), fourth = ranks4.run(_logged)
    assert first == second == fourth == []
    assert "step 1 of SGD over 1 parameters" in line
    assert "on rank 3" in line
    assert "loss scale" not in line
