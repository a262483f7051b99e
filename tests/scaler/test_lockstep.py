"""Calls that differ between ranks raise on every rank; values that differ raise on none.

Each case runs on two ranks, and rank 1 deviates; groups of some ranks run on four.
`test_random_programs` draws programs of such events in every order. `test_lost_ranks` has ranks
without memory, ranks that die and links that are cut.
"""

import copy
import pickle
from collections.abc import Callable
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
    """Two optimizers under one scaler, after one whole iteration of the first optimizer.

    Attributes:
        deviates: Whether this is rank 1.
        param: The parameter of `sgd`, which is 0.75 now, because its gradients are 0.25.
        pair: The parameter of `adam`, which is [1.0, 1.0].
    """

    def __init__(self) -> None:
        self.deviates = dist.get_rank() == 1
        self.param, self.sgd = sgd()
        self.pair = leaf(1.0, 1.0)
        self.adam = torch.optim.Adam([self.pair], lr=0.5)
        self.scaler = cpu_scaler()
        self.iterate()

    def backward(self) -> None:
        for param in (self.param, self.pair):
            param.grad = None
            gradient = [0.25] * param.numel()
            backward(self.scaler, param, gradient)

    def iterate(self, gradient: float = 0.25) -> None:
        """Make a whole iteration of `sgd`."""
        iteration(self.scaler, self.sgd, self.param, gradient)


def assert_mismatch(error: tuple[str, str] | None, *lines: str) -> None:
    """Assert that this rank raised a RankMismatchError with these words."""
    assert error is not None, "nothing was raised"
    name, text = error
    assert name == "RankMismatchError", text
    for line in lines:
        assert line in text


def assert_equal_on_all_ranks(job: Job) -> None:
    """Assert that no optimizer stepped on one rank alone. Every rank must call this."""
    values: list[Any] = [None, None]
    dist.all_gather_object(values, (job.param.tolist(), job.pair.tolist()))
    assert values[0] == values[1]


# -- calls that differ -----------------------------------------------------------------------------


@on_ranks(2)
def test_a_step_that_one_rank_leaves_out_raises_on_both():
    job = Job()

    def two_iterations() -> None:
        for _ in range(2):
            job.backward()
            job.scaler.step(job.adam)
            if not job.deviates:
                job.scaler.step(job.sgd)
            job.scaler.update()

    assert_mismatch(error_of(two_iterations), "rank 0: ", "rank 1: ")
    assert_equal_on_all_ranks(job)


@on_ranks(2)
def test_a_step_that_one_rank_leaves_out_after_unscale_raises_at_the_next_message():
    """Such a step sends no message, so it is taken on rank 0 alone before both ranks raise."""
    job = Job()

    def two_iterations() -> None:
        for _ in range(2):
            job.backward()
            job.scaler.unscale_(job.sgd)
            if not job.deviates:
                job.scaler.step(job.sgd)
            job.scaler.update()

    lines = ["differ in the order of calls", "rank 0: order ", "rank 1: order "]
    assert_mismatch(error_of(two_iterations), *lines)


@on_ranks(2)
def test_a_clip_on_one_rank_and_a_step_on_the_other_raise_on_both():
    job = Job()
    job.backward()
    if job.deviates:
        error = error_of(job.scaler.clip_grad_norm_, job.sgd, 1.0)
    else:
        error = error_of(job.scaler.step, job.sgd)
    assert_mismatch(error, "rank 0: step(), ", "rank 1: clip_grad_norm_()\n")
    assert_equal_on_all_ranks(job)


@on_ranks(2)
def test_clips_of_different_optimizers_after_unscale_raise_on_both_ranks():
    """Their norms are finite and replicas were found equal, so only the names show the mistake."""
    job = Job()
    job.backward()
    job.scaler.clip_grad_norm_(job.adam, 1.0)
    job.scaler.step(job.adam)
    job.scaler.update()
    job.backward()
    job.scaler.unscale_(job.sgd)
    job.scaler.unscale_(job.adam)
    clipped = job.sgd if job.deviates else job.adam
    error = error_of(job.scaler.clip_grad_norm_, clipped, 1.0)
    assert_mismatch(error, "rank 0: Adam\n", "rank 1: SGD\n")
    assert_equal_on_all_ranks(job)


@on_ranks(2)
def test_optimizers_of_two_classes_in_another_order_raise_on_both_ranks():
    job = Job()

    def step_both() -> None:
        job.backward()
        order = [job.adam, job.sgd] if job.deviates else [job.sgd, job.adam]
        for optimizer in order:
            job.scaler.step(optimizer)
        job.scaler.update()

    assert_mismatch(error_of(step_both), "rank 0: SGD\n", "rank 1: Adam\n")
    assert_equal_on_all_ranks(job)


@on_ranks(2)
def test_optimizers_of_one_class_in_another_order_raise_on_both_ranks():
    """The order of the first iteration shows which optimizer is which."""
    job = Job()
    twin_param, twin = sgd()

    def step_in(order: list[torch.optim.Optimizer]) -> None:
        job.backward()
        backward(job.scaler, twin_param, [0.25])
        for optimizer in order:
            job.scaler.step(optimizer)
        job.scaler.update()

    step_in([job.sgd, twin])
    error = error_of(step_in, [twin, job.sgd] if job.deviates else [job.sgd, twin])
    assert_mismatch(error, "rank 0: optimizer 0 (SGD)\n", "rank 1: optimizer 1 (SGD)\n")
    assert_equal_on_all_ranks(job)


# -- arguments and settings that differ ------------------------------------------------------------


def clip_both_optimizers(job: Job, **deviation: Any) -> None:
    """Clip to 1.0; rank 1 has other arguments."""
    job.backward()
    job.scaler.unscale_(job.adam)
    arguments = {"max_norm": 1.0}
    if job.deviates:
        arguments |= deviation
    for optimizer in (job.sgd, job.adam):
        job.scaler.clip_grad_norm_(optimizer, **arguments)


@on_ranks(2)
def test_clips_to_different_norms_raise_on_both_ranks():
    job = Job()
    error = error_of(clip_both_optimizers, job, max_norm=2.0)
    assert_mismatch(error, "rank 0: max_norm=1.0\n", "rank 1: max_norm=2.0\n")
    assert_equal_on_all_ranks(job)


@on_ranks(2)
def test_clips_by_different_types_of_norm_raise_on_both_ranks():
    job = Job()
    error = error_of(clip_both_optimizers, job, norm_type=1.0)
    assert_mismatch(error, "rank 0: norm_type=2.0\n", "rank 1: norm_type=1.0\n")
    assert_equal_on_all_ranks(job)


@on_ranks(2)
def test_clips_of_which_one_declares_shards_raise_on_both_ranks():
    job = Job()
    error = error_of(clip_both_optimizers, job, shard_group_fn=lambda param: True)
    assert_mismatch(error, "rank 0: no shard_group_fn=\n", "rank 1: shard_group_fn=...\n")
    assert_equal_on_all_ranks(job)


@on_ranks(2)
def test_scalers_with_different_limits_of_skips_raise_on_both_ranks():
    job = Job()
    job.scaler = cpu_scaler(max_consecutive_skips=2 if job.deviates else 1)
    assert_mismatch(error_of(job.iterate), "rank 1: max_consecutive_skips=2\n")
    assert_equal_on_all_ranks(job)


@on_ranks(2)
def test_scalers_with_different_scales_raise_on_both_ranks():
    job = Job()
    job.scaler = cpu_scaler(2048.0 if job.deviates else 1024.0)
    assert_mismatch(error_of(job.iterate), "rank 1: loss scale 2048.0\n")
    assert_equal_on_all_ranks(job)


@on_ranks(2)
def test_scalers_with_different_growth_trackers_raise_on_both_ranks():
    job = Job()
    tracker = 7 if job.deviates else 0
    state = {**job.scaler.state_dict(), "_growth_tracker": tracker}
    job.scaler = cpu_scaler()
    job.scaler.load_state_dict(state)
    assert_mismatch(error_of(job.iterate), "rank 1: growth_tracker=7\n")
    assert_equal_on_all_ranks(job)


# -- a scaler that is changed in the middle of a run -----------------------------------------------


def set_growth_interval(scaler: DistGradScaler) -> DistGradScaler:
    scaler.set_growth_interval(5)
    return scaler


def reload_state(scaler: DistGradScaler) -> DistGradScaler:
    scaler.load_state_dict(scaler.state_dict())
    return scaler


def unpickle(scaler: DistGradScaler) -> DistGradScaler:
    return pickle.loads(pickle.dumps(scaler))


def make_another(scaler: DistGradScaler) -> DistGradScaler:
    return cpu_scaler()


# Every change leaves a scaler that has counted no iteration.
RESTARTS = [
    pytest.param(reload_state, id="loaded state"),
    pytest.param(copy.deepcopy, id="copied"),
    pytest.param(unpickle, id="unpickled"),
    pytest.param(make_another, id="made again"),
]
CHANGES = [pytest.param(set_growth_interval, id="growth interval"), *RESTARTS]


@on_ranks(2)
def test_another_growth_interval_on_one_rank_raises_on_both():
    job = Job()
    if job.deviates:
        set_growth_interval(job.scaler)
    error = error_of(job.iterate, INF)
    assert_mismatch(error, "rank 0: growth_interval=2000\n", "growth_interval=5\n")
    assert_equal_on_all_ranks(job)


@on_ranks(2)
@pytest.mark.parametrize("restart", RESTARTS)
def test_a_scaler_that_starts_again_on_one_rank_raises_on_both(restart):
    job = Job()
    if job.deviates:
        job.scaler = restart(job.scaler)
    counts = ["rank 0: update() called 1 time", "rank 1: update() called 0 times"]
    advice = ["left out an update()", "load_state_dict"]
    assert_mismatch(error_of(job.iterate, INF), *counts, *advice)
    assert_equal_on_all_ranks(job)


@on_ranks(2)
@pytest.mark.parametrize("change", CHANGES)
def test_ranks_that_all_make_the_same_change_go_on(change):
    job = Job()
    job.scaler = change(job.scaler)
    job.iterate(INF)
    assert job.param.item() == 0.75
    assert job.pair.tolist() == [1.0, 1.0]


# -- an error on one rank --------------------------------------------------------------------------


def add_float16_gradient(job: Job) -> None:
    """Give `sgd` a second parameter, which is float16 on rank 1, and unscale."""
    param = leaf(1.0, dtype=torch.float16 if job.deviates else torch.float32)
    param.grad = torch.ones_like(param)
    job.sgd.add_param_group({"params": [param]})
    job.scaler.unscale_(job.sgd)


def clip_with_a_declaration_that_fails(job: Job) -> None:
    def declare(param: torch.Tensor) -> bool:
        if job.deviates:
            raise KeyError(param)
        return True

    job.scaler.clip_grad_norm_(job.sgd, 1.0, shard_group_fn=declare)


def clip_with_two_declarations(job: Job) -> None:
    def is_shard(param: torch.Tensor) -> bool:
        return job.deviates

    def is_replica(param: torch.Tensor) -> bool:
        return True

    job.scaler.clip_grad_norm_(job.sgd, 1.0, shard_group_fn=is_shard, is_replicated_fn=is_replica)


def clip_to_a_negative_norm(job: Job) -> None:
    job.scaler.clip_grad_norm_(job.sgd, -1.0 if job.deviates else 1.0)


def step_an_object(job: Job) -> None:
    job.scaler.step(object() if job.deviates else job.sgd)


def step_an_optimizer_twice(job: Job) -> None:
    job.scaler.step_all([job.sgd, job.sgd] if job.deviates else [job.sgd])


def loss_of_a_closure() -> float:
    return 1.0


def step_with_a_closure(job: Job) -> None:
    if job.deviates:
        job.scaler.step(job.sgd, loss_of_a_closure)
    else:
        job.scaler.step(job.sgd)


def step_with_a_closure_by_keyword(job: Job) -> None:
    if job.deviates:
        job.scaler.step(job.sgd, closure=loss_of_a_closure)
    else:
        job.scaler.step(job.sgd)


MISTAKES = [
    pytest.param(clip_with_a_declaration_that_fails, "KeyError", id="declaration fails"),
    pytest.param(clip_with_two_declarations, "declared both", id="two declarations"),
    pytest.param(clip_to_a_negative_norm, "max_norm must be >= 0", id="negative norm"),
    pytest.param(step_an_object, "not object", id="no optimizer"),
    pytest.param(step_an_optimizer_twice, "given twice", id="optimizer twice"),
    pytest.param(step_with_a_closure, "losure", id="closure"),
    pytest.param(step_with_a_closure_by_keyword, "Closure", id="closure by keyword"),
]


def assert_raised_on_every_rank(job: Job, mistake: Callable[[Job], None], words: str) -> None:
    """Assert that both ranks raise the error of rank 1, and that nothing is stepped."""
    job.backward()
    error = error_of(mistake, job)
    assert error is not None
    name, text = error
    assert words in f"{name} {text}"
    if not job.deviates:
        assert "rank 1" in text
    assert job.param.item() == 0.75


@on_ranks(2)
@pytest.mark.parametrize(("mistake", "words"), MISTAKES)
def test_a_mistake_of_one_rank_raises_on_every_rank_and_all_go_on_after_update(mistake, words):
    job = Job()
    assert_raised_on_every_rank(job, mistake, words)
    job.scaler.update()
    job.iterate()
    assert job.param.item() == 0.5


@on_ranks(2)
def test_gradients_that_one_rank_refuses_to_unscale_cannot_be_stepped():
    """A second try would divide the gradients of rank 0 twice."""
    job = Job()
    assert_raised_on_every_rank(job, add_float16_gradient, "FP16 gradients")
    name, _ = error_of(job.scaler.step, job.sgd)
    assert name == "CallOrderError"
    job.scaler.update()
    job.sgd.param_groups[1:] = []
    job.iterate()
    assert job.param.item() == 0.5


@on_ranks(2)
def test_a_clip_of_a_parameter_without_optimizer_raises_on_every_rank():
    job = Job()
    stranger = leaf(1.0)
    stranger.grad = torch.ones(1)

    def clip_a_stranger(job: Job) -> None:
        job.scaler.clip_grad_norm_([stranger if job.deviates else job.param], 1.0)

    words = "no optimizer that this scaler has"
    assert_raised_on_every_rank(job, clip_a_stranger, words)


# -- ranks that may differ -------------------------------------------------------------------------


@on_ranks(2)
def test_an_optimizer_that_comes_later_may_have_another_size_on_each_rank():
    job = Job()
    size = 3 if job.deviates else 2
    late_param = leaf(*[1.0] * size)
    late = torch.optim.SGD([late_param], lr=1.0)
    for stepped in ([job.sgd], [job.sgd, late], [late], [job.sgd, late]):
        job.backward()
        late_param.grad = None
        backward(job.scaler, late_param, [0.25] * size)
        job.scaler.step_all(stepped)
        job.scaler.update()
    assert job.param.item() == 0.0
    assert late_param.tolist() == [0.25] * size


@on_ranks(2)
def test_a_rank_may_have_no_batch_in_the_first_iteration_after_a_restart():
    """fairseq2 (#1346) does this: a rank unscales before it has scaled a loss."""
    job = Job()
    state = job.scaler.state_dict()
    job.scaler = cpu_scaler(4.0)
    job.scaler.load_state_dict(state)
    job.param.grad = None
    if not job.deviates:
        job.backward()
    job.scaler.unscale_(job.sgd)
    job.scaler.step(job.sgd)
    job.scaler.update()
    assert job.param.item() == (0.75 if job.deviates else 0.5)
    assert job.scaler.get_scale() == 1024.0


# -- groups ----------------------------------------------------------------------------------------


def group_of_even_or_odd_ranks(kind: str) -> Any:
    """Return the group of ranks 0 and 2, or of ranks 1 and 3; or a mesh of these ranks."""
    grid = mesh((2, 2, 1), ("part", "half", "one"))
    return grid["part", "one"] if kind == "mesh" else grid["part"].get_group()


@on_ranks(4)
@pytest.mark.parametrize(
    ("owner", "kind"), [("scaler", "group"), ("scaler", "mesh"), ("guard", "group")]
)
def test_ranks_agree_over_a_group_and_its_first_rank_names_the_rank_that_overflowed(owner, kind):
    """Rank 2 overflows, in the group of ranks 0 and 2. Ranks 1 and 3 step."""
    rank = dist.get_rank()
    group = group_of_even_or_odd_ranks(kind)
    param, optimizer = sgd()
    guard: Any = StepGuard(group) if owner == "guard" else cpu_scaler(process_group=group)
    with logged(f"distamp.{owner}") as lines:
        iteration(guard, optimizer, param, INF if rank == 2 else 0.25)
    if rank == 0:
        (line,) = lines
        assert "Skipped step 1 of SGD (1 parameter)" in line
        assert "on rank 2" in line
        assert ("loss scale" in line) is (owner == "scaler")
    else:
        assert lines == []
    is_even = rank in (0, 2)
    assert guard.step_was_taken(optimizer) is not is_even
    if is_even:
        report = guard.nonfinite_report()
        assert [overflow.rank for overflow in report.overflows] == [2]


@on_ranks(2)
@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_a_group_without_this_rank_is_refused_there(kind):
    group = dist.new_group([0]) if kind == "group" else DeviceMesh("cpu", [0])
    if dist.get_rank() == 0:
        DistGradScaler("cpu", process_group=group)
    else:
        with pytest.raises(ValueError, match="does not contain"):
            DistGradScaler("cpu", process_group=group)


@on_ranks(2)
@pytest.mark.parametrize("loss", ["pickled", "destroyed"])
def test_a_group_that_is_lost_must_be_set_again(loss):
    job = Job()
    group = dist.new_group([0, 1])
    job.scaler.process_group = group
    if loss == "pickled":
        job.scaler = unpickle(job.scaler)
    else:
        dist.destroy_process_group(group)
    name, text = error_of(job.iterate)
    assert name == "CallOrderError"
    assert "scaler.process_group" in text
    job.scaler.process_group = None
    job.iterate()
    assert job.param.item() == 0.5


# -- uneven inputs ---------------------------------------------------------------------------------


class UnevenRun:
    """A model in DDP with one weight of 1.0, which every step of gradient 0.25 lowers."""

    def __init__(self, owner: str) -> None:
        self.model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        nn.init.ones_(self.model.module.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.guard: Any = cpu_scaler() if owner == "scaler" else StepGuard()

    def step(self, factor: float = 0.25) -> float:
        """Make an iteration; return the norm of the gradients."""
        self.optimizer.zero_grad()
        loss = (self.model(torch.ones(1, 1)) * factor).sum()
        self.guard.scale(loss).backward()
        norm = self.guard.clip_grad_norm_(self.optimizer, 100.0).item()
        self.guard.step(self.optimizer)
        self.guard.update()
        return norm

    def train(self, batches: int, overflow_at: int | None = None) -> None:
        """Make the iterations of this rank within Join, and one more of all ranks."""
        with Join([self.model, self.guard]):
            for number in range(batches):
                self.step(INF if number == overflow_at else 0.25)
        assert self.step() == 0.25
        assert self.guard.grad_norm(self.optimizer) == 0.25

    @property
    def weight(self) -> float:
        return self.model.module.weight.item()


# The batches of both ranks, and the weight at the end. DDP divides by two even if only one rank
# has a batch, so that a step of one rank is 0.125. Both ranks make the iteration after Join.
WITHOUT_OVERFLOW = [
    pytest.param((1, 3), 1.0 - 0.25 - 0.125 - 0.125 - 0.25, id="rank 1 has more"),
    pytest.param((3, 1), 1.0 - 0.25 - 0.125 - 0.125 - 0.25, id="rank 0 has more"),
    pytest.param((0, 2), 1.0 - 0.125 - 0.125 - 0.25, id="rank 0 has none"),
]
# The second iteration of a rank overflows.
WITH_OVERFLOW = [
    pytest.param((1, 3), 1.0 - 0.25 - 0.125 - 0.25, id="rank 1 has more"),
    pytest.param((3, 1), 1.0 - 0.25 - 0.125 - 0.25, id="rank 0 has more"),
    pytest.param((0, 2), 1.0 - 0.125 - 0.25, id="rank 0 has none"),
]


@on_ranks(2)
@pytest.mark.parametrize(("batches", "weight"), WITHOUT_OVERFLOW)
@pytest.mark.parametrize("owner", ["scaler", "guard"])
def test_join_of_model_and_scaler_trains_on_uneven_inputs(owner, batches, weight):
    run = UnevenRun(owner)
    run.train(batches[dist.get_rank()])
    assert run.weight == weight
    if owner == "scaler":
        assert run.guard.get_scale() == 1024.0


@on_ranks(2)
@pytest.mark.parametrize(("batches", "weight"), WITH_OVERFLOW)
@pytest.mark.parametrize("owner", ["scaler", "guard"])
def test_join_skips_an_overflow_of_the_rank_with_more_inputs(owner, batches, weight):
    run = UnevenRun(owner)
    run.train(batches[dist.get_rank()], overflow_at=1)
    assert run.weight == weight
    if owner == "scaler":
        assert run.guard.get_scale() == 512.0


class AdamRun:
    """A model in DDP with AdamW, which has state."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.guard = StepGuard()

    def step(self) -> None:
        self.optimizer.zero_grad()
        inputs = torch.full((1, 4), 1.0 + dist.get_rank())
        self.model(inputs).sum().backward()
        self.guard.step(self.optimizer)
        self.guard.update()

    def epoch(self, batches: int) -> None:
        with Join([self.model, self.guard]):
            for _ in range(batches):
                self.step()


@on_ranks(2)
@pytest.mark.parametrize(("batches", "last_rank"), [((1, 3), 1), ((3, 1), 0), ((0, 1), 1)], ids=str)
def test_join_raises_at_its_end_if_optimizer_state_differs(batches, last_rank):
    """The state of the last rank with a batch makes the ranks equal again."""
    run = AdamRun()
    rank = dist.get_rank()
    text = f"Rank {last_rank} of the group has the state to keep"
    with pytest.raises(CallOrderError, match=text):
        run.epoch(batches[rank])
    states: list[Any] = [run.optimizer.state_dict() if rank == last_rank else None]
    dist.broadcast_object_list(states, last_rank)
    run.optimizer.load_state_dict(states[0])
    run.step()
    weights: list[Any] = [None, None]
    dist.all_gather_object(weights, run.model.module.weight.tolist())
    assert weights[0] == weights[1]


@on_ranks(2)
def test_join_accepts_optimizer_state_if_all_ranks_have_as_many_batches():
    run = AdamRun()
    run.epoch(batches=2)
    assert run.guard.step_counts(run.optimizer).taken == 2


@on_ranks(2)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_join_refuses_masters_before_the_first_batch(split):
    model = DistributedDataParallel(nn.Linear(4, 2).to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    _masters = MasterParameters(optimizer, split=split)
    guard = StepGuard()
    guard.register_optimizers(optimizer)
    with pytest.raises(CallOrderError, match="has masters"), Join([model, guard]):
        raise AssertionError("Join was entered")
