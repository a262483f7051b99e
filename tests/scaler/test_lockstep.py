"""Calls that differ between ranks raise on every rank; different values raise on none.

Each case is run on two ranks, of which rank 1 is the odd one; groups of some ranks on four.
Programs of such events, in every order, are `test_random_programs`; ranks without memory, ranks
that die and links that are cut are `test_lost_ranks`.
"""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, StepGuard
from distamp.errors import CallOrderError
from distamp.scaler import MasterParameters
from tests.on_ranks import on_ranks
from tests.ranks import logged, mesh
from tests.scaler.steps import INF, backward, cpu_scaler, error_of, iteration, leaf, sgd


class Job:
    """Two optimizers under one scaler, after one whole iteration of the first."""

    def __init__(self) -> None:
        self.odd = dist.get_rank() == 1
        (self.first, self.a), self.second = sgd(), leaf(1.0, 1.0)
        self.b = torch.optim.Adam([self.second], lr=0.5)
        self.stranger, self.scaler = leaf(1.0), cpu_scaler()
        self.stranger.grad = torch.ones(1)
        iteration(self.scaler, self.a, self.first, 0.25)

    def backward(self) -> None:
        for parameter in (self.first, self.second):
            parameter.grad = None
            backward(self.scaler, parameter, [0.25] * parameter.numel())


# -- ranks that differ -----------------------------------------------------------------------------


def leaves_out_a_step(job: Job, unscale: bool) -> None:
    for _ in range(2):
        job.backward()
        if unscale:  # then the step sends nothing
            job.scaler.unscale_(job.a)
        for optimizer in ([job.b] if job.odd else [job.b, job.a])[unscale:]:
            job.scaler.step(optimizer)
        job.scaler.update()


def makes_another_call(job: Job) -> None:
    job.backward()
    job.scaler.clip_grad_norm_(job.a, 1.0) if job.odd else job.scaler.step(job.a)


def steps_in_another_order(job: Job, twins: bool) -> None:
    """Of two classes, or of one; that order is known from the iteration before."""
    parameter, twin = sgd()
    other = twin if twins else job.b
    for turned in (False, job.odd):
        job.backward()
        backward(job.scaler, parameter, [0.25])
        for optimizer in (job.a, other)[:: -1 if turned else 1]:
            job.scaler.step(optimizer)
        job.scaler.update()


def leaves_out_nothing(job: Job, gradient: float = 0.25) -> None:
    iteration(job.scaler, job.a, job.first, gradient)


def is_changed(job: Job, how: str, both: bool = False) -> None:
    if job.odd or both:
        job.scaler = CHANGES[how](job) or job.scaler
    leaves_out_nothing(job, INF)


CHANGES: dict[str, Callable[[Job], Any]] = {
    "growth_interval": lambda job: job.scaler.set_growth_interval(5),
    "load_state_dict": lambda job: job.scaler.load_state_dict(job.scaler.state_dict()),
    "deepcopy": lambda job: copy.deepcopy(job.scaler),
    "pickle": lambda job: pickle.loads(pickle.dumps(job.scaler)),
    "made anew": lambda job: cpu_scaler(),
}


def clips_otherwise(job: Job, what: str) -> None:
    other = {"max_norm": 2.0, "norm_type": 1.0, "shard_group_fn": lambda _: True}
    job.backward()
    job.scaler.unscale_(job.b)
    for optimizer in (job.a, job.b):
        odd = {what: other[what]} if job.odd else {}
        job.scaler.clip_grad_norm_(optimizer, **{"max_norm": 1.0, **odd})


def begins_otherwise(job: Job, what: str) -> None:
    limit, factor = (1 + job.odd * (what == each) for each in ("max_consecutive_skips", "scale"))
    job.scaler = cpu_scaler(1024.0 * factor, max_consecutive_skips=limit)
    tracker = {"_growth_tracker": 7 * job.odd * (what == "growth_tracker")}
    job.scaler.load_state_dict({**job.scaler.state_dict(), **tracker})
    leaves_out_nothing(job)


AGAIN = [
    "rank 0: update() called 1 time",
    "rank 1: update() called 0 times",
    "left out an update()",
    "load_state_dict",
]
BEGINS = {
    "max_consecutive_skips": "rank 1: max_consecutive_skips=2\n",
    "scale": "rank 1: loss scale 2048.0\n",
    "growth_tracker": "rank 1: growth_tracker=7\n",
}
# Seen at the next message.
NO_MESSAGE = (leaves_out_a_step, True)
DIFFERS: list[tuple[Callable[..., None], list[Any], list[str]]] = [
    (leaves_out_a_step, [False], ["rank 0: ", "rank 1: "]),
    (
        leaves_out_a_step,
        [True],
        ["differ in the order of calls", "rank 0: order ", "rank 1: order "],
    ),
    (makes_another_call, [], ["rank 0: step(), ", "rank 1: clip_grad_norm_()\n"]),
    (steps_in_another_order, [False], ["rank 0: SGD\n", "rank 1: Adam\n"]),
    (
        steps_in_another_order,
        [True],
        ["rank 0: optimizer 0 (SGD)\n", "rank 1: optimizer 1 (SGD)\n"],
    ),
    (clips_otherwise, ["max_norm"], ["rank 0: max_norm=1.0\n", "rank 1: max_norm=2.0\n"]),
    (clips_otherwise, ["norm_type"], ["rank 0: norm_type=2.0\n", "rank 1: norm_type=1.0\n"]),
    (
        clips_otherwise,
        ["shard_group_fn"],
        ["rank 0: no shard_group_fn=\n", "rank 1: shard_group_fn=...\n"],
    ),
    (is_changed, ["growth_interval"], ["rank 0: growth_interval=2000\n", "growth_interval=5\n"]),
    *((is_changed, [how], AGAIN) for how in list(CHANGES)[1:]),
    *((begins_otherwise, [what], [line]) for what, line in BEGINS.items()),
]


def _differ(what: Callable[..., None], *args: Any) -> Any:
    job = Job()
    return error_of(what, job, *args), job.first.item(), job.second.tolist()


@pytest.mark.parametrize(("what", "arguments", "said"), DIFFERS)
def test_ranks_that_differ_raise_on_every_rank_what_each_did(ranks2, what, arguments, said):
    first, second = ranks2.run(_differ, what, *arguments)
    if (what, *arguments) != NO_MESSAGE:
        assert first[1:] == second[1:], "nothing is stepped on one rank alone"
    for error, *_ in (first, second):
        assert error is not None
        assert error[0] == "RankMismatchError"
        assert [words for words in said if words not in error[1]] == [], error


@pytest.mark.parametrize("how", CHANGES)
def test_ranks_that_all_change_alike_go_on(ranks2, how):
    assert ranks2.run(_differ, is_changed, how, True) == [(None, 0.75, [1.0, 1.0])] * 2


# -- an error on one rank --------------------------------------------------------------------------


def _one_holds_float16(job: Job) -> None:
    parameter = leaf(1.0, dtype=torch.float16 if job.odd else torch.float32)
    parameter.grad = torch.ones_like(parameter)
    job.a.add_param_group({"params": [parameter]})
    job.scaler.unscale_(job.a)


ERRORS: dict[str, Callable[[Job], Any]] = {
    "FP16 gradients": _one_holds_float16,
    "KeyError": lambda job: job.scaler.clip_grad_norm_(
        job.a, 1.0, shard_group_fn=lambda _: {False: True}[job.odd]
    ),
    "not object": lambda job: job.scaler.step(object() if job.odd else job.a),
    "given twice": lambda job: job.scaler.step_all([job.a] * (1 + job.odd)),
    "losure": lambda job: job.scaler.step(job.a, *([lambda: 1.0] if job.odd else [])),
    "Closure": lambda job: job.scaler.step(job.a, **({"closure": lambda: 1.0} if job.odd else {})),
    "max_norm must be >= 0": lambda job: job.scaler.clip_grad_norm_(job.a, 1.0 - 2.0 * job.odd),
    "no optimizer that this scaler has": lambda job: job.scaler.clip_grad_norm_(
        [job.stranger if job.odd else job.first], 1.0
    ),
    "declared both": lambda job: job.scaler.clip_grad_norm_(
        job.a, 1.0, shard_group_fn=lambda _: job.odd, is_replicated_fn=lambda _: True
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("words", ERRORS)
def test_an_error_where_a_message_is_due_is_raised_on_every_rank(words):
    """Nothing is stepped, and all go on after ``update``."""
    job = Job()
    job.backward()
    name, text = error_of(ERRORS[words], job)
    assert words in f"{name} {text}"
    assert job.odd or "rank 1" in text
    assert job.first.item() == 0.75
    if words == "FP16 gradients":  # which would be unscaled twice
        assert error_of(job.scaler.step, job.a)[0] == "CallOrderError"
    if words != "no optimizer that this scaler has":  # no rank goes on after such a mistake
        job.scaler.update()
        job.a.param_groups[1:] = []
        leaves_out_nothing(job)
        assert job.first.item() == 0.5


# -- ranks that may differ -------------------------------------------------------------------------


@on_ranks(2)
def test_ranks_may_bring_an_optimizer_later_of_another_size_on_each():
    job = Job()
    other = leaf(*[1.0] * (3 if job.odd else 2))
    optimizer = torch.optim.SGD([other], lr=1.0)
    for chosen in ([job.a], [job.a, optimizer], [optimizer], [job.a, optimizer]):
        job.backward()
        other.grad = None
        backward(job.scaler, other, [0.25] * other.numel())
        job.scaler.step_all(chosen)
        job.scaler.update()
    assert (job.first.item(), set(other.tolist())) == (0.0, {0.25})


@on_ranks(2)
def test_a_rank_may_have_no_batch_in_the_first_iteration_after_a_restart():
    """As fairseq2 (#1346): it unscales before it has scaled a loss."""
    job = Job()
    state, job.scaler = job.scaler.state_dict(), cpu_scaler(4.0)
    job.scaler.load_state_dict(state)
    job.first.grad = None
    if not job.odd:
        job.backward()
    job.scaler.unscale_(job.a)
    job.scaler.step(job.a)
    job.scaler.update()
    assert (job.first.item(), job.scaler.get_scale()) == (0.75 if job.odd else 0.5, 1024.0)


# -- groups ----------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize(
    ("by", "kind"), [("scaler", "group"), ("scaler", "mesh"), ("guard", "group")]
)
def test_ranks_agree_over_a_group_and_its_first_one_names_who_overflowed(by, kind):
    """Overflow on rank 2, in the group of ranks 0 and 2; and none in that of ranks 1 and 3."""
    rank, grid = dist.get_rank(), mesh((2, 2, 1), ("part", "half", "one"))
    over = grid["part", "one"] if kind == "mesh" else grid["part"].get_group()
    (parameter, optimizer), scaler = sgd(), cpu_scaler(process_group=over)
    made: Any = scaler if by == "scaler" else StepGuard(over)
    with logged(f"distamp.{by}") as lines:
        iteration(made, optimizer, parameter, INF if rank == 2 else 0.25)
    assert len(lines) == (rank == 0)
    for line in lines:
        assert "Skipped step 1 of SGD (1 parameter)" in line
        assert "on rank 2" in line
        assert ("loss scale" in line) is (by == "scaler")
    assert made.step_was_taken(optimizer) is (rank in (1, 3))
    if rank in (0, 2):
        assert [each.rank for each in made.nonfinite_report().overflows] == [2]


@on_ranks(2)
def test_a_group_without_this_rank_is_refused_there():
    for given in (dist.new_group([0]), DeviceMesh("cpu", [0])):
        is_in = dist.get_rank() == 0
        with nullcontext() if is_in else pytest.raises(ValueError, match="does not contain"):
            DistGradScaler("cpu", process_group=given)


@on_ranks(2)
@pytest.mark.parametrize("how", ["pickled", "destroyed"])
def test_a_group_that_is_gone_is_asked_for(how):
    job = Job()
    group = job.scaler.process_group = dist.new_group([0, 1])
    if how == "pickled":
        job.scaler = pickle.loads(pickle.dumps(job.scaler))
    else:
        dist.destroy_process_group(group)
    name, text = error_of(leaves_out_nothing, job)
    assert (name, "scaler.process_group" in text) == ("CallOrderError", True)
    job.scaler.process_group = None
    leaves_out_nothing(job)
    assert job.first.item() == 0.5


# -- uneven inputs ---------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("overflow_at", [None, 1])
@pytest.mark.parametrize("batches", [(1, 3), (3, 1), (0, 2)])
@pytest.mark.parametrize("by", ["scaler", "guard"])
def test_join_of_model_and_scaler_trains_on_uneven_inputs(by, batches, overflow_at):
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler: Any = cpu_scaler() if by == "scaler" else StepGuard()

    def step(factor: float) -> float:
        optimizer.zero_grad()
        scaler.scale((model(torch.ones(1, 1)) * factor).sum()).backward()
        norm = scaler.clip_grad_norm_(optimizer, 100.0).item()
        scaler.step(optimizer)
        scaler.update()
        return norm

    with Join([model, scaler]):
        for number in range(batches[dist.get_rank()]):
            step(INF if number == overflow_at else 0.25)
    assert step(0.25) == scaler.grad_norm(optimizer) == 0.25
    # DDP divides by the ranks that there were at first: a batch of one rank moves by half.
    moved = [0.25 if n < min(batches) else 0.125 for n in range(max(batches)) if n != overflow_at]
    assert model.module.weight.item() == 1.0 - sum(moved) - 0.25
    if by == "scaler":
        assert scaler.get_scale() == (1024.0 if overflow_at is None else 512.0)


@on_ranks(2)
@pytest.mark.parametrize("batches", [(1, 3), (3, 1), (0, 1)])
def test_join_raises_at_its_end_where_optimizer_state_differs(batches):
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard, rank = StepGuard(), dist.get_rank()

    def step() -> list[float]:
        optimizer.zero_grad()
        model(torch.full((1, 4), 1.0 + rank)).sum().backward()
        guard.step(optimizer)
        guard.update()
        return model.module.weight.flatten().tolist()

    last = batches.index(max(batches))

    def epoch() -> None:
        with Join([model, guard]):
            for _ in range(batches[rank]):
                step()

    with pytest.raises(CallOrderError, match=f"Rank {last} of the group has the state to keep"):
        epoch()
    states: list[Any] = [optimizer.state_dict() if rank == last else None]
    dist.broadcast_object_list(states, last)
    optimizer.load_state_dict(states[0])
    weights: list[Any] = [None, None]
    dist.all_gather_object(weights, step())
    assert weights[0] == weights[1]


@on_ranks(2)
def test_join_accepts_optimizer_state_where_all_ranks_have_as_many_batches():
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = StepGuard()
    with Join([model, guard]):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            guard.step(optimizer)
            guard.update()
    assert guard.step_counts(optimizer).taken == 2


@on_ranks(2)
@pytest.mark.parametrize("split", [False, True])
def test_join_refuses_masters_before_the_first_batch(split):
    model = DistributedDataParallel(nn.Linear(4, 2).to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    _masters = MasterParameters(optimizer, split=split)
    guard = StepGuard()
    guard.register_optimizers(optimizer)
    with pytest.raises(CallOrderError, match="has masters"), Join([model, guard]):
        raise AssertionError("Join was entered")
