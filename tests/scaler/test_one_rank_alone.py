"""Calls that one rank makes alone, or makes wrongly: every rank raises, and no rank waits.

Rank 1 is the odd one. Ranks that make the same calls with other arguments, optimizers or settings
are in `test_lockstep`.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, StepGuard, clip_grad_norm_, initialize
from distamp.errors import CallOrderError, RankMismatchError
from distamp.grads import to_local
from tests.collectives import count_collectives
from tests.on_ranks import on_ranks
from tests.scaler.steps import INF, cpu_scaler, error_of

GUARDS = ["guard", "scaler"]
LAYOUTS = ["plain", "DDP", "FSDP2"]


class Training:
    """A model, an optimizer, and a guard or scaler, after one step that was taken."""

    def __init__(self, by: str = "guard", layout: str = "plain", fused: bool = False) -> None:
        self.odd = dist.get_rank() == 1
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(4, 4)
        if layout == "DDP":
            self.model = DistributedDataParallel(self.model)
        elif layout == "FSDP2":
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=fused)
        self.guard: StepGuard | DistGradScaler = StepGuard() if by == "guard" else cpu_scaler()
        self.iteration()

    def backward(self, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.guard.scale((self.model(torch.ones(2, 4)) * factor).sum()).backward()

    def iteration(self, **arguments: Any) -> None:
        self.backward()
        self.guard.step(self.optimizer, **arguments)
        self.guard.update()

    def weights(self) -> list[float]:
        local = [to_local(parameter.detach()) for parameter in self.model.parameters()]
        return torch.cat([tensor.flatten() for tensor in local]).tolist()


# -- other calls -----------------------------------------------------------------------------------

STEP = "step(), step_all() or unscale_()"
# The line of each rank in the error, and the calls of rank 0 and rank 1 after a backward pass.
PAIRS: dict[tuple[str, str], tuple[Callable[[Training], Any], Callable[[Training], Any]]] = {
    ("no max_norm=", "max_norm=1.0"): (
        lambda t: t.guard.step(t.optimizer),
        lambda t: t.guard.step(t.optimizer, max_norm=1.0),
    ),
    ("max_norm=1.0", "max_norm=2.0"): (
        lambda t: t.guard.step(t.optimizer, max_norm=1.0),
        lambda t: t.guard.step(t.optimizer, max_norm=2.0),
    ),
    (STEP, "clip_grad_norm_()"): (
        lambda t: t.guard.step(t.optimizer, max_norm=1.0),
        lambda t: t.guard.clip_grad_norm_(t.optimizer, 1.0),
    ),
    (STEP, "nonfinite_report()"): (
        lambda t: t.guard.step(t.optimizer),
        lambda t: t.guard.nonfinite_report(),
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("by", GUARDS)
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("lines", PAIRS)
def test_different_calls_raise_on_every_rank_with_both_names(lines, fused, by):
    training = Training(by, fused=fused)
    before = training.weights()
    training.backward()
    calls = PAIRS[lines]
    name, text = error_of(calls[training.odd], training)
    assert name == "RankMismatchError"
    first, second = lines
    assert f"\n  rank 0: {first}\n" in text
    assert f"\n  rank 1: {second}\n" in text
    assert training.weights() == before


@on_ranks(2)
@pytest.mark.parametrize("by", GUARDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_report_on_one_rank_meets_the_update_of_the_others(layout, by):
    training = Training(by, layout)
    training.backward(INF)
    training.guard.step(training.optimizer)
    call = training.guard.nonfinite_report if training.odd else training.guard.update
    name, text = error_of(call)
    assert name == "RankMismatchError"
    assert "\n  rank 0: update()\n  rank 1: nonfinite_report()\n" in text


@on_ranks(2)
@pytest.mark.parametrize("by", GUARDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_catch_the_error_of_a_report_on_one_rank_train_on(layout, by):
    training = Training(by, layout)
    training.backward(INF)
    training.guard.step(training.optimizer)
    call = training.guard.nonfinite_report if training.odd else training.guard.update
    assert error_of(call)[0] == "RankMismatchError"
    training.guard.update()
    training.iteration()
    assert training.guard.step_counts(training.optimizer).taken == 2


@on_ranks(2)
def test_a_local_report_sends_nothing():
    training = Training()
    training.backward(INF)
    training.guard.step(training.optimizer)
    if training.odd:
        report = training.guard.nonfinite_report(local=True)
        assert {overflow.rank for overflow in report.overflows} == {1}
    training.guard.update()
    training.iteration()
    with pytest.raises(CallOrderError, match=r"local=True\) found no inf or NaN .* of rank"):
        training.guard.nonfinite_report(local=True)


# The call of rank 0, beside a clip without a guard on rank 1.
BESIDE_A_CLIP: dict[str, Callable[[Training], Any]] = {
    "step": lambda t: t.guard.step(t.optimizer),
    "step by norm": lambda t: t.guard.step(t.optimizer, max_norm=1.0),
    "clip_grad_norm_()": lambda t: t.guard.clip_grad_norm_(t.optimizer, 1.0),
    "nonfinite_report()": lambda t: t.guard.nonfinite_report(),
}


@on_ranks(2)
@pytest.mark.parametrize("by", GUARDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", BESIDE_A_CLIP)
def test_a_clip_without_a_guard_beside_another_call_raises_on_every_rank(call, layout, by):
    training = Training(by, layout)
    before = training.weights()
    training.backward()
    if training.odd:
        name, text = error_of(clip_grad_norm_, training.optimizer, 1.0)
    else:
        name, text = error_of(BESIDE_A_CLIP[call], training)
    assert name == "RankMismatchError"
    line = STEP if call.startswith("step") else call
    assert f"\n  rank 0: {line}\n  rank 1: distamp.clip_grad_norm_()\n" in text
    assert training.weights() == before


@on_ranks(2)
def test_clips_without_a_guard_that_differ_raise_on_every_rank():
    training = Training()
    training.backward()
    equal = [1, torch.tensor(1.0)][training.odd]
    clip_grad_norm_(training.optimizer, equal)
    name, text = error_of(clip_grad_norm_, training.optimizer, 1.0 + training.odd)
    assert name == "RankMismatchError"
    assert "max_norm=2.0" in text


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, torch.inf])
def test_a_clip_without_a_guard_sends_two_messages_and_counts_nothing(norm_type):
    training = Training()
    for _ in range(2):
        training.backward()
        with count_collectives() as seen:
            clip_grad_norm_(training.optimizer, 1.0, norm_type)
        assert seen.count == 2
        training.guard.step(training.optimizer)
        training.guard.update()
    assert training.guard.step_counts(training.optimizer).taken == 3


# -- errors in the order of calls ------------------------------------------------------------------


def _step(training: Training) -> None:
    training.guard.step(training.optimizer)


def _unscale(training: Training) -> None:
    training.guard.unscale_(training.optimizer)


def _forgets_update(training: Training) -> None:
    _step(training)
    if not training.odd:
        training.guard.update()
    training.backward()


# Calls before, the call of both ranks, and the error of rank 1.
WRONG: dict[str, tuple[Callable[[Training], Any], Callable[[Training], Any], str]] = {
    "step after step": (_forgets_update, _step, "step() has already been called"),
    "step_all after step": (
        _forgets_update,
        lambda t: t.guard.step_all([t.optimizer]),
        "step() has already been called",
    ),
    "step by norm after step": (
        _forgets_update,
        lambda t: t.guard.step(t.optimizer, max_norm=1.0),
        "step() has already been called",
    ),
    "unscale_ after step": (_forgets_update, _unscale, "unscale_() is being called after step()"),
    "clip after step": (
        _forgets_update,
        lambda t: t.guard.clip_grad_norm_(t.optimizer, 1.0),
        "unscale_() is being called after step()",
    ),
    "no optimizer": (
        lambda t: None,
        lambda t: t.guard.unscale_(*([] if t.odd else [t.optimizer])),
        "at least one optimizer",
    ),
    "closure": (
        lambda t: None,
        lambda t: t.guard.step(t.optimizer, *([lambda: 1.0] if t.odd else []), max_norm=1.0),
        "Closure use",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("by", GUARDS)
@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_in_the_order_of_calls_is_raised_on_every_rank(wrong, by):
    before, call, words = WRONG[wrong]
    training = Training(by)
    training.backward()
    before(training)
    weights = training.weights()
    _, text = error_of(call, training)
    assert words in text
    assert ("(raised on rank 1; every rank stops here)" in text) is not training.odd
    assert training.weights() == weights


@on_ranks(2)
@pytest.mark.parametrize("by", GUARDS)
@pytest.mark.parametrize("wrong", ["step", "update"])
def test_an_error_where_no_message_is_due_is_raised_with_the_next_one(wrong, by):
    training = Training(by)
    training.backward()
    training.guard.unscale_(training.optimizer)
    training.guard.step(training.optimizer)
    if training.odd and wrong == "step":
        assert error_of(training.guard.step, training.optimizer)[0] == "CallOrderError"
    if training.odd and wrong == "update":
        assert error_of(training.guard.update, -1.0)[0] == "ConfigError"
    training.guard.update()
    training.backward()
    name, text = error_of(training.guard.unscale_, training.optimizer)
    assert name == ("CallOrderError" if wrong == "step" else "ConfigError")
    assert "(raised on rank 1 in a call that sends nothing" in text


@on_ranks(2)
@pytest.mark.parametrize("by", GUARDS)
@pytest.mark.parametrize("unscales", [False, True])
def test_an_error_that_all_ranks_make_alike_leaves_all_as_they_were(unscales, by):
    training = Training(by)
    training.backward()
    if unscales:
        training.guard.unscale_(training.optimizer)
    training.guard.step(training.optimizer)
    name, _ = error_of(training.guard.step, training.optimizer)
    assert name == "CallOrderError"
    name, _ = error_of(training.guard.unscale_, training.optimizer)
    assert name == "CallOrderError"
    assert training.guard.step_was_taken(training.optimizer)
    training.guard.update()
    training.iteration(max_norm=1.0)
    counts = training.guard.step_counts(training.optimizer)
    assert counts.taken == 3
    assert counts.skipped == 0
    if by == "scaler":
        assert training.guard.get_scale() == 1024.0


# -- no gradients ----------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("by", GUARDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_step_without_a_gradient_on_any_rank_raises_on_every_rank(max_norm, fused, layout, by):
    training = Training(by, layout, fused)
    training.optimizer.zero_grad()
    name, text = error_of(training.guard.step, training.optimizer, max_norm=max_norm)
    assert name == "CallOrderError"
    assert text.startswith("No inf checks were recorded for this optimizer. No rank has a gradient")
    training.iteration(max_norm=max_norm)
    assert training.guard.step_counts(training.optimizer).taken == 2


@on_ranks(2)
@pytest.mark.parametrize("by", GUARDS)
@pytest.mark.parametrize("by_norm", [False, True])
def test_a_rank_without_gradients_steps_beside_one_that_has_some(by_norm, by):
    norm: Any = {"max_norm": 1.0, "shard_group_fn": lambda _: True} if by_norm else {}
    training = Training(by)
    training.backward()
    if training.odd:
        training.optimizer.zero_grad()
    training.guard.step(training.optimizer, **norm)
    assert training.guard.step_was_taken(training.optimizer)
    assert training.guard.step_counts(training.optimizer).taken == 2


@on_ranks(2)
@pytest.mark.parametrize("by", GUARDS)
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_an_optimizer_that_is_idle_beside_others_is_not_stepped_and_not_counted(
    max_norm, fused, by
):
    """A critic that trains every third iteration; in one of them on one rank alone."""
    training = Training(by, fused=fused)
    critic = nn.Linear(2, 1)
    before = critic.weight.tolist()
    other = torch.optim.AdamW(critic.parameters(), lr=0.1, fused=fused)
    for number in range(1, 7):
        training.backward()
        other.zero_grad()
        trains = number % 3 == 0
        if trains and (number == 3 or training.odd):
            training.guard.scale(critic(torch.ones(1, 2)).sum()).backward()
        training.guard.step_all([training.optimizer, other], max_norm=max_norm)
        assert training.guard.step_was_taken(training.optimizer)
        assert training.guard.taken_flag(training.optimizer)
        assert training.guard.taken_flag(other).item() is trains
        assert training.guard.step_was_taken(other) is trains
        assert training.guard.found_inf(other).item() == 0.0
        training.guard.update()
        assert (critic.weight.tolist() == before) is (number < 3)
    assert training.guard.step_counts(training.optimizer).taken == 7
    assert training.guard.step_counts(other).taken == 2
    assert training.guard.step_counts(other).skipped == 0


@on_ranks(2)
@pytest.mark.parametrize("level", ["bf16", "fp16"])
def test_the_result_of_a_step_is_false_for_an_idle_optimizer(level):
    """An overflow of the other optimizer skips that one alone."""
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp = initialize(models, optimizers, level)
    results = []
    for factor in (1.0, INF):
        amp.zero_grad()
        amp.backward((amp.models[0](torch.ones(2, 4)) * factor).sum())
        result = amp.step()
        results.append([bool(flag) for flag in (result, *result.optimizers)])
        assert not amp.scaler.step_was_taken(optimizers[1])
        assert amp.scaler.found_inf(optimizers[1]).item() == 0.0
    assert results == [[True, True, False], [False, False, False]]
    assert amp.scaler.step_counts(optimizers[1]).taken == 0


@on_ranks(2)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_optimizers_that_are_all_idle_raise(max_norm):
    training = Training()
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    training.optimizer.zero_grad()
    both = [training.optimizer, other]
    with pytest.raises(CallOrderError, match=r"has a gradient of .*, nor of the 1 other optimizer"):
        training.guard.step_all(both, max_norm=max_norm)
    training.iteration()


@on_ranks(2)
@pytest.mark.parametrize("all_ranks", [False, True])
@pytest.mark.parametrize("by", GUARDS)
def test_a_step_without_gradients_that_sends_no_message_is_raised_with_the_next_one(by, all_ranks):
    """After ``unscale_`` every rank knows that an optimizer is idle, and its step sends nothing."""
    training = Training(by)
    idle = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    training.backward()
    training.guard.unscale_(training.optimizer, idle)
    training.guard.step(training.optimizer)
    if training.odd or all_ranks:
        assert error_of(training.guard.step, idle)[0] == "CallOrderError"
    training.guard.update()
    if all_ranks:
        training.iteration()
        return
    training.backward()
    name, text = error_of(training.guard.step, training.optimizer)
    assert name == "CallOrderError"
    assert "No rank has a gradient" in text
    assert "(raised on rank 1 in a call that sends nothing" in text


# -- a step that raised ----------------------------------------------------------------------------


def _fail_once(training: Training, error: BaseException) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise error

    handle = training.optimizer.register_step_pre_hook(fail)


REFUSED_UNTIL_UPDATE = r"After a step that raised, call zero_grad\(\) and update\(\)"
FAILURES = [torch.OutOfMemoryError("out of memory"), KeyboardInterrupt(), MemoryError()]


@on_ranks(2)
@pytest.mark.parametrize("by", GUARDS)
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize(
    ("max_norm", "fused"), [(None, False), (1.0, False), (1.0, True)], ids=["", "norm", "fused"]
)
def test_a_step_that_raised_on_one_rank_is_raised_on_all_by_its_next_message(
    max_norm, fused, failure, by
):
    training = Training(by, fused=fused)
    training.backward()
    if training.odd:
        _fail_once(training, failure)
        with pytest.raises(type(failure)):
            training.guard.step(training.optimizer, max_norm=max_norm)
    else:
        training.guard.step(training.optimizer, max_norm=max_norm)
    training.optimizer.zero_grad()
    training.guard.update()
    for _ in range(2):  # until a state is loaded
        training.backward()
        with pytest.raises(RankMismatchError, match="The replicas have diverged") as caught:
            training.guard.step(training.optimizer, max_norm=max_norm)
        assert "rank 1: step 2 of AdamW (2 parameters)" in str(caught.value)
        assert type(failure).__name__ in str(caught.value)
        assert "Load a checkpoint" in str(caught.value)
        training.guard.update()
    training.guard.load_state_dict(training.guard.state_dict())
    training.iteration(max_norm=max_norm)


@on_ranks(2)
@pytest.mark.parametrize("by", GUARDS)
@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscale_"])
def test_a_step_that_raised_alike_on_all_ranks_is_refused_until_update(unscales, by):
    training = Training(by)
    training.backward()
    if unscales:
        training.guard.unscale_(training.optimizer)
    _fail_once(training, RuntimeError("wrong"))
    with pytest.raises(RuntimeError, match="wrong"):
        training.guard.step(training.optimizer)
    with pytest.raises(CallOrderError, match=REFUSED_UNTIL_UPDATE):
        training.guard.step(training.optimizer)
    training.optimizer.zero_grad()
    training.guard.update()
    training.iteration()
    assert training.guard.step_counts(training.optimizer).taken == 2


@on_ranks(2)
@pytest.mark.parametrize("by", GUARDS)
def test_a_rank_that_repeats_a_step_that_raised_makes_every_rank_raise(by):
    training = Training(by)
    training.backward()
    _fail_once(training, RuntimeError("wrong"))
    with pytest.raises(RuntimeError, match="wrong"):
        training.guard.step(training.optimizer)
    if not training.odd:
        training.optimizer.zero_grad()
        training.guard.update()
        training.backward()
    name, text = error_of(training.guard.step, training.optimizer)
    assert name == "CallOrderError"
    assert re.search(REFUSED_UNTIL_UPDATE, text)
