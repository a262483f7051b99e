"""step(max_norm=, skip_above=): norm, flag and clip are one message, and the step one decision.

Programs of such steps, over one optimizer and several, are drawn in `test_oracle`, and in every
layout in `tests.scaler.test_random_programs`.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import DistGradScaler, StepGuard
from distamp.errors import GradientError, NonFiniteGradients, SettingError, StageError
from tests.on_ranks import on_ranks
from tests.scaler.steps import INF, NAN, backward, error_of, iteration, sgd, torch_scaler

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [1e-2, 1e6, 0.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", MAKE)
def test_it_clips_and_steps_as_torch_does(by, kind, max_norm, dtype):
    made, other = MAKE[by](), torch_scaler(1024.0, enabled=by == "scaler")
    ends = []
    for scaler in (made, other):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
        optimizer = KINDS[kind](net.parameters())
        for number in range(3):
            optimizer.zero_grad()
            x = torch.full((2, 4), 1.0 + number, dtype=dtype)
            scaler.scale(net(x).square().sum() * 10.0).backward()
            if scaler is other:
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm)
                scaler.step(optimizer)
            else:
                scaler.step(optimizer, max_norm=max_norm)
                norm = None if by == "disabled" else scaler.grad_norm(optimizer)
                assert by == "disabled" or scaler.grad_norm() == norm
            scaler.update()
        # The kernel leaves the clipped gradients, too.
        ends.append([norm, *net.parameters(), *(p.grad for p in net.parameters())])
    (norm, *ours), (exact, *theirs) = ends
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    if norm is not None:
        torch.testing.assert_close(norm, exact.float())


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("by", MAKE)
@pytest.mark.parametrize("limit", [5.0, torch.tensor(5.0)], ids=["float", "tensor"])
def test_a_spike_is_skipped_and_counted_apart_and_no_scale_backs_off(limit, by, fused):
    (parameter, optimizer), made = sgd(fused=fused), MAKE[by]()
    for gradient in (1.0, 10.0, 10.0, 1.0):
        iteration(made, optimizer, parameter, gradient, skip_above=limit)
    assert parameter.item() == -1.0
    assert made.get_scale() == (1024.0 if by == "scaler" else 1.0)
    if by != "disabled":
        counts = made.step_counts(optimizer)
        assert (counts.taken, counts.skipped, counts.spikes) == (2, 0, 2)


def test_spikes_are_not_counted_towards_the_limit_of_skips_and_an_inf_is_none():
    (parameter, optimizer), guard = sgd(), StepGuard(max_consecutive_skips=2)
    for gradient in (10.0, 10.0, 10.0, INF, 10.0):
        iteration(guard, optimizer, parameter, gradient, skip_above=1.0)
    counts = guard.step_counts(optimizer)
    assert (counts.taken, counts.skipped, counts.spikes) == (0, 1, 4)
    with pytest.raises(NonFiniteGradients):
        iteration(guard, optimizer, parameter, INF, skip_above=1.0)


# What rank 1 gives where rank 0 gives other limits, and what every rank raises.
LIMIT = {"max_norm": 1.0}
DIFFERING: list[tuple[list[dict[str, Any]], str, str]] = [
    ([LIMIT, {"max_norm": 2.0}], "LockstepError", "max_norm=2.0"),
    ([LIMIT, {"skip_above": 3.0}], "LockstepError", "skip_above=3.0"),
    ([LIMIT, {"max_norm": -1.0}], "SettingError", "max_norm must be >= 0"),
    ([{"skip_above": torch.tensor(at)} for at in (0.5, 1.5)], "LockstepError", "skip_above=1.5"),
]


@on_ranks(2)
def test_ranks_that_clip_by_another_norm_raise_on_every_rank():
    (parameter, optimizer), guard = sgd(), StepGuard()
    for given, expected, words in DIFFERING:
        given_here = given[dist.get_rank()]
        name, text = error_of(iteration, guard, optimizer, parameter, 1.0, **given_here)
        assert (name, words in text) == (expected, True), text
        assert parameter.item() == 1.0
        guard.update()


@on_ranks(2)
def test_a_rank_that_was_replaced_compares_replicas_with_the_others():
    """The model has it: CLIPS_AGREE_KEPT_IN_A_NEW_GROUP."""
    (parameter, optimizer), guard = sgd(), StepGuard()
    for number in range(4):
        if number == 2:  # one rank is another process, which has no more than the state
            guard, state = (StepGuard(), guard.state_dict()) if dist.get_rank() else (guard, {})
            guard.load_state_dict(state)
            guard.process_group = dist.new_group()
        iteration(guard, optimizer, parameter, 1.0, max_norm=0.25)
        assert parameter.item() == pytest.approx(0.75 - 0.25 * number, abs=1e-5)


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
    for bad in (0.0, torch.ones(2), torch.tensor(NAN)):
        with pytest.raises(SettingError, match="skip_above"):
            guard.step(optimizer, skip_above=bad)


@pytest.mark.parametrize("calls", [{}, {"max_norm": 1.0}], ids=["step", "by norm"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("by", ["guard", "scaler"])
def test_an_earlier_skip_stays_one(by, fused, calls):
    """A clip over two, of which one is NaN; the other then steps by its own norm, or by none."""
    (good, of_good), (bad, of_bad), made = sgd(fused=fused), sgd(fused=fused), MAKE[by]()
    made.add_optimizer(of_good, of_bad)
    backward(made, good, 1.0)
    backward(made, bad, NAN)
    assert made.clip_grad_norm_([good, bad], 1.0).isnan()
    for optimizer in (of_good, of_bad):
        assert made.found_inf(optimizer).item() == 1.0
        made.step(optimizer, **calls)
        assert not made.stepped(optimizer)
    assert (good.item(), bad.item()) == (1.0, 1.0)


@on_ranks(2)
@pytest.mark.parametrize("first", ["frozen", "declared"])
def test_replicas_are_compared_again_where_more_take_part_or_are_declared_otherwise(first):
    """As parameters that thaw under DDP, which does not average what was frozen at first."""
    alike, apart = (nn.Parameter(torch.ones(2)) for _ in range(2))
    guard, optimizer = StepGuard(), torch.optim.SGD([alike, apart], lr=0.1)
    for step in range(3):
        alike.grad = torch.ones(2)
        apart.grad = torch.full((2,), 1.0 + dist.get_rank())
        if first == "declared" and step < 2:
            guard.clip_grad_norm_(optimizer, 1.0, sharded=lambda p: p is apart)
            guard.step(optimizer)
        elif step < 2:
            apart.grad = None
            guard.step(optimizer, max_norm=1.0)
        else:
            with pytest.raises(GradientError, match="differ between ranks"):
                guard.step(optimizer, max_norm=1.0)
        guard.update()
