"""Ranks that part raise, every one of them; ranks that only differ in what they hold do not.

Each case is run on two ranks, of which rank 1 is the odd one. Programs of such events, in every
order, are `test_random_programs`.
"""

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler
from distamp.scaler import MasterParameters
from tests.ranks import RankError, mesh
from tests.scaler.steps import INF, RaiseAt, backward, cpu_scaler, error_of, iteration, leaf, sgd

Error = tuple[str, str] | None


class Job:
    """Two optimizers under one scaler, after one whole iteration of the first."""

    def __init__(self) -> None:
        self.odd = dist.get_rank() == 1
        (self.first, self.a), self.second = sgd(), leaf(1.0, 1.0)
        self.b = torch.optim.Adam([self.second], lr=0.5)
        self.scaler = cpu_scaler()
        iteration(self.scaler, self.a, self.first, 0.25)

    def backward(self) -> None:
        for parameter in (self.first, self.second):
            parameter.grad = None
            backward(self.scaler, parameter, [0.25] * parameter.numel())


# -- ranks that differ -----------------------------------------------------------------------------


def leaves_out_a_step(job: Job) -> None:
    for _ in range(2):
        job.backward()
        job.scaler.step(job.a)
        if not job.odd:
            job.scaler.step(job.b)
        job.scaler.update()


def leaves_out_a_step_that_sends_nothing(job: Job) -> None:
    for _ in range(2):
        job.backward()
        job.scaler.unscale_(job.a)
        if not job.odd:
            job.scaler.step(job.a)
        job.scaler.update()


def sets_no_new_scale(job: Job) -> None:
    for _ in range(2):
        job.backward()
        job.scaler.step(job.a)
        job.scaler.update(None if job.odd else 1024.0)


def makes_another_call(job: Job) -> None:
    job.backward()
    job.scaler.clip_grad_norm_(job.a, 1.0) if job.odd else job.scaler.step(job.a)


def steps_in_another_order(job: Job) -> None:
    job.backward()
    for optimizer in (job.b, job.a) if job.odd else (job.a, job.b):
        job.scaler.step(optimizer)


def leaves_out_nothing(job: Job, gradient: float = 0.25) -> None:
    iteration(job.scaler, job.a, job.first, gradient)


def _load(job: Job, **changed: Any) -> None:
    job.scaler.load_state_dict({**job.scaler.state_dict(), **changed})


def is_changed(job: Job, how: str, both: bool = False) -> None:
    if job.odd or both:
        job.scaler = CHANGES[how](job) or job.scaler
    leaves_out_nothing(job, INF)


CHANGES: dict[str, Callable[[Job], Any]] = {
    "growth_interval": lambda job: job.scaler.set_growth_interval(5),
    "load_state_dict": _load,
    "deepcopy": lambda job: copy.deepcopy(job.scaler),
    "pickle": lambda job: pickle.loads(pickle.dumps(job.scaler)),
    "made anew": lambda job: cpu_scaler(),
}


def clips_otherwise(job: Job, what: str) -> None:
    other = {"max_norm": 2.0, "norm_type": 1.0, "sharded": lambda _: True}
    job.backward()
    job.scaler.unscale_(job.b)
    for optimizer in (job.a, job.b):
        odd = {what: other[what]} if job.odd else {}
        job.scaler.clip_grad_norm_(optimizer, **{"max_norm": 1.0, **odd})


AGAIN = ["rank 0: iteration=1", "rank 1: iteration=0", "left out an update()", "load_state_dict"]
DIFFERS: list[tuple[Callable[..., None], list[str], list[str]]] = [
    (leaves_out_a_step, [], ["iteration="]),
    (leaves_out_a_step_that_sends_nothing, [], ["rank 0: steps=", "rank 1: steps="]),
    (sets_no_new_scale, [], ["rank 0: steps=", "rank 1: steps="]),
    (makes_another_call, [], ["rank 0: call='step'", "rank 1: call='clip_grad_norm_'"]),
    (steps_in_another_order, [], ["SGD", "Adam"]),
    (clips_otherwise, ["max_norm"], ["max_norm"]),
    (clips_otherwise, ["norm_type"], ["norm_type"]),
    (clips_otherwise, ["sharded"], ["declared"]),
    (is_changed, ["growth_interval"], ["growth_interval=5"]),
    *((is_changed, [how], AGAIN) for how in list(CHANGES)[1:]),
]


def _differ(what: Callable[..., None], *args: Any) -> Any:
    job = Job()
    return error_of(what, job, *args), job.first.item(), job.second.tolist()


@pytest.mark.parametrize(("what", "arguments", "said"), DIFFERS)
def test_ranks_that_differ_raise_on_every_rank_what_each_did(ranks2, what, arguments, said):
    first, second = ranks2.run(_differ, what, *arguments)
    if what is not leaves_out_a_step_that_sends_nothing:
        assert first[1:] == second[1:], "nothing is stepped on one rank alone"
    for error, *_ in (first, second):
        assert error is not None
        assert error[0] == "LockstepError"
        assert [words for words in said if words not in error[1]] == [], error


@pytest.mark.parametrize("how", CHANGES)
def test_ranks_that_all_change_alike_go_on(ranks2, how):
    assert ranks2.run(_differ, is_changed, how, True) == [(None, 0.75, [1.0, 1.0])] * 2


def _begins_otherwise(what: str) -> Error:
    job = Job()
    limit, factor = (1 + job.odd * (what == each) for each in ("max_consecutive_skips", "scale"))
    job.scaler = cpu_scaler(1024.0 * factor, max_consecutive_skips=limit)
    _load(job, _growth_tracker=7 * job.odd * (what == "growth_tracker"))
    return error_of(leaves_out_nothing, job)


@pytest.mark.parametrize("what", ["max_consecutive_skips", "scale", "growth_tracker"])
def test_ranks_that_begin_otherwise_are_told_at_the_first_message(ranks2, what):
    for error in ranks2.run(_begins_otherwise, what):
        assert error is not None
        assert (error[0], f"{what}=" in error[1]) == ("LockstepError", True), error


# -- an error on one rank --------------------------------------------------------------------------

ERRORS: dict[str, Callable[[Job], Any]] = {
    "FP16": lambda job: job.scaler.step(torch.optim.SGD([_filled(torch.float16, job)], lr=1.0)),
    "FP16 gradients": lambda job: job.scaler.unscale_(_both(job)),
    "master": lambda job: job.scaler.step(_with_masters(job)),
    "Partial gradient is one summand": lambda job: job.scaler.step(_partial(job)),
    "not object": lambda job: job.scaler.step(object() if job.odd else job.a),
    "given twice": lambda job: job.scaler.step_all([job.a] * (1 + job.odd)),
    "losure": lambda job: job.scaler.step(job.a, *([lambda: 1.0] if job.odd else [])),
    "max_norm must be > 0": lambda job: job.scaler.clip_grad_norm_(job.a, 1.0 - 2.0 * job.odd),
    "no optimizer this scaler has": lambda job: job.scaler.clip_grad_norm_(
        [leaf(1.0) if job.odd else job.first], 1.0
    ),
    "no such layer": lambda job: job.scaler.clip_grad_norm_(job.a, 1.0, sharded=_raises(job)),
    "declared both": lambda job: job.scaler.clip_grad_norm_(
        job.a, 1.0, sharded=lambda _: job.odd, replicated=lambda _: True
    ),
    "no memory is left at step": lambda job: _out_of_memory(job, "unscale_", job.scaler.step),
    "no memory is left at clip": lambda job: _out_of_memory(
        job, "_foreach_norm", lambda optimizer: job.scaler.clip_grad_norm_(optimizer, 1.0)
    ),
}


def _filled(dtype: torch.dtype, job: Job) -> nn.Parameter:
    parameter = leaf(1.0, dtype=dtype if job.odd else torch.float32)
    parameter.grad = torch.ones_like(parameter)
    return parameter


def _both(job: Job) -> torch.optim.Optimizer:
    job.a.add_param_group({"params": [_filled(torch.float16, job)]})
    return job.a


def _with_masters(job: Job) -> torch.optim.Optimizer:
    parameter = leaf(1.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    if not job.odd:
        MasterParameters(optimizer)
    parameter.grad = torch.ones_like(parameter)
    return optimizer


def _partial(job: Job) -> torch.optim.Optimizer:
    over = mesh((2,), ("ranks",))
    weight = nn.Parameter(distribute_tensor(torch.ones(4), over))
    weight.grad = DTensor.from_local(torch.ones(4), over, [Partial()] if job.odd else None)
    return torch.optim.SGD([weight], lr=1.0)


def _raises(job: Job) -> Callable[[Any], bool]:
    def sharded(_: Any) -> bool:
        if job.odd:
            raise KeyError("no such layer")
        return True

    return sharded


def _out_of_memory(job: Job, op: str, call: Callable[[Any], Any]) -> None:
    with RaiseAt(op if job.odd else "nothing of this name") as mode:
        try:
            call(job.a)
        finally:
            assert mode.raised is job.odd


def _one_raises(words: str) -> Any:
    job = Job()
    job.backward()
    call = ERRORS[words]
    if words == "master":
        job.scaler = cpu_scaler(fp16_grads="master")
        job.scaler.scale(torch.ones(()))
    first = error_of(call, job)
    again = error_of(job.scaler.step, job.a) if words == "FP16 gradients" else None
    before = job.first.item()
    if words == "no optimizer this scaler has":
        return first, again, before, before - 0.25  # no rank goes on after such a mistake
    job.scaler.update()
    job.a.param_groups[1:] = []
    leaves_out_nothing(job)
    return first, again, before, job.first.item()


@pytest.mark.parametrize("words", ERRORS)
def test_an_error_where_a_message_is_due_is_raised_on_every_rank(ranks2, words):
    said = words.split(" at ")[0]
    for rank, (error, again, before, after) in enumerate(ranks2.run(_one_raises, words)):
        assert error is not None
        assert said in error[1]
        assert (
            rank == 1
            or words in ("master", "Partial gradient is one summand")
            or ("rank 1" in error[1])
        ), error
        assert (before, after) == (0.75, 0.5), "nothing is stepped, and all go on after update()"
        assert again is None or again[0] == "StageError", "gradients would be unscaled twice"


def _one_dies() -> None:
    job = Job()
    if job.odd:
        os.kill(os.getpid(), signal.SIGKILL)
    leaves_out_nothing(job)


def test_a_rank_that_dies_leaves_the_others_with_a_clear_error(new_ranks):
    with pytest.raises(RankError, match=r"LockstepError(.|\n)*lost its peers"):
        new_ranks(2).run(_one_dies)


def _one_is_disabled() -> Any:
    scaler = cpu_scaler(enabled=dist.get_rank() == 0)
    parameter, optimizer = sgd()
    backward(scaler, parameter, 0.25)
    return error_of(scaler.step, optimizer), parameter.item()


def test_an_enabled_rank_among_disabled_ones_ends_at_the_timeout_and_says_why(new_ranks):
    enabled, disabled = new_ranks(2, group_timeout=1.0).run(_one_is_disabled)
    assert "enabled" in enabled[0][1]
    assert "process_group=" in enabled[0][1]
    assert (enabled[1], disabled) == (1.0, (None, 0.0 if disabled[1] == 0.0 else 0.75))


# -- ranks that may differ -------------------------------------------------------------------------


def logs_a_gradient(job: Job) -> None:
    for bad in (False, True, False):
        job.backward()
        if bad and not job.odd:
            job.first.grad.fill_(INF)
        for optimizer in (job.a, job.b):
            if job.odd:
                job.scaler.unscale_(optimizer)
                assert bad or optimizer is job.b or job.first.grad.item() == 0.25
            job.scaler.step(optimizer)
        job.scaler.update()


def brings_an_optimizer_later(job: Job) -> None:
    size = 3 if job.odd else 2
    other = leaf(*[1.0] * size)
    optimizer = torch.optim.SGD([other], lr=1.0)
    for chosen in ([job.a], [job.a, optimizer], [optimizer], [job.a, optimizer]):
        job.backward()
        other.grad = None
        backward(job.scaler, other, [0.25] * size)
        job.scaler.step_all(chosen)
        job.scaler.update()
    assert other.tolist() == [0.25] * size


FINE = {logs_a_gradient: 0.25, brings_an_optimizer_later: 0.0}


@pytest.mark.parametrize("what", FINE, ids=lambda f: f.__name__)
def test_ranks_that_differ_in_what_they_hold_go_on(ranks2, what):
    first, second = ranks2.run(_differ, what)
    assert first == second
    assert first[:2] == (None, FINE[what])


def _many_optimizers(count: int, unscale: bool) -> Any:
    """Fused, of which the last overflows on two ranks: a sum of flags that torch's do not take."""
    trained, scaler = [sgd(fused=True) for _ in range(count)], cpu_scaler()
    for number, (parameter, _) in enumerate(trained):
        bad = number == count - 1 and dist.get_rank() in (1, 2)
        backward(scaler, parameter, INF if bad else 0.25)
    optimizers = [optimizer for _, optimizer in trained]
    if unscale:
        scaler.unscale_(*optimizers)
    scaler.step_all(optimizers)
    return [parameter.item() for parameter, _ in trained]


@pytest.mark.parametrize("unscale", [False, True], ids=["step_all", "unscale_"])
@pytest.mark.parametrize("count", [1, 3, 14, 40])
def test_of_a_whole_set_each_is_stepped_by_its_own_flag(ranks4, count, unscale):
    expected = [0.75] * (count - 1) + [1.0]
    assert ranks4.run(_many_optimizers, count, unscale) == [expected] * 4


def _one_trains_disabled() -> Any:
    scaler, (parameter, optimizer) = cpu_scaler(enabled=False), sgd(4.0)
    if dist.get_rank() == 1:
        return None
    iteration(scaler, optimizer, parameter, 1.0, unscale=True)
    return parameter.item()


def test_a_step_of_a_disabled_scaler_waits_for_no_other_rank(ranks2):
    assert ranks2.run(_one_trains_disabled) == [3.0, None]


# -- groups ----------------------------------------------------------------------------------------


def _outside() -> list[Error]:
    givens = [dist.new_group([0]), DeviceMesh("cpu", [0])]
    return [error_of(DistGradScaler, "cpu", process_group=given) for given in givens]


def test_a_group_without_this_rank_is_refused_there(ranks2):
    inside, outside = ranks2.run(_outside, group="fresh")
    assert inside == [None, None]
    assert all(error[0] == "SettingError" or "ValueError" in error[0] for error in outside)
    assert all("does not contain" in error[1] for error in outside)


def _destroyed_and_made_anew(path: str) -> Any:
    """A group of the user's, and then the default one; rank 1 is a new process that loads."""
    group, job = dist.new_group([0, 1]), Job()
    job.scaler.process_group = group
    leaves_out_nothing(job)
    dist.destroy_process_group(group)
    gone = error_of(leaves_out_nothing, job)
    job.scaler.process_group = None
    job.scaler.step(job.a)
    job.scaler.update()
    job.backward()
    parted = error_of(job.scaler.step, job.a if job.odd else job.b)
    job.scaler.update()
    rank, state, value = dist.get_rank(), job.scaler.state_dict(), job.first.item()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    if job.odd:
        job.first, job.a = sgd(value)
        job.scaler = cpu_scaler()
        job.scaler.load_state_dict(state)
    iteration(job.scaler, job.b, job.second, [0.25, 0.25])  # which came second on rank 0 alone
    leaves_out_nothing(job)
    leaves_out_nothing(job, INF if job.odd else 0.25)
    return (gone, parted), (job.first.item(), job.second.tolist()), job.scaler.state_dict()


def test_groups_are_destroyed_and_made_anew_and_a_rank_is_replaced(new_ranks, tmp_path):
    first, second = new_ranks(2).run(_destroyed_and_made_anew, str(tmp_path / "store"))
    assert first[1:] == second[1:]
    assert (first[1][0], first[2]["scale"]) == (0.0, 256.0)
    for (gone, parted), *_ in (first, second):
        assert "was destroyed; set scaler.process_group" in gone[1]
        assert parted[0] == "LockstepError"


# -- uneven inputs ---------------------------------------------------------------------------------


def _uneven(batches: tuple[int, int], overflow_at: int | None) -> Any:
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler, norms = cpu_scaler(), []

    def step(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale((model(torch.ones(1, 1)) * factor).sum()).backward()
        norms.append(scaler.clip_grad_norm_(optimizer, 100.0).item())
        scaler.step(optimizer)
        scaler.update()

    with Join([model, scaler]):
        for number in range(batches[dist.get_rank()]):
            step(INF if number == overflow_at else 0.25)
    step(0.25)
    return norms[-1], model.module.weight.item(), scaler.state_dict()


@pytest.mark.parametrize("overflow_at", [None, 1])
@pytest.mark.parametrize("batches", [(1, 3), (3, 1), (2, 2), (0, 2)])
def test_join_of_model_and_scaler_trains_on_uneven_inputs(ranks2, batches, overflow_at):
    first, second = ranks2.run(_uneven, batches, overflow_at)
    assert first == second
    # DDP divides by the ranks that there were at first: a batch of one rank moves by half.
    moved = [0.25 if n < min(batches) else 0.125 for n in range(max(batches)) if n != overflow_at]
    assert first[:2] == (0.25, 1.0 - sum(moved) - 0.25)
    assert first[2]["scale"] == (1024.0 if overflow_at is None else 512.0)
