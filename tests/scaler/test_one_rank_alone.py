"""Calls that only one rank makes, or makes wrongly: every rank raises, and no rank waits.

Rank 1 is the odd one. `test_lockstep` has ranks that make the same calls with different arguments,
optimizers or settings.
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

BY = pytest.mark.parametrize("by", ["guard", "scaler"])
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
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
        outputs = self.model(torch.ones(2, 4))
        loss = (outputs * factor).sum()
        self.guard.scale(loss).backward()

    def iteration(self, **arguments: Any) -> None:
        self.backward()
        self.guard.step(self.optimizer, **arguments)
        self.guard.update()

    def weights(self) -> list[float]:
        """Return all weights of this rank."""
        weights = []
        for parameter in self.model.parameters():
            weights.extend(to_local(parameter.detach()).flatten().tolist())
        return weights


# -- other calls -----------------------------------------------------------------------------------


def step(training: Training) -> None:
    training.guard.step(training.optimizer)


def step_by_norm_1(training: Training) -> None:
    training.guard.step(training.optimizer, max_norm=1.0)


def step_by_norm_2(training: Training) -> None:
    training.guard.step(training.optimizer, max_norm=2.0)


def step_all(training: Training) -> None:
    training.guard.step_all([training.optimizer])


def unscale(training: Training) -> None:
    training.guard.unscale_(training.optimizer)


def clip(training: Training) -> None:
    training.guard.clip_grad_norm_(training.optimizer, 1.0)


def report(training: Training) -> None:
    training.guard.nonfinite_report()


# The name of a call in the error of different calls.
STEP = "step(), step_all() or unscale_()"
CLIP = "clip_grad_norm_()"
REPORT = "nonfinite_report()"


@pytest.mark.sampled
@on_ranks(2)
@BY
@FUSED
@pytest.mark.parametrize(
    ("calls", "names"),
    [
        ((step, step_by_norm_1), ("no max_norm=", "max_norm=1.0")),
        ((step_by_norm_1, step_by_norm_2), ("max_norm=1.0", "max_norm=2.0")),
        ((step_by_norm_1, clip), (STEP, CLIP)),
        ((step, report), (STEP, REPORT)),
    ],
    ids=["norm and no norm", "two norms", "step and clip", "step and report"],
)
def test_different_calls_raise_on_every_rank_with_both_names(calls, names, fused, by):
    training = Training(by, fused=fused)
    before = training.weights()
    training.backward()
    call = calls[dist.get_rank()]
    error_name, text = error_of(call, training)
    assert error_name == "RankMismatchError"
    assert f"\n  rank 0: {names[0]}\n" in text
    assert f"\n  rank 1: {names[1]}\n" in text
    assert training.weights() == before


@pytest.mark.sampled
@on_ranks(2)
@BY
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_report_on_one_rank_meets_the_update_of_the_others(layout, by):
    training = Training(by, layout)
    training.backward(INF)
    training.guard.step(training.optimizer)
    call = training.guard.nonfinite_report if training.odd else training.guard.update
    name, text = error_of(call)
    assert name == "RankMismatchError"
    assert "\n  rank 0: update()\n  rank 1: nonfinite_report()\n" in text


@pytest.mark.sampled
@on_ranks(2)
@BY
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


@pytest.mark.sampled
@on_ranks(2)
@BY
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("call", "line"),
    [(step, STEP), (step_by_norm_1, STEP), (clip, CLIP), (report, REPORT)],
    ids=["step", "step by norm", "clip", "report"],
)
def test_a_clip_without_a_guard_beside_another_call_raises_on_every_rank(call, line, layout, by):
    """Rank 0 makes the call, and rank 1 clips by the function."""
    training = Training(by, layout)
    before = training.weights()
    training.backward()
    if training.odd:
        name, text = error_of(clip_grad_norm_, training.optimizer, 1.0)
    else:
        name, text = error_of(call, training)
    assert name == "RankMismatchError"
    assert f"\n  rank 0: {line}\n  rank 1: distamp.clip_grad_norm_()\n" in text
    assert training.weights() == before


@on_ranks(2)
def test_clips_without_a_guard_that_differ_raise_on_every_rank():
    training = Training()
    training.backward()
    # Two forms of the same norm are equal.
    same_norm = torch.tensor(1.0) if training.odd else 1
    clip_grad_norm_(training.optimizer, same_norm)
    other_norm = 2.0 if training.odd else 1.0
    name, text = error_of(clip_grad_norm_, training.optimizer, other_norm)
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


def unscale_without_an_optimizer(training: Training) -> None:
    if training.odd:
        training.guard.unscale_()
    else:
        unscale(training)


def step_with_a_closure(training: Training) -> None:
    if training.odd:
        training.guard.step(training.optimizer, lambda: 1.0, max_norm=1.0)
    else:
        step_by_norm_1(training)


def check_error_of_rank_1(training: Training, call: Callable[..., Any], words: str) -> None:
    """Check that a call raises an error of rank 1 on both ranks, and changes no weight."""
    weights = training.weights()
    _, text = error_of(call, training)
    assert words in text
    is_from_another_rank = "(raised on rank 1; every rank stops here)" in text
    assert is_from_another_rank is not training.odd
    assert training.weights() == weights


STEPPED = "step() has already been called"
UNSCALED_LATE = "unscale_() is being called after step()"


@pytest.mark.sampled
@on_ranks(2)
@BY
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (step, STEPPED),
        (step_all, STEPPED),
        (step_by_norm_1, STEPPED),
        (unscale, UNSCALED_LATE),
        (clip, UNSCALED_LATE),
    ],
    ids=["step", "step_all", "step by norm", "unscale_", "clip"],
)
def test_an_update_left_out_on_one_rank_raises_on_every_rank(call, words, by):
    training = Training(by)
    training.backward()
    step(training)
    if not training.odd:
        training.guard.update()
    training.backward()
    check_error_of_rank_1(training, call, words)


@on_ranks(2)
@BY
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (unscale_without_an_optimizer, "at least one optimizer"),
        (step_with_a_closure, "Closure use"),
    ],
    ids=["no optimizer", "closure"],
)
def test_wrong_arguments_on_one_rank_raise_on_every_rank(call, words, by):
    training = Training(by)
    training.backward()
    check_error_of_rank_1(training, call, words)


@on_ranks(2)
@BY
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
@BY
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


@pytest.mark.sampled
@on_ranks(2)
@BY
@pytest.mark.parametrize("layout", LAYOUTS)
@FUSED
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
@BY
@pytest.mark.parametrize("by_norm", [False, True])
def test_a_rank_without_gradients_steps_beside_one_that_has_some(by_norm, by):
    training = Training(by)
    training.backward()
    if training.odd:
        training.optimizer.zero_grad()
    if by_norm:
        training.guard.step(training.optimizer, max_norm=1.0, shard_group_fn=lambda _: True)
    else:
        training.guard.step(training.optimizer)
    assert training.guard.step_was_taken(training.optimizer)
    assert training.guard.step_counts(training.optimizer).taken == 2


@pytest.mark.sampled
@on_ranks(2)
@BY
@FUSED
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_an_optimizer_that_is_idle_beside_others_is_not_stepped_and_not_counted(
    max_norm, fused, by
):
    """A critic trains in iterations 3 and 6, and in iteration 6 it has gradients on rank 1 only."""
    training = Training(by, fused=fused)
    critic = nn.Linear(2, 1)
    before = critic.weight.tolist()
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=0.1, fused=fused)
    for number in range(1, 7):
        training.backward()
        critic_optimizer.zero_grad()
        trains = number % 3 == 0
        if trains and (number == 3 or training.odd):
            loss = critic(torch.ones(1, 2)).sum()
            training.guard.scale(loss).backward()
        training.guard.step_all([training.optimizer, critic_optimizer], max_norm=max_norm)
        assert training.guard.step_was_taken(training.optimizer)
        assert training.guard.taken_flag(training.optimizer)
        assert training.guard.taken_flag(critic_optimizer).item() is trains
        assert training.guard.step_was_taken(critic_optimizer) is trains
        assert training.guard.found_inf(critic_optimizer).item() == 0.0
        training.guard.update()
        assert (critic.weight.tolist() == before) is (number < 3)
    assert training.guard.step_counts(training.optimizer).taken == 7
    assert training.guard.step_counts(critic_optimizer).taken == 2
    assert training.guard.step_counts(critic_optimizer).skipped == 0


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
        outputs = amp.models[0](torch.ones(2, 4))
        amp.backward((outputs * factor).sum())
        result = amp.step()
        flags = [bool(flag) for flag in result.optimizers]
        results.append([bool(result), *flags])
        assert not amp.scaler.step_was_taken(optimizers[1])
        assert amp.scaler.found_inf(optimizers[1]).item() == 0.0
    assert results == [[True, True, False], [False, False, False]]
    assert amp.scaler.step_counts(optimizers[1]).taken == 0


@on_ranks(2)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_optimizers_that_are_all_idle_raise(max_norm):
    training = Training()
    unused_parameter = nn.Parameter(torch.ones(1))
    unused_optimizer = torch.optim.SGD([unused_parameter], lr=0.1)
    training.optimizer.zero_grad()
    both = [training.optimizer, unused_optimizer]
    with pytest.raises(CallOrderError, match=r"has a gradient of .*, nor of the 1 other optimizer"):
        training.guard.step_all(both, max_norm=max_norm)
    training.iteration()


@on_ranks(2)
@pytest.mark.parametrize("all_ranks", [False, True])
@BY
def test_a_step_without_gradients_that_sends_no_message_is_raised_with_the_next_one(by, all_ranks):
    """After ``unscale_`` every rank knows that an optimizer is idle, and its step sends nothing."""
    training = Training(by)
    idle_parameter = nn.Parameter(torch.ones(1))
    idle = torch.optim.SGD([idle_parameter], lr=0.1)
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


def fail_once(training: Training, error: BaseException) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise error

    handle = training.optimizer.register_step_pre_hook(fail)


REFUSED_UNTIL_UPDATE = r"After a step that raised, call zero_grad\(\) and update\(\)"
FAILURES = [torch.OutOfMemoryError("out of memory"), KeyboardInterrupt(), MemoryError()]


@pytest.mark.sampled
@on_ranks(2)
@BY
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
        fail_once(training, failure)
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
@BY
@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscale_"])
def test_a_step_that_raised_alike_on_all_ranks_is_refused_until_update(unscales, by):
    training = Training(by)
    training.backward()
    if unscales:
        training.guard.unscale_(training.optimizer)
    fail_once(training, RuntimeError("wrong"))
    with pytest.raises(RuntimeError, match="wrong"):
        training.guard.step(training.optimizer)
    with pytest.raises(CallOrderError, match=REFUSED_UNTIL_UPDATE):
        training.guard.step(training.optimizer)
    training.optimizer.zero_grad()
    training.guard.update()
    training.iteration()
    assert training.guard.step_counts(training.optimizer).taken == 2


@on_ranks(2)
@BY
def test_a_rank_that_repeats_a_step_that_raised_makes_every_rank_raise(by):
    training = Training(by)
    training.backward()
    fail_once(training, RuntimeError("wrong"))
    with pytest.raises(RuntimeError, match="wrong"):
        training.guard.step(training.optimizer)
    if not training.odd:
        training.optimizer.zero_grad()
        training.guard.update()
        training.backward()
    name, text = error_of(training.guard.step, training.optimizer)
    assert name == "CallOrderError"
    assert re.search(REFUSED_UNTIL_UPDATE, text)
