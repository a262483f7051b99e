"""step(max_norm=, skip_above=): norm, flag and clip are one message, and the step one decision."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, StepGuard
from distamp.errors import NonFiniteGradients, SettingError, StageError
from tests.ranks import mesh
from tests.scaler.steps import INF, NAN, error_of, leaf, sgd, torch_scaler

KINDS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}
MAKE = {
    "guard": StepGuard,
    "scaler": lambda: DistGradScaler("cpu", init_scale=1024.0),
    "disabled": lambda: DistGradScaler("cpu", enabled=False),
}


def _net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def _loss(net: nn.Module, number: int, dtype: torch.dtype) -> torch.Tensor:
    return net(torch.full((2, 4), 1.0 + number, dtype=dtype)).square().sum() * 10.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [1e-2, 1.0, 1e6, 0.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", MAKE)
def test_it_clips_and_steps_as_torch_does(by, kind, max_norm, dtype):
    ours, theirs = _net(dtype), _net(dtype)
    mine, reference = KINDS[kind](ours.parameters()), KINDS[kind](theirs.parameters())
    made, other = MAKE[by](), torch_scaler(1024.0, enabled=by == "scaler")
    for number in range(3):
        for optimizer in (mine, reference):
            optimizer.zero_grad()
        made.scale(_loss(ours, number, dtype)).backward()
        made.step(mine, max_norm=max_norm)
        made.update()
        other.scale(_loss(theirs, number, dtype)).backward()
        other.unscale_(reference)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        other.step(reference)
        other.update()
        if by != "disabled":
            torch.testing.assert_close(made.grad_norm(mine), norm.float())
            assert made.grad_norm() == made.grad_norm(mine)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        # The kernel leaves the clipped gradients, too.
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def _layout(layout: str, fused: bool, by: str) -> Any:
    """Train beside the whole model with torch's own clip; rank 1 has a NaN in the third step."""
    net: Any = _net()
    whole = copy.deepcopy(net)
    if layout == "DDP":
        net = DistributedDataParallel(net)
    elif layout == "FSDP2":
        fully_shard(net, mesh=mesh((2,), ("shard",)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    reference = torch.optim.AdamW(whole.parameters(), lr=0.1)
    made = MAKE[by]()
    norms = []
    for number in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        made.scale(_loss(net, number, torch.float32)).backward()
        if number == 2 and dist.get_rank() == 1:
            gradient = next(p.grad for p in net.parameters() if p.grad is not None)
            getattr(gradient, "_local_tensor", gradient).fill_(NAN)
        made.step(optimizer, max_norm=0.5)
        assert made.stepped(optimizer) is (number != 2)
        made.update()
        norms.append(made.grad_norm(optimizer).item())
        if number != 2:
            _loss(whole, number, torch.float32).backward()
            norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            assert norms[-1] == pytest.approx(norm.item(), rel=1e-5)
            reference.step()
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    for a, b in zip(parts, whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    counts = made.step_counts(optimizer)
    return math.isnan(norms[2]), counts.taken, counts.skipped


@pytest.mark.parametrize("by", ["guard", "scaler"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("layout", ["replicas", "DDP", "FSDP2"])
def test_the_norm_is_of_the_whole_model_and_one_nan_skips_all(ranks2, layout, fused, by):
    assert ranks2.run(_layout, layout, fused, by) == [(True, 3, 1)] * 2


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("by", MAKE)
@pytest.mark.parametrize("limit", [5.0, torch.tensor(5.0)], ids=["float", "tensor"])
def test_a_spike_is_skipped_and_counted_apart(limit, by, fused):
    (parameter, optimizer), made = sgd(fused=fused), MAKE[by]()
    scale = None
    for value in (1.0, 10.0, 10.0, 1.0):
        optimizer.zero_grad()
        made.scale((parameter * value).sum()).backward()
        before = parameter.item()
        made.step(optimizer, skip_above=limit)
        assert (parameter.item() == before) is (value > 5.0)
        if by != "disabled":
            assert made.stepped(optimizer) is (value < 5.0)
        made.update()
        scale = made.get_scale()
    if by != "disabled":
        counts = made.step_counts(optimizer)
        assert (counts.taken, counts.skipped, counts.spikes) == (2, 0, 2)
        assert scale == (1024.0 if by == "scaler" else 1.0)  # it does not back off


def test_spikes_are_not_counted_towards_the_limit_of_skips_and_an_inf_is_none():
    (parameter, optimizer), guard = sgd(), StepGuard(max_consecutive_skips=2)

    def step(value: float) -> None:
        parameter.grad = torch.full_like(parameter, value)
        guard.step(optimizer, skip_above=1.0)
        guard.update()

    for value in (10.0, 10.0, 10.0, INF, 10.0):
        step(value)
    counts = guard.step_counts(optimizer)
    assert (counts.taken, counts.skipped, counts.spikes) == (0, 1, 4)
    with pytest.raises(NonFiniteGradients):
        step(INF)


def _joint(together: dict[str, Any], bad: float) -> Any:
    (a, of_a), (b, of_b) = sgd(fused=True), sgd()
    guard = StepGuard()
    a.grad, b.grad = torch.full_like(a, 3.0), torch.full_like(b, 4.0)
    if dist.get_rank():
        b.grad.mul_(bad)
    guard.step_all([of_a, of_b], **together)
    guard.update()
    return round(a.item(), 4), round(b.item(), 4), round(guard.grad_norm().item(), 4)


def test_one_norm_over_several_steps_all_or_none(ranks2):
    assert ranks2.run(_joint, {"max_norm": 1.0}, 1.0) == [(0.4, 0.2, 5.0)] * 2
    assert ranks2.run(_joint, {"together": True}, 1.0) == [(-2.0, -3.0, 5.0)] * 2
    for together in ({"max_norm": 1.0}, {"together": True}):
        for first, second, norm in ranks2.run(_joint, together, NAN):
            assert (first, second, math.isnan(norm)) == (1.0, 1.0, True)


def _differing() -> list[Any]:
    (parameter, optimizer), guard = sgd(), StepGuard()
    errors = []
    for odd in ({"max_norm": 2.0}, {"max_norm": -1.0}, {"skip_above": 3.0}):
        parameter.grad = torch.ones_like(parameter)
        given = odd if dist.get_rank() else {"max_norm": 1.0}
        errors.append(error_of(guard.step, optimizer, **given))
        guard.update()
    return [errors, parameter.item()]


def _differing_limits() -> list[Any]:
    (parameter, optimizer), guard = sgd(), StepGuard()
    parameter.grad = torch.ones_like(parameter)
    limit = torch.tensor(0.5 + dist.get_rank())
    return [error_of(guard.step, optimizer, skip_above=limit), parameter.item()]


def test_ranks_with_other_limits_in_tensors_raise_on_every_rank(ranks2):
    for (name, text), value in ranks2.run(_differing_limits):
        assert (name, value) == ("LockstepError", 1.0)
        assert "skip_above=1.5" in text


def _found_before() -> tuple[str, float]:
    (parameter, optimizer), guard = sgd(), StepGuard()
    parameter.grad = torch.full_like(parameter, NAN)
    guard.unscale_(optimizer)
    if dist.get_rank():  # the other leaves it out, and a new group counts anew
        guard.update()
    guard.process_group = dist.new_group()
    parameter.grad = torch.ones_like(parameter)
    guard.step(optimizer, max_norm=0.25)
    return str(guard.step_counts(optimizer)), parameter.item()


def test_what_one_rank_found_before_a_norm_skips_on_all(ranks2):
    """The model of the protocol found it: FOUND_BEFORE_IS_NOT_SENT."""
    first, second = ranks2.run(_found_before, timeout=20)
    assert first == second
    assert first[1] == 1.0


def _replaced() -> list[float]:
    (parameter, optimizer), guard = sgd(), StepGuard()
    values = []
    for again in (False, True):
        if again:  # one rank is another process, which has no more than the state
            guard, state = (StepGuard(), guard.state_dict()) if dist.get_rank() else (guard, {})
            guard.load_state_dict(state)
            guard.process_group = dist.new_group()
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            guard.step(optimizer, max_norm=0.25)
            guard.update()
            values.append(parameter.item())
    return values


def test_a_rank_that_was_replaced_compares_replicas_with_the_others(ranks2):
    """The model has it: CLIPS_AGREE_KEPT_IN_A_NEW_GROUP."""
    first, second = ranks2.run(_replaced, timeout=20)
    assert first == second == pytest.approx([0.75, 0.5, 0.25, 0.0], abs=1e-5)


def test_ranks_that_clip_by_another_norm_raise_on_every_rank(ranks2):
    for errors, value in ranks2.run(_differing):
        assert [name for name, _ in errors] == ["LockstepError", "SettingError", "LockstepError"]
        assert "max_norm=2.0" in errors[0][1]
        assert "max_norm must be >= 0" in errors[1][1]
        assert value == 1.0


class OfItsOwn(torch.optim.SGD):
    """An optimizer that clips by itself."""

    def step(self, max_norm: float = 1.0) -> None:  # type: ignore[override]
        """As SGD."""


def test_what_a_step_by_norm_refuses():
    (parameter, optimizer), guard = sgd(), StepGuard()
    with pytest.raises(TypeError, match="a max_norm of its own"):
        guard.step(OfItsOwn([parameter], lr=1.0), max_norm=1.0)
    with pytest.raises(StageError, match="before a norm was measured"):
        guard.grad_norm()
    parameter.grad = torch.ones_like(parameter)
    for bad in ({"max_norm": -1.0}, {"skip_above": 0.0}, {"skip_above": torch.ones(2)}):
        with pytest.raises(SettingError, match=next(iter(bad))):
            guard.step(optimizer, **bad)


@pytest.mark.parametrize("fused", [False, True])
def test_a_clip_in_place_and_a_step_look_once(fused):
    (parameter, optimizer), guard = sgd(fused=fused), StepGuard()
    parameter.grad = torch.full_like(parameter, 4.0)
    assert guard.clip_grad_norm_(optimizer, 1.0).item() == 4.0
    assert parameter.grad.item() == pytest.approx(1.0)
    guard.step(optimizer)
    assert parameter.item() == pytest.approx(0.0, abs=1e-6)


def test_an_earlier_skip_stays_one():
    """A clip over two, of which one is NaN; the other then steps by its own norm."""
    (good, of_good), (bad, of_bad) = sgd(), sgd()
    guard = StepGuard()
    guard.add_optimizer(of_good, of_bad)
    good.grad, bad.grad = torch.ones_like(good), torch.full_like(bad, NAN)
    guard.clip_grad_norm_([good, bad], 1.0)
    guard.step(of_good, max_norm=1.0)
    assert good.item() == 1.0


def test_float64_and_sparse_gradients_are_clipped_before_the_step():
    table = nn.Embedding(3, 2, sparse=True)
    optimizer, guard = torch.optim.SGD(table.parameters(), lr=1.0), StepGuard()
    before = table.weight.detach().clone()
    (table(torch.tensor([1, 1])).sum() * 3.0).backward()
    guard.step(optimizer, max_norm=1.0)
    moved = before - table.weight.detach()
    assert guard.grad_norm(optimizer).item() == pytest.approx(math.sqrt(72.0))
    assert moved.norm().item() == pytest.approx(1.0)
    assert leaf(1.0).dtype is torch.float32


def _undeclared() -> Any:
    """Each rank has another expert, and nothing says so."""
    (expert, optimizer), guard = sgd(), StepGuard()
    expert.grad = torch.full_like(expert, 3.0 + dist.get_rank())
    error = error_of(guard.step, optimizer, max_norm=1.0)
    guard.update()
    guard.step_all([optimizer], max_norm=100.0, sharded=lambda _: True)
    return error, guard.grad_norm().item()


def test_replicas_that_differ_are_refused_until_they_are_declared(ranks2):
    for error, norm in ranks2.run(_undeclared):
        assert error[0] == "GradientError"
        assert "sharded=lambda p" in error[1]
        assert norm == 5.0
