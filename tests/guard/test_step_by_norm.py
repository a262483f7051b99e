"""step(max_norm=, skip_norm_above=) sends one message with flag and norm, and decides once.

Programs of such steps, over one optimizer and several, are drawn in `test_oracle`, and in every
layout in `tests.scaler.test_random_programs`.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import DistGradScaler, StepGuard
from distamp.errors import CallOrderError, ConfigError, GradientError, NonFiniteGradientsError
from distamp.optim_utils import view_of
from distamp.scaler import MasterParameters
from tests.on_ranks import on_ranks
from tests.scaler.steps import INF, NAN, backward, cpu_scaler, error_of, iteration, leaf, sgd


def test_a_disabled_scaler_clips_and_leaves_spikes_out_and_says_so():
    (parameter, optimizer), scaler = sgd(0.0, 0.0), DistGradScaler("cpu", enabled=False)
    for gradient, norm in (([30.0, 40.0], 50.0), ([3.0, 4.0], 5.0)):
        iteration(scaler, optimizer, parameter, gradient, max_norm=1.0, skip_norm_above=10.0)
        told = (
            scaler.step_was_taken(optimizer),
            scaler.found_inf(optimizer),
            scaler.grad_norm(optimizer),
        )
        assert told == (norm < 10.0, norm > 10.0, norm)
    assert scaler.step_counts(optimizer).norm_skips == 1
    assert parameter.tolist() == pytest.approx([-0.6, -0.8])


def test_spikes_are_not_counted_towards_the_limit_of_skips_and_an_inf_is_none():
    (parameter, optimizer), guard = sgd(), StepGuard(max_consecutive_skips=2)
    for gradient in (10.0, 10.0, 10.0, INF, 10.0):
        iteration(guard, optimizer, parameter, gradient, skip_norm_above=1.0)
    counts = guard.step_counts(optimizer)
    assert (counts.taken, counts.skipped, counts.norm_skips) == (0, 1, 4)
    with pytest.raises(NonFiniteGradientsError):
        iteration(guard, optimizer, parameter, INF, skip_norm_above=1.0)


# What rank 1 gives where rank 0 gives other limits, and what every rank raises.
LIMIT = {"max_norm": 1.0}
DIFFERING: list[tuple[list[dict[str, Any]], str, str]] = [
    ([LIMIT, {"max_norm": 2.0}], "RankMismatchError", "max_norm=2.0"),
    ([LIMIT, {"skip_norm_above": 3.0}], "RankMismatchError", "skip_norm_above=3.0"),
    ([LIMIT, {"max_norm": -1.0}], "ConfigError", "max_norm must be >= 0"),
    (
        [{"skip_norm_above": torch.tensor(at)} for at in (0.5, 1.5)],
        "RankMismatchError",
        "skip_norm_above=1.5",
    ),
]


@on_ranks(2)
def test_ranks_that_clip_by_another_norm_raise_on_every_rank():
    (parameter, optimizer), guard, rank = sgd(), StepGuard(), dist.get_rank()
    for given, expected, words in DIFFERING:
        name, text = error_of(iteration, guard, optimizer, parameter, 1.0, **given[rank])
        assert (name, words in text, parameter.item()) == (expected, True, 1.0), text
        guard.update()


@on_ranks(2)
def test_with_a_rank_that_was_replaced_replicas_are_compared_and_skips_counted_anew():
    """The model has it: CLIPS_AGREE_KEPT_IN_A_NEW_GROUP."""
    (parameter, optimizer), guard = sgd(), StepGuard(max_consecutive_skips=3)
    raised = []
    for number, gradient in enumerate((1.0, INF, INF, INF, INF, INF, 1.0)):
        if number == 3:  # one rank is another process, which has no more than the state
            state = guard.state_dict()
            guard = StepGuard(max_consecutive_skips=3) if dist.get_rank() else guard
            guard.load_state_dict(state)
            guard.process_group = dist.new_group()
        here = gradient if dist.get_rank() else 1.0
        raised.append(error_of(iteration, guard, optimizer, parameter, here, max_norm=0.25))
        if raised[-1]:
            guard.update()
    name, text = raised.pop(5)
    assert (name, raised) == ("NonFiniteGradientsError", [None] * 6)
    assert text.startswith("3 steps in a row were skipped. SGD (1 parameter) had inf or NaN in its")
    assert parameter.item() == pytest.approx(0.5, abs=1e-5)


class OfItsOwn(torch.optim.SGD):
    """An optimizer that clips by itself."""

    def step(  # type: ignore[override]
        self, max_norm: float = 1.0, shard_group_fn: Any = None, is_replicated_fn: Any = None
    ) -> None:
        """As SGD."""


def test_what_a_step_by_norm_refuses():
    (parameter, optimizer), guard = sgd(), StepGuard()
    for name, value in {"max_norm": 1.0, "shard_group_fn": bool, "is_replicated_fn": bool}.items():
        with pytest.raises(TypeError, match=f"a {name} of its own"):
            guard.step(OfItsOwn([parameter], lr=1.0), **{"skip_norm_above": 9.0, name: value})
    with pytest.raises(CallOrderError, match="before a norm was measured"):
        guard.grad_norm()
    parameter.grad = torch.ones_like(parameter)
    for bad in (0.0, torch.ones(2), torch.tensor(NAN)):
        with pytest.raises(ConfigError, match="skip_norm_above"):
            guard.step(optimizer, skip_norm_above=bad)


def _disabled() -> DistGradScaler:
    return cpu_scaler(enabled=False)


MAKERS = [StepGuard, cpu_scaler, _disabled]


@on_ranks(2)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("make", MAKERS)
def test_a_step_takes_the_declarations_of_a_clip(make, fused):
    """Rank 0 has an expert with gradient 3, rank 1 one with 4, so the norm is 5; or replicas."""
    declarations = {"shard_group_fn": 5.0, "is_replicated_fn": 3.5355339}
    for name, norm in declarations.items():
        (parameter, optimizer), made = sgd(0.0, fused=fused), make()
        gradient = [3.0, 4.0][dist.get_rank()]
        iteration(made, optimizer, parameter, gradient, max_norm=1.0, **{name: lambda p: True})
        assert made.grad_norm(optimizer).item() == pytest.approx(norm)
        assert parameter.item() == pytest.approx(-gradient / norm, rel=1e-5)


def _with_masters() -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    optimizer = torch.optim.SGD([leaf(1.0, 1.0, dtype=torch.float16)], lr=1.0)
    MasterParameters(optimizer)
    return optimizer, {"fp16_grads": "master"}


OPTIMIZERS: dict[str, Any] = {
    "for-loop": lambda: (torch.optim.SGD([leaf(1.0, 1.0)], lr=1.0, foreach=False), {}),
    "foreach": lambda: (torch.optim.AdamW([leaf(1.0, 1.0)], foreach=True), {}),
    "fused": lambda: (torch.optim.AdamW([leaf(1.0, 1.0)], fused=True), {}),
    "fused float64": lambda: (
        torch.optim.AdamW([leaf(1.0, 1.0, dtype=torch.float64)], fused=True),
        {},
    ),
    "masters": _with_masters,
}


def _gradients_of_a_skip(make: Any, name: str, **limits: float) -> list[Any]:
    """Return the gradients after a step that the norm of 50 skips."""
    optimizer, settings = OPTIMIZERS[name]()
    made = make(**settings) if make is cpu_scaler else make()
    (parameter,) = view_of(optimizer).model_params()
    backward(made, parameter, [30.0, 40.0])
    made.step(optimizer, skip_norm_above=10.0, **limits)
    assert not made.step_was_taken(optimizer)
    return [each.grad for pair in view_of(optimizer).param_pairs() for each in pair]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make", MAKERS)
def test_a_step_that_skip_norm_above_skips_does_not_clip(make, name):
    expected = _gradients_of_a_skip(make, name)
    found = _gradients_of_a_skip(make, name, max_norm=1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_disabled_scaler_clips_several_optimizers_with_masters_by_their_norm():
    optimizers, scaler = [_with_masters()[0] for _ in range(2)], _disabled()
    for optimizer, gradient in zip(optimizers, ([3.0, 0.0], [0.0, 4.0]), strict=True):
        backward(scaler, view_of(optimizer).model_params()[0], gradient)
    scaler.step_all(optimizers, max_norm=1.0)
    assert scaler.grad_norm().item() == pytest.approx(5.0)
    stepped = [view_of(each).model_params()[0].tolist() for each in optimizers]
    assert stepped[0] == pytest.approx([0.4, 1.0], rel=1e-3)
    assert stepped[1] == pytest.approx([1.0, 0.2], rel=1e-3)


@pytest.mark.parametrize("calls", [{}, {"max_norm": 1.0}], ids=["step", "by norm"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("make", [StepGuard, cpu_scaler])
def test_an_earlier_skip_stays_one(make, fused, calls):
    """A clip over two optimizers finds a NaN in one; the second then steps by a norm or without."""
    (good, of_good), (bad, of_bad), made = sgd(fused=fused), sgd(fused=fused), make()
    made.register_optimizers(of_good, of_bad)
    backward(made, good, 1.0)
    backward(made, bad, NAN)
    assert made.clip_grad_norm_([good, bad], 1.0).isnan()
    for optimizer in (of_good, of_bad):
        assert made.found_inf(optimizer).item() == 1.0
        made.step(optimizer, **calls)
        assert not made.step_was_taken(optimizer)
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
            guard.clip_grad_norm_(optimizer, 1.0, shard_group_fn=lambda p: p is apart)
            guard.step(optimizer)
        elif step < 2:
            apart.grad = None
            guard.step(optimizer, max_norm=1.0)
        else:
            with pytest.raises(GradientError, match=r"differ between ranks.*some were not reduced"):
                guard.step(optimizer, max_norm=1.0)
        guard.update()
