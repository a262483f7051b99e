"""Texts of a guard or scaler: its repr, its log lines, and messages about refused calls."""

import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distamp import DistGradScaler, StepGuard, clip_grad_norm_
from distamp.error_text import lines_by_rank
from distamp.errors import CallOrderError
from distamp.guard.rank_sync import CallFingerprint, _Counters, mismatch_text
from distamp.process_group import MessageGroup, call_collective
from tests.on_ranks import on_devices, on_ranks
from tests.place import device_type
from tests.ranks import logged
from tests.scaler.steps import INF, backward, cpu_scaler, error_of, iteration, sgd


def test_a_repr_has_the_scale_and_the_ranks():
    assert repr(StepGuard()) == "<StepGuard of 1 rank>"
    assert repr(cpu_scaler(8.0)) == "<DistGradScaler of 1 rank at loss scale 8>"
    assert repr(cpu_scaler(enabled=False)) == "<DistGradScaler, disabled>"


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (StepGuard, "StepGuard of 1 rank"),
        (cpu_scaler, "DistGradScaler of 1 rank at loss scale 512"),
    ],
)
def test_a_repr_has_the_steps_that_the_host_has_read(make, head):
    parameter, optimizer = sgd()
    guard = make()
    for gradient in (1.0, INF, 50.0):
        iteration(guard, optimizer, parameter, gradient, skip_norm_above=10.0)
    assert repr(guard) == f"<{head}: SGD 1 step taken, 1 skipped, 1 norm skip>"


def default_group() -> None:
    return None


def group_of_this_rank() -> Any:
    """Return a group of this rank alone; all ranks make both groups, because torch requires it."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    return groups[dist.get_rank()]


@on_ranks(2)
@pytest.mark.parametrize(
    ("make_group", "size"),
    [
        (default_group, "2 ranks"),
        (dist.new_group, "2 ranks"),
        (group_of_this_rank, "1 rank"),
    ],
)
def test_a_repr_on_one_rank_sends_nothing(make_group, size):
    """Only rank 0 calls repr, before the first message and after it."""
    parameter, optimizer = sgd()
    guard = StepGuard(make_group())
    if dist.get_rank() == 0:
        assert repr(guard) == f"<StepGuard of {size}>"
    iteration(guard, optimizer, parameter, 1.0)
    if dist.get_rank() == 0:
        assert repr(guard) == f"<StepGuard of {size}: SGD 1 step taken, 0 skipped>"
    iteration(guard, optimizer, parameter, 1.0)


def test_a_repr_does_not_read_a_loss_scale_on_a_device():
    """The host cannot read a tensor on meta, as it should not wait for a tensor on a device."""
    scaler = cpu_scaler()
    scaler._scale = torch.ones((), device="meta")
    assert repr(scaler) == "<DistGradScaler of 1 rank with its loss scale on meta>"


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("make", [StepGuard, cpu_scaler, lambda: cpu_scaler(enabled=False)])
def test_a_number_in_the_place_of_a_closure_is_refused_by_name(make, fused):
    """As in guard.step(optimizer, 0.5), which means max_norm=0.5."""
    (parameter, optimizer), guard = sgd(fused=fused), make()
    backward(guard, parameter, 1.0)
    assert error_of(guard.step, optimizer, 0.5) == (
        "TypeError",
        "step(optimizer, 0.5) passes 0.5 to SGD.step as its closure, and a closure must be a "
        "function. max_norm is a keyword: step(optimizer, max_norm=0.5).",
    )
    assert parameter.item() == 1.0


CLOSURE_OF_A_GUARD = (
    "Closure use is not supported by a StepGuard. A closure computes other gradients inside of the "
    "step than the ranks agreed on. Call optimizer.step(closure) without the guard."
)
CLOSURE_OF_A_SCALER = (
    "Closure use is not currently supported if GradScaler is enabled. A closure computes other "
    "gradients inside of the step than the ranks agreed on. Train in float32 or bfloat16 without a "
    "scaler, and call optimizer.step(closure)."
)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(StepGuard, CLOSURE_OF_A_GUARD), (cpu_scaler, CLOSURE_OF_A_SCALER)],
    ids=["guard", "scaler"],
)
def test_a_closure_is_refused_with_the_reason_and_the_way_out(make, expected):
    parameter, optimizer = sgd()
    guard = make()
    backward(guard, parameter, 1.0)
    name, text = error_of(guard.step, optimizer, lambda: 1.0)
    assert name == "CallOrderError"
    assert text == expected


@pytest.mark.parametrize("make", [StepGuard, cpu_scaler])
def test_a_second_step_is_refused_with_the_place_of_update(make):
    (parameter, optimizer), guard = sgd(), make()
    backward(guard, parameter, 1.0)
    guard.step(optimizer)
    assert error_of(guard.step, optimizer) == (
        "CallOrderError",
        "step() has already been called since the last update(). Call update() once at the end of "
        "each iteration. After a step that raised, call zero_grad() and update().",
    )


NO_NORM = (
    "grad_norm() was called before a norm was measured. Pass max_norm= to step(), or call "
    "clip_grad_norm_()."
)
NO_NORM_OF_SGD = (
    "grad_norm() was called before a norm of this SGD was measured. Pass max_norm= to step(), or "
    "call clip_grad_norm_()."
)


@pytest.mark.parametrize("make", [StepGuard, cpu_scaler])
def test_a_norm_that_was_never_measured_is_refused_with_the_calls_that_measure_one(make):
    parameter, optimizer = sgd()
    guard = make()
    name, text = error_of(guard.grad_norm)
    assert name == "CallOrderError"
    assert text == NO_NORM
    iteration(guard, optimizer, parameter, 1.0)
    name, text = error_of(guard.grad_norm, optimizer)
    assert name == "CallOrderError"
    assert text == NO_NORM_OF_SGD


COLLAPSE_OF_A_GUARD = (
    "2 steps in a row were skipped. SGD (1 parameter) had inf or NaN in its gradients each time, "
    "and max_consecutive_skips=2 is the limit. To find the gradients and their ranks, catch this "
    "error and call guard.nonfinite_report() on every rank before zero_grad(). To find the "
    "operation that made the first inf or NaN, call distamp.find_first_nonfinite."
)
COLLAPSE_OF_A_SCALER = (
    "2 steps in a row were skipped at loss scale 512. SGD (1 parameter) had inf or NaN in its "
    "gradients each time, and max_consecutive_skips=2 is the limit. To find the gradients and "
    "their ranks, catch this error and call scaler.nonfinite_report() on every rank before "
    "zero_grad(). To find the operation that made the first inf or NaN, call "
    "distamp.find_first_nonfinite."
)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(StepGuard, COLLAPSE_OF_A_GUARD), (cpu_scaler, COLLAPSE_OF_A_SCALER)],
    ids=["guard", "scaler"],
)
def test_the_limit_of_skips_in_a_row_is_raised_with_the_calls_that_find_the_cause(make, expected):
    parameter, optimizer = sgd()
    guard = make(max_consecutive_skips=2)
    iteration(guard, optimizer, parameter, INF)
    name, text = error_of(iteration, guard, optimizer, parameter, INF)
    assert name in ("NonFiniteGradientsError", "LossScaleCollapseError")
    assert text == expected


def test_a_limit_of_one_skip_is_written_in_the_singular():
    (parameter, optimizer), guard = sgd(), StepGuard(max_consecutive_skips=1)
    _, text = error_of(iteration, guard, optimizer, parameter, INF)
    assert text.startswith("1 step was skipped. SGD (1 parameter) had inf or NaN in its gradients")


# -- log lines -------------------------------------------------------------------------------------


def _log_of_a_skip(guard: Any, optimizer: torch.optim.Optimizer, logger: str) -> str:
    """Return the only line that a skip of the optimizer's first step logs."""
    parameter = optimizer.param_groups[0]["params"][0]
    with logged(logger) as lines:
        iteration(guard, optimizer, parameter, INF)
    assert len(lines) == 1
    return lines[0]


def test_a_skip_without_names_is_logged_with_a_hint():
    _, optimizer = sgd()
    assert _log_of_a_skip(StepGuard(), optimizer, "distamp.guard") == (
        "Skipped step 1 of SGD (1 parameter): inf or NaN in the gradients, first in group 0, "
        "parameter 0. Pass named_parameters= for names."
    )


def test_a_skip_under_a_scaler_is_logged_with_its_loss_scale():
    _, optimizer = sgd()
    assert _log_of_a_skip(cpu_scaler(8.0), optimizer, "distamp.scaler") == (
        "Skipped step 1 of SGD (1 parameter) at loss scale 8: inf or NaN in the gradients, first "
        "in group 0, parameter 0. Pass named_parameters= for names."
    )


def test_a_skip_with_names_of_the_guard_is_logged_without_the_hint():
    parameter, optimizer = sgd()
    guard = StepGuard(named_parameters=[("weight", parameter)])
    assert _log_of_a_skip(guard, optimizer, "distamp.guard") == (
        "Skipped step 1 of SGD (1 parameter): inf or NaN in the gradients, first in weight."
    )


def test_a_skip_with_names_of_the_optimizer_is_logged_without_the_hint():
    parameter, _ = sgd()
    optimizer = torch.optim.SGD([("inner.weight", parameter)], lr=1.0)
    assert _log_of_a_skip(StepGuard(), optimizer, "distamp.guard") == (
        "Skipped step 1 of SGD (1 parameter): inf or NaN in the gradients, first in inner.weight."
    )


@on_ranks(2)
def test_a_skip_is_logged_with_the_ranks_that_overflowed():
    parameter, optimizer = sgd()
    gradient = 1.0
    expected = [
        "Skipped step 1 of SGD (1 parameter): inf or NaN in the gradients on rank 1. Pass "
        "named_parameters= for names."
    ]
    if dist.get_rank() == 1:
        gradient = INF
        expected = []
    with logged("distamp.guard") as lines:
        iteration(StepGuard(), optimizer, parameter, gradient)
    assert lines == expected


ABOVE_THE_LIMIT = (
    "Skipped step 2 of SGD (1 parameter): gradient norm 812 exceeds skip_norm_above=100."
)


@on_ranks("world")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("make", [StepGuard, cpu_scaler])
def test_a_skip_by_the_norm_is_logged_with_norm_and_limit(make, fused, world):
    parameter, optimizer = sgd(fused=fused)
    guard = make()
    with logged("distamp") as lines:
        iteration(guard, optimizer, parameter, 1.0, skip_norm_above=100)
        iteration(guard, optimizer, parameter, 812.0, skip_norm_above=100)
    if dist.get_rank() == 0:
        assert lines == [ABOVE_THE_LIMIT]
    else:
        assert lines == []


@pytest.mark.slow
@on_devices(2)
def test_a_skip_by_the_norm_on_a_device_is_logged_with_norm_and_limit():
    """The limit is a tensor there, so that the host learns norm and limit later."""
    device = device_type()
    parameter = torch.nn.Parameter(torch.ones(1, device=device))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    limit = torch.tensor(100.0, device=device)
    guard = StepGuard()
    with logged("distamp.guard") as lines:
        for gradient in (1.0, 812.0):
            parameter.grad = torch.full_like(parameter, gradient)
            guard.step(optimizer, skip_norm_above=limit)
            guard.update()
        counts = guard.step_counts(optimizer)
    assert counts.norm_skips == 1
    if dist.get_rank() == 0:
        assert lines == [ABOVE_THE_LIMIT]
    else:
        assert lines == []


# -- ranks that differ -----------------------------------------------------------------------------


def _step_with(**arguments: Any) -> None:
    parameter, optimizer = sgd()
    guard = StepGuard()
    backward(guard, parameter, 0.5)
    guard.step(optimizer, **arguments)


def _other_interval(odd: bool) -> None:
    parameter, optimizer = sgd()
    scaler = cpu_scaler(growth_interval=1000)
    if odd:
        scaler.set_growth_interval(2000)
    iteration(scaler, optimizer, parameter, 0.5)


INTERVAL = """\
The ranks differ in growth_interval=. Nothing was stepped by this call.
  rank 0: growth_interval=1000
  rank 1: growth_interval=2000
Pass the same value on every rank."""


def _other_scale(odd: bool) -> None:
    parameter, optimizer = sgd()
    scaler = cpu_scaler(1024.0)
    if odd:
        scaler = cpu_scaler(2048.0)
    iteration(scaler, optimizer, parameter, 0.5)


SCALE = """\
The ranks differ in the loss scale. Nothing was stepped by this call.
  rank 0: loss scale 1024.0
  rank 1: loss scale 2048.0
Pass the same value on every rank. A scaler gets its scale from init_scale=, update(new_scale) or \
its loaded state."""


def _other_optimizer(odd: bool) -> None:
    parameter, optimizer = sgd()
    if odd:
        optimizer = torch.optim.AdamW([parameter])  # type: ignore[assignment]
    iteration(StepGuard(), optimizer, parameter, 0.5)


OPTIMIZER = """\
The ranks differ in the optimizers. Nothing was stepped by this call.
  rank 0: SGD
  rank 1: AdamW
Every rank must make the same calls in the same order, with the same optimizers, settings and \
arguments. Optimizers are numbered in the order of their first step."""


def _other_class(odd: bool) -> None:
    parameter, optimizer = sgd()
    guard: Any = StepGuard()
    if odd:
        guard = cpu_scaler()
    iteration(guard, optimizer, parameter, 0.5)


CLASS = """\
The ranks differ in the class. Nothing was stepped by this call.
  rank 0: StepGuard
  rank 1: DistGradScaler
Use a StepGuard on every rank, or a scaler on every rank."""


def _max_norm_on_one_rank(odd: bool) -> None:
    if odd:
        _step_with(max_norm=1.0)
    else:
        _step_with()


MAX_NORM = """\
The ranks differ in max_norm=. Nothing was stepped by this call.
  rank 0: no max_norm=
  rank 1: max_norm=1.0
Pass the same value on every rank."""


def _several_arguments(odd: bool) -> None:
    if odd:
        _step_with(max_norm=1.0, skip_norm_above=3.0, shard_group_fn=bool)
    else:
        _step_with(max_norm=1.0, skip_norm_above=2.0)


ARGUMENTS = """\
The ranks differ in skip_norm_above= and shard_group_fn=. Nothing was stepped by this call.
  rank 0: skip_norm_above=2.0, no shard_group_fn=
  rank 1: skip_norm_above=3.0, shard_group_fn=...
Pass the same value on every rank."""


def _other_clip(odd: bool) -> None:
    parameter, optimizer = sgd()
    backward(StepGuard(), parameter, 0.5)
    clip_grad_norm_(optimizer, 1.0 + odd)


CLIP = """\
The ranks differ in max_norm=. Nothing was stepped by this call.
  rank 0: max_norm=1.0
  rank 1: max_norm=2.0
Pass the same value on every rank."""


def _other_call(odd: bool) -> None:
    parameter, optimizer = sgd()
    guard = StepGuard()
    backward(guard, parameter, 0.5)
    if odd:
        guard.clip_grad_norm_(optimizer, 1.0)
    else:
        guard.step(optimizer)


CALL = """\
The ranks differ in the call. Nothing was stepped by this call.
  rank 0: step(), step_all() or unscale_()
  rank 1: clip_grad_norm_()
Every rank must make the same calls in the same order, with the same optimizers, settings and \
arguments."""


DIFFERENCES = [
    pytest.param(_other_interval, INTERVAL, id="growth interval"),
    pytest.param(_other_scale, SCALE, id="loss scale"),
    pytest.param(_other_optimizer, OPTIMIZER, id="optimizer"),
    pytest.param(_other_class, CLASS, id="class"),
    pytest.param(_max_norm_on_one_rank, MAX_NORM, id="max_norm on one rank"),
    pytest.param(_several_arguments, ARGUMENTS, id="several arguments"),
    pytest.param(_other_clip, CLIP, id="clip"),
    pytest.param(_other_call, CALL, id="call"),
]


@on_ranks(2)
@pytest.mark.parametrize(("call", "expected"), DIFFERENCES)
def test_ranks_that_differ_read_the_fields_that_differ_and_no_others(call, expected):
    name, text = error_of(call, dist.get_rank() == 1)
    assert name == "RankMismatchError"
    assert text == expected


def _settings_fingerprint(number: int, odd: set[int]) -> list[tuple[int, dict[str, Any]]]:
    """Return the values that ranks compare; the odd ranks have another interval."""
    scaler = cpu_scaler(growth_interval=1000)
    scale = torch.tensor(1.0)
    settings, has_begun, is_scaled = scaler._settings_fingerprint(scale)
    scaler.set_growth_interval(2000)
    other_settings, _, _ = scaler._settings_fingerprint(scale)
    counters = _Counters(3, 0, None, None)
    compared = []
    for rank in range(number):
        text = other_settings if rank in odd else settings
        call = CallFingerprint("step", ["SGD"], (0,), text, has_begun, is_scaled)
        compared.append((rank, call.as_dict(counters)))
    return compared


def test_of_512_ranks_one_that_differs_has_a_line_and_all_others_one():
    text = mismatch_text(_settings_fingerprint(512, {17}))
    head, *lines, fix = text.splitlines()
    assert head == "The ranks differ in growth_interval=. Nothing was stepped by this call."
    first, second = lines
    assert first == "  rank 17: growth_interval=2000"
    assert second == "  ranks 0-16, 18-511: growth_interval=1000"
    assert fix == "Pass the same value on every rank."


def test_ranks_that_are_equal_have_no_text():
    assert mismatch_text(_settings_fingerprint(512, set())) == ""


def test_two_halves_of_the_ranks_have_a_line_each():
    text = mismatch_text(_settings_fingerprint(6, {1, 3, 4, 5}))
    assert "\n  ranks 0, 2: growth_interval=1000\n  ranks 1, 3-5: growth_interval=2000\n" in text


def test_many_different_ranks_have_eight_lines_and_a_count_of_the_others():
    lines = lines_by_rank((rank, f"max_norm={rank}") for rank in range(512))
    assert len(lines) == 9
    assert lines[0] == "  rank 0: max_norm=0"
    assert lines[-1] == "  504 more ranks: other values"


class WithALength(torch.optim.SGD):
    """An optimizer with a step that takes a number."""

    def step(self, length: float) -> None:  # type: ignore[override]
        """Multiply the parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(length)


@pytest.mark.parametrize("make", [StepGuard, cpu_scaler])
def test_a_number_that_the_optimizers_own_step_takes_is_passed_on(make):
    (parameter, _), guard = sgd(3.0), make()
    backward(guard, parameter, 1.0)
    guard.step(WithALength([parameter], lr=1.0), 2.0)
    assert parameter.item() == 6.0


def test_a_report_of_a_guard_names_no_loss_scale_and_one_of_a_scaler_does():
    titles = {}
    for guard in (StepGuard(), cpu_scaler(8.0)):
        parameter, optimizer = sgd()
        iteration(guard, optimizer, parameter, INF)
        titles[type(guard)] = str(guard.nonfinite_report()).splitlines()[0]
    assert titles[StepGuard] == "inf or NaN in the gradients"
    assert titles[DistGradScaler] == "inf or NaN in the gradients at loss scale 8"


def _fail() -> None:
    raise RuntimeError("Connection closed by peer")


def _text_about_lost_peers(owner: str | None) -> str:
    """Return the error of a rank 0 that has lost its peers."""
    group: Any = MessageGroup(dist.group.WORLD, torch.device("cpu"), owner)
    group.global_rank = 0
    name, text = error_of(call_collective, group, _fail)
    assert name == "RankMismatchError"
    return text


@on_ranks(2)
def test_lost_peers_are_named_with_the_guard_that_sent():
    assert _text_about_lost_peers("guard") == (
        "Rank 0 lost its peers. A rank died, or it did not make the same call of its guard within "
        "the group's timeout. If only some ranks train, make a group of those ranks and pass it as "
        "process_group=. (Connection closed by peer)"
    )


@on_ranks(2)
def test_lost_peers_are_named_with_the_scaler_that_sent_and_may_be_disabled():
    assert _text_about_lost_peers("scaler") == (
        "Rank 0 lost its peers. A rank died, or it did not make the same call of its scaler within "
        "the group's timeout, or its scaler is disabled. If only some ranks train, make a group of "
        "those ranks and pass it as process_group=. (Connection closed by peer)"
    )


@on_ranks(2)
def test_lost_peers_of_a_call_without_a_guard_are_named_without_one():
    assert _text_about_lost_peers(None) == (
        "Rank 0 lost its peers. A rank died, or it did not make the same call within the group's "
        "timeout. If only some ranks train, make a group of those ranks and pass it as "
        "process_group=. (Connection closed by peer)"
    )


@on_ranks(2)
@pytest.mark.parametrize(("make", "noun"), [(StepGuard, "guard"), (cpu_scaler, "scaler")])
def test_a_group_lost_in_a_pickle_is_named_with_the_object_that_had_it(make, noun):
    pickled = pickle.dumps(make(process_group=dist.new_group([0, 1])))
    (parameter, optimizer), guard = sgd(), pickle.loads(pickled)
    backward(guard, parameter, 1.0)
    assert error_of(guard.step, optimizer) == (
        "CallOrderError",
        f"The process group of this {noun} was left out of a pickle, because torch cannot pickle "
        f"one. Set {noun}.process_group to a group (None is the default group).",
    )


@on_ranks(2)
@pytest.mark.parametrize(("make", "noun"), [(StepGuard, "guard"), (cpu_scaler, "scaler")])
def test_a_destroyed_group_is_named_with_the_object_that_had_it(make, noun):
    group = dist.new_group([0, 1])
    (parameter, optimizer), guard = sgd(), make(process_group=group)
    dist.destroy_process_group(group)
    backward(guard, parameter, 1.0)
    _, text = error_of(guard.step, optimizer)
    assert text.startswith(
        f"The process group of this {noun} was destroyed. Set {noun}.process_group to the new group"
    )


@on_ranks(2)
@pytest.mark.parametrize("call", ["step", "clip_grad_norm_"])
def test_replicas_with_unequal_gradients_read_their_norms_and_three_ways_out(call):
    """Without the name of a function that the user may not have called."""
    (parameter, optimizer), guard = sgd(), StepGuard()
    backward(guard, parameter, 0.5 + dist.get_rank())
    assert error_of(getattr(guard, call), optimizer, max_norm=1.0) == (
        "ReplicaMismatchError",
        "The norms of the gradients differ between ranks, from 0.5 to 1.5. Plain tensors count as "
        "replicas, whose gradients are equal on all ranks. If each rank holds other parameters "
        "(experts, stages), pass shard_group_fn=function, which returns True for such a parameter, "
        "or the group over which it is cut. If the gradients should be equal, some were not "
        "reduced: the parameter was frozen when the model was wrapped, or the backward pass went "
        "around the wrapper. If only rounding makes them differ, pass is_replicated_fn=lambda p: "
        "True.",
    )


@pytest.mark.parametrize("method", [StepGuard.step, StepGuard.unscale_])
def test_the_docs_of_a_guards_methods_name_what_a_guard_raises(method):
    text = inspect.getdoc(method)
    assert text is not None
    assert "Divide the optimizers' gradients by the loss scale" not in text
    text = " ".join(text.split())
    assert ("LossScaleCollapseError" in text) == ("a scaler raises its subclass" in text)


def test_a_scaler_whose_loss_was_never_scaled_says_so_as_torchs_does():
    (parameter, optimizer), scaler = sgd(), cpu_scaler()
    parameter.sum().backward()
    with pytest.raises(CallOrderError, match=r"did not use scaler\.scale\(loss or outputs\)"):
        scaler.step(optimizer)
