"""`Snapshots`: all ranks go back to a state in host memory, and go on with the same bits."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp import DistGradScaler, StepGuard
from distamp.errors import (
    CallOrderError,
    ConfigError,
    NonFiniteWeightsError,
    RankMismatchError,
)
from distamp.grads import to_local
from distamp.guard import Snapshots
from distamp.guard.snapshot_state import HostCopies
from tests.guard.snapshot_runs import Iteration, Program, differences, drawn
from tests.on_ranks import on_devices, on_ranks
from tests.place import rank_device
from tests.quick_cases import quick_cases
from tests.ranks import logged
from tests.scaler.steps import INF, cpu_scaler, iteration, sgd

NAN = float("nan")
FIRST = tuple(Iteration(number) for number in range(4))
SECOND = (Iteration(4, bad_rank=0), Iteration(5), Iteration(6, microbatches=2))
#: Two rewinds: after NaN in a weight, and after batches with a skip before them.
PARTS = ((FIRST, "bad weight"), (SECOND, "batches"))


# -- bit-identical runs ----------------------------------------------------------------------------


PROGRAMS = {
    **{
        layout: Program(layout, parts=PARTS)
        for layout in ("plain", "DDP", "FSDP1", "FSDP2", "FSDP2 offload", "HSDP")
    },
    "TP": Program("TP", "AdamW amsgrad", parts=PARTS),
    "FSDP2 x TP": Program("FSDP2 x TP", "SGD momentum", parts=PARTS),
    "ZeRO": Program("ZeRO", parts=PARTS),
    "ZeRO fused": Program("ZeRO", "AdamW fused", "fp16", parts=PARTS),
    "DDP fp16": Program("DDP", "AdamW fused", "fp16", parts=PARTS),
    "fp16-O2": Program("DDP", "AdamW foreach", "fp16-O2", parts=PARTS),
    "bf16-O2": Program("DDP", "AdamW fused", "bf16-O2", parts=PARTS),
    "bf16-O2 split": Program("DDP", "AdamW foreach", "bf16-O2 split", parts=PARTS),
    "bf16-O2 FSDP2": Program("FSDP2", "AdamW fused", "bf16-O2", parts=PARTS),
    "bf16-O2 split TP": Program("TP", "AdamW amsgrad", "bf16-O2 split", parts=PARTS),
    "int8 hook": Program("DDP", "SGD momentum", "fp16", hook="int8", parts=PARTS),
    "int8 hook of FSDP2": Program("FSDP2", "SGD momentum", "bf16", hook="int8", parts=PARTS),
    "two optimizers": Program("DDP", "SGD fused", "fp16", two=True, parts=PARTS),
    "frozen layer": Program("FSDP2", frozen=True, parts=PARTS),
    "norm": Program("FSDP2", "AdamW fused", "fp16", max_norm=0.5, parts=PARTS),
    "state that came later": Program("DDP", records_start=True, every=50, parts=PARTS),
    "gradients that FSDP2 has not reduced": Program("FSDP2", parts=((FIRST, "open backward"),)),
    "unscaled gradients": Program("DDP", "SGD momentum", "fp16", parts=((FIRST, "clip"),)),
    "failed step": Program(
        "DDP", "AdamW foreach", "bf16-O2 split", parts=((FIRST, "failed step"),)
    ),
    "gathered weights": Program("FSDP2", parts=((FIRST, "evaluation"),)),
    "gathered flat weights": Program("FSDP1", parts=((FIRST, "evaluation"),)),
    "bad state": Program("DDP", parts=((FIRST, "bad state"),)),
    "another learning rate": Program("DDP", parts=((FIRST, "other rate"),)),
    "written buffer": Program("DDP", parts=((FIRST, "new buffer values"),)),
}


# The others are similar to one of these, or take seconds.
QUICK_PROGRAMS = [
    "plain",
    "DDP",
    "two optimizers",
    "state that came later",
    "unscaled gradients",
    "failed step",
    "bad state",
    "another learning rate",
    "written buffer",
]


@pytest.mark.parametrize("name", quick_cases(PROGRAMS, QUICK_PROGRAMS))
def test_a_run_that_went_back_is_bit_identical(ranks, name):
    """To a run without snapshots that makes the same iterations from the start."""
    program = PROGRAMS[name]
    assert ranks(program.world).run(differences, program) == [[]] * program.world


@pytest.mark.slow
def test_random_programs_are_bit_identical(ranks):
    """``pytest -m slow tests/guard/test_snapshots.py``: layouts x optimizers x levels x detours."""
    seed = time.time_ns()
    wrong: list[str] = []
    number = runs = 0
    while runs < 300:
        program = drawn(random.Random(f"{seed} {number}"))
        number += 1
        answers = ranks(program.world).run(differences, program)
        if answers[0] and answers[0][0].startswith("refused"):
            continue
        runs += 1
        if any(answers):
            wrong.append(f"{program}: {answers[0][:5]}")
    assert wrong == [], f"seed {seed}"


# -- one process -----------------------------------------------------------------------------------


def trained(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer, StepGuard]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)).to(rank_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, optimizer, StepGuard(named_parameters=model.named_parameters())


def train(model: nn.Module, optimizer: Any, guard: Any, batch: int = 0) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(batch)
    model(torch.randn(4, 8, generator=generator).to(rank_device())).square().mean().backward()
    guard.step(optimizer)
    guard.update()


def weights(model: nn.Module) -> list[Tensor]:
    return [to_local(param.detach()).clone() for param in model.parameters()]


def equal(tensors: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, tensors, expected))


@torch.no_grad()
def spoil(param: Tensor) -> None:
    to_local(param).view(-1)[0] = NAN


def test_rewind_returns_the_iterations_since_the_newest_snapshot():
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard, every=3)
    for batch in range(6):
        train(model, optimizer, guard, batch)
        snapshots.record()
    # Snapshots are taken in the 1st and the 4th call.
    assert snapshots.rewind() == 2
    assert snapshots.rewind() == 0


def test_the_iteration_under_way_is_not_counted():
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard)
    train(model, optimizer, guard)
    snapshots.record()
    model(torch.ones(4, 8)).sum().backward()
    guard.step(optimizer)
    assert snapshots.rewind() == 0
    assert guard.step_counts(optimizer).taken == 1


def test_it_works_inside_of_an_except_around_the_step():
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard)
    train(model, optimizer, guard)
    snapshots.record()
    expected = weights(model)
    train(model, optimizer, guard, 1)
    snapshots.record()
    spoil(model[0].weight)
    try:
        train(model, optimizer, guard, 2)
    except NonFiniteWeightsError:
        assert snapshots.rewind() == 1
    assert equal(weights(model), expected)
    train(model, optimizer, guard, 3)
    assert guard.step_counts(optimizer) == distamp.guard.StepCounts(2, 0)


def test_keep_snapshots_stay_and_older_passes_over_the_newest():
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard, every=1, keep=3)
    states = []
    for batch in range(5):
        train(model, optimizer, guard, batch)
        snapshots.record()
        states.append(weights(model))
    assert repr(snapshots) == "<Snapshots of iterations [3, 4, 5], now 5>"
    assert snapshots.rewind(older=2) == 2
    assert equal(weights(model), states[2])
    assert repr(snapshots) == "<Snapshots of iterations [3], now 3>"
    with pytest.raises(CallOrderError, match=r"rewind\(older=1\) was called, and there is 1 snap"):
        snapshots.rewind(older=1)


def test_a_single_snapshot_is_overwritten():
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard, every=1, keep=1)
    for batch in range(3):
        train(model, optimizer, guard, batch)
        snapshots.record()
    expected = weights(model)
    train(model, optimizer, guard, 3)
    assert snapshots.rewind() == 0
    assert equal(weights(model), expected)


def test_memory_of_the_oldest_snapshot_is_used_again():
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard, every=1)
    for batch in range(3):
        train(model, optimizer, guard, batch)
        snapshots.record()
    with mock.patch("distamp.guard.snapshot_state._SavedTensor.allocate") as allocate:
        train(model, optimizer, guard, 3)
        snapshots.record()
    assert allocate.call_count == 0


def test_tensors_are_written_in_place():
    model, optimizer, guard = trained()
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.1)
    snapshots = Snapshots(model, optimizer, guard)
    train(model, optimizer, guard)
    snapshots.record()
    live = [*model.parameters(), rate]
    for state in optimizer.state.values():
        live += state.values()
    addresses = [tensor.data_ptr() for tensor in live]
    train(model, optimizer, guard, 1)
    rate.fill_(7.0)
    snapshots.rewind()
    now = [*model.parameters(), optimizer.param_groups[0]["lr"]]
    for state in optimizer.state.values():
        now += state.values()
    assert [tensor.data_ptr() for tensor in now] == addresses
    assert all(tensor is restored for tensor, restored in zip(live, now, strict=True))
    assert rate.item() == pytest.approx(0.1)


def test_state_of_the_optimizer_that_came_later_is_deleted():
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard)
    snapshots.record()
    train(model, optimizer, guard)
    optimizer.param_groups[0]["later"] = 1
    assert len(optimizer.state) == 4
    snapshots.rewind()
    assert len(optimizer.state) == 0
    assert "later" not in optimizer.param_groups[0]
    assert guard.step_counts(optimizer) == distamp.guard.StepCounts(0, 0)


def test_gradients_are_cleared():
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard)
    train(model, optimizer, guard)
    snapshots.record()
    model(torch.ones(4, 8)).sum().backward()
    snapshots.rewind()
    assert all(param.grad is None for param in model.parameters())


def test_a_buffer_that_grew_is_replaced_and_a_new_one_stays():
    model, optimizer, guard = trained()
    model.register_buffer("queue", torch.zeros(2))
    model.register_buffer("unset", None)
    snapshots = Snapshots(model, optimizer, guard)
    snapshots.record()
    model.queue = torch.ones(5)
    model.unset = torch.ones(1)
    model.register_buffer("cache", torch.ones(3))
    snapshots.rewind()
    assert torch.equal(model.queue, torch.zeros(2))
    assert model.unset is None
    assert torch.equal(model.cache, torch.ones(3))


class Average:
    """A teacher that takes over the very tensors of a state, as many do."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"mean": torch.zeros(2), "counts": [0]}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def add(self) -> None:
        self.state["mean"].add_(1.0)
        self.state["counts"][0] += 1


def test_a_state_of_extra_is_copied_when_it_is_saved_and_when_it_is_loaded():
    model, optimizer, guard = trained()
    average = Average()
    snapshots = Snapshots(model, optimizer, guard, extra=(average,))
    snapshots.record()
    for _ in range(2):
        average.add()
        snapshots.rewind()
        assert torch.equal(average.state["mean"], torch.zeros(2))
        assert average.state["counts"] == [0]


def test_an_object_in_a_state_of_extra_is_copied():
    model, optimizer, guard = trained()
    average = Average()
    average.state["names"] = {"first"}
    snapshots = Snapshots(model, optimizer, guard, extra=(average,))
    snapshots.record()
    average.state["names"].add("second")
    snapshots.rewind()
    assert average.state["names"] == {"first"}


def test_a_generator_of_extra_goes_back():
    model, optimizer, guard = trained()
    generator = torch.Generator().manual_seed(3)
    snapshots = Snapshots(model, optimizer, guard, extra=(generator,))
    snapshots.record()
    first = torch.rand(3, generator=generator)
    snapshots.rewind()
    assert torch.equal(torch.rand(3, generator=generator), first)


def test_a_schedule_goes_back_with_its_learning_rate():
    model, optimizer, guard = trained(lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20)
    snapshots = Snapshots(model, optimizer, guard, extra=(schedule,))
    train(model, optimizer, guard)
    schedule.step()
    snapshots.record()
    rate, count = optimizer.param_groups[0]["lr"], schedule.last_epoch
    train(model, optimizer, guard, 1)
    schedule.step()
    snapshots.rewind()
    assert (optimizer.param_groups[0]["lr"], schedule.last_epoch) == (rate, count)


def test_the_loss_scale_goes_back_in_the_same_tensor():
    parameter, optimizer = sgd()
    scaler = cpu_scaler(8.0)
    snapshots = Snapshots(nn.ParameterList([parameter]), optimizer, scaler)
    iteration(scaler, optimizer, parameter, 1.0)
    snapshots.record()
    tensor = scaler._scale
    for _ in range(2):
        iteration(scaler, optimizer, parameter, INF)
        snapshots.record()
    scaler.set_growth_interval(7)
    assert scaler.get_scale() == 2.0
    assert snapshots.rewind() == 2
    assert scaler.get_scale() == 8.0
    assert scaler._scale is tensor
    assert scaler.get_growth_interval() == 2000
    assert scaler.step_counts(optimizer) == distamp.guard.StepCounts(1, 0)


def test_a_scale_that_came_later_goes_back_to_the_first_one():
    parameter, optimizer = sgd()
    scaler = cpu_scaler(8.0)
    snapshots = Snapshots(nn.ParameterList([parameter]), optimizer, scaler)
    snapshots.record()
    iteration(scaler, optimizer, parameter, INF)
    snapshots.rewind()
    assert scaler.get_scale() == 8.0
    with pytest.raises(CallOrderError, match=r"step_was_taken\(\) was called before step\(\)"):
        scaler.step_was_taken(optimizer)


def test_a_run_of_skips_goes_on_where_it_was():
    """The limit of skips in a row counts skips before the snapshot, and no skips after it."""
    parameter, optimizer = sgd()
    guard = StepGuard(max_consecutive_skips=3)
    snapshots = Snapshots(nn.ParameterList([parameter]), optimizer, guard)
    iteration(guard, optimizer, parameter, 1.0)
    iteration(guard, optimizer, parameter, INF)
    snapshots.record()
    iteration(guard, optimizer, parameter, INF)
    snapshots.rewind()
    iteration(guard, optimizer, parameter, INF)
    with pytest.raises(distamp.errors.NonFiniteGradientsError, match="3 steps in a row"):
        iteration(guard, optimizer, parameter, INF)


def test_a_compiled_model_is_not_compiled_again():
    torch._dynamo.reset()
    model, optimizer, guard = trained()
    compilations: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(1)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    snapshots = Snapshots(compiled, optimizer, guard)
    train(compiled, optimizer, guard)
    snapshots.record()
    expected, count = weights(model), len(compilations)
    train(compiled, optimizer, guard, 1)
    snapshots.rewind()
    assert equal(weights(model), expected)
    train(compiled, optimizer, guard, 1)
    assert len(compilations) == count


def test_the_bytes_are_logged_before_the_first_snapshot(caplog):
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard)
    with caplog.at_level(logging.INFO, "distamp.guard"):
        snapshots.record()
        train(model, optimizer, guard)
        snapshots.record()
    assert [record.getMessage() for record in caplog.records] == [
        "Each snapshot takes 432 bytes of host memory on this rank, and 2 are kept."
    ]


# -- refusals --------------------------------------------------------------------------------------


def test_record_before_update_is_refused():
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        guard.step(optimizer)
        with pytest.raises(CallOrderError, match=r"snapshots\.record\(\) was called before guard"):
            snapshots.record()
        guard.update()
        snapshots.record()


def test_rewind_before_the_first_snapshot_is_refused():
    snapshots = Snapshots(*trained())
    with pytest.raises(CallOrderError, match=r"rewind\(\) was called before a snapshot was taken"):
        snapshots.rewind()


@on_ranks(2)
def test_a_wrong_number_of_older_snapshots_on_one_rank_is_refused_on_every_rank():
    snapshots = Snapshots(*replicas())
    snapshots.record()
    with pytest.raises(ConfigError, match="older must be an integer >= 0, not -1"):
        snapshots.rewind(older=-dist.get_rank())


def test_another_group_of_parameters_is_refused_before_anything_changes():
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard)
    snapshots.record()
    train(model, optimizer, guard)
    expected = weights(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigError, match=r"The groups of AdamW \(5 parameters\) have changed"):
        snapshots.rewind()
    assert equal(weights(model), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"every": 0}, ConfigError, "every must be an integer >= 1, not 0"),
        ({"keep": True}, ConfigError, "keep must be an integer >= 1, not True"),
        ({"guard": torch.amp.GradScaler("cpu")}, TypeError, "a StepGuard or a DistGradScaler"),
        ({"model": [1]}, TypeError, "takes a model or several, not int"),
        ({"optimizers": [nn.Linear(1, 1)]}, TypeError, "takes an optimizer or several, not Linear"),
        ({"extra": (object(),)}, TypeError, "object, which has no state_dict"),
        ({"extra": nn.Linear(1, 1)}, TypeError, "takes a tuple of objects"),
        ({"extra": (sgd()[1],)}, TypeError, "Pass it in optimizers"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, text):
    names = ("model", "optimizers", "guard")
    with pytest.raises(error, match=text):
        Snapshots(**{**dict(zip(names, trained(), strict=True)), **arguments})


def test_nan_in_the_optimizer_state_is_found_before_a_copy():
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard, every=1)
    train(model, optimizer, guard)
    snapshots.record()
    expected = weights(model)
    train(model, optimizer, guard, 1)
    spoil(optimizer.state[model[2].bias]["exp_avg"])
    text = r"No snapshot of iteration 2 was taken.*exp_avg of 2\.bias \(rank 0\)\. .* number 2 of"
    with pytest.raises(NonFiniteWeightsError, match=text):
        snapshots.record()
    assert snapshots.rewind() == 1
    assert equal(weights(model), expected)


# -- several ranks ---------------------------------------------------------------------------------


def replicas() -> tuple[nn.Module, torch.optim.Optimizer, StepGuard]:
    model, _, _ = trained()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    return wrapped, optimizer, StepGuard(named_parameters=wrapped.named_parameters())


@on_ranks(2)
def test_nan_in_a_weight_of_one_rank_is_named_on_every_rank():
    model, optimizer, guard = replicas()
    snapshots = Snapshots(model, optimizer, guard, every=1)
    train(model, optimizer, guard)
    snapshots.record()
    expected = weights(model)
    train(model, optimizer, guard, 1)
    if dist.get_rank() == 1:
        spoil(model.module[0].weight)
    with pytest.raises(NonFiniteWeightsError, match=r"module\.0\.weight \(rank 1\)"):
        snapshots.record()
    assert snapshots.rewind() == 1
    assert equal(weights(model), expected)
    train(model, optimizer, guard, 2)
    assert guard.step_was_taken(optimizer)


@on_ranks(2)
def test_a_copy_that_one_rank_cannot_take_is_dropped_on_all_and_logged():
    model, optimizer, guard = replicas()
    snapshots = Snapshots(model, optimizer, guard, every=1)
    train(model, optimizer, guard)
    snapshots.record()
    expected = weights(model)
    train(model, optimizer, guard, 1)
    failure: Any = contextlib.nullcontext()
    if dist.get_rank() == 1:
        error = MemoryError("no memory is left")
        failure = mock.patch.object(HostCopies, "allocate", side_effect=error)
    with failure, logged("distamp.guard") as lines:
        snapshots.record()
    if dist.get_rank() == 0:
        assert lines == [
            "No rank took the snapshot of iteration 2, because rank 1 has not enough host memory "
            "(MemoryError: no memory is left). The next one is due after 1 iteration."
        ]
    assert repr(snapshots) == "<Snapshots of iterations [1], now 2>"
    assert snapshots.rewind() == 1
    assert equal(weights(model), expected)


@on_ranks(2)
def test_a_call_before_update_on_one_rank_is_refused_on_every_rank():
    model, optimizer, guard = replicas()
    snapshots = Snapshots(model, optimizer, guard)
    model(torch.ones(4, 8)).sum().backward()
    guard.step(optimizer)
    if dist.get_rank() == 0:
        guard.update()
    with pytest.raises(CallOrderError, match=r"snapshots\.record\(\) was called before guard\.upd"):
        snapshots.record()


@on_ranks(2)
def test_a_call_that_is_not_due_sends_nothing_and_other_counts_are_refused():
    model, optimizer, guard = replicas()
    snapshots = Snapshots(model, optimizer, guard)
    train(model, optimizer, guard)
    snapshots.record()
    if dist.get_rank() == 0:
        snapshots.record()
    with pytest.raises(
        RankMismatchError, match=r"record\(\) calls.*\n  rank 0: record\(\) called 2"
    ):
        snapshots.rewind()


@on_ranks(2)
def test_other_settings_are_refused():
    model, optimizer, guard = replicas()
    snapshots = Snapshots(model, optimizer, guard, every=2 + dist.get_rank())
    with pytest.raises(RankMismatchError, match="every="):
        snapshots.record()


@on_ranks(2)
def test_a_rank_in_another_call_is_refused():
    model, optimizer, guard = replicas()
    snapshots = Snapshots(model, optimizer, guard)
    train(model, optimizer, guard)
    snapshots.record()
    model(torch.ones(4, 8)).sum().backward()
    call = snapshots.rewind if dist.get_rank() == 0 else lambda: guard.step(optimizer)
    with pytest.raises(RankMismatchError, match=r"rank 0: snapshots\.rewind\(\)"):
        call()


@on_ranks(2)
def test_a_snapshot_that_does_not_fit_on_one_rank_is_refused_on_every_rank():
    model, optimizer, guard = replicas()
    snapshots = Snapshots(model, optimizer, guard)
    snapshots.record()
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigError, match=r"The groups of AdamW.*\(rank 1\)"):
        snapshots.rewind()


@on_ranks(2)
def test_an_error_while_one_rank_goes_back_is_raised_on_every_rank():
    model, optimizer, guard = replicas()
    average = Average()
    snapshots = Snapshots(model, optimizer, guard, extra=(average,))
    snapshots.record()
    if dist.get_rank() == 0:
        average.load_state_dict = mock.Mock(side_effect=ValueError("no such key"))
    with pytest.raises(ValueError, match="no such key"):
        snapshots.rewind()


@on_ranks(2)
@pytest.mark.parametrize("wrap", ["FSDP1", "FSDP1 flat", "FSDP2"])
def test_weights_that_an_evaluation_has_gathered_are_gathered_again(wrap):
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    if wrap == "FSDP2":
        model = fully_shard(model)
    else:
        is_flat = wrap == "FSDP1 flat"
        settings: Any = {"device_id": torch.device("cpu"), "use_orig_params": not is_flat}
        model = FullyShardedDataParallel(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    guard = StepGuard()
    snapshots = Snapshots(model, optimizer, guard, every=1)
    train(model, optimizer, guard)
    inputs = torch.ones(4, 8)
    with torch.no_grad():
        expected = model(inputs).clone()
    snapshots.record()
    train(model, optimizer, guard, 1)
    with torch.no_grad():
        model(inputs)
    snapshots.rewind()
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)


@on_ranks(2)
def test_unreduced_gradients_of_a_guard_are_dropped():
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = StepGuard()
    snapshots = Snapshots(model, optimizer, guard)
    train(model, optimizer, guard)
    snapshots.record()
    train(model, optimizer, guard, 1)
    expected = weights(model)
    snapshots.rewind()
    model.set_requires_gradient_sync(False)
    model(torch.ones(4, 8)).sum().backward()
    model.set_requires_gradient_sync(True)
    snapshots.rewind()
    train(model, optimizer, guard, 1)
    assert equal(weights(model), expected)


@on_ranks(2)
def test_precomputed_scales_of_float8_are_dropped():
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    level = distamp.PrecisionLevel.from_name("fp8").replace(float8_all_gather=True)
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    distamp.cast_model(model, level)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    amp = distamp.initialize(model, optimizer, level)
    snapshots = amp.snapshots(every=50)

    def outputs() -> Tensor:
        with torch.no_grad(), amp.autocast():
            result: Tensor = amp.model(torch.ones(16, 32)).float().clone()
        return result

    def step() -> None:
        amp.zero_grad()
        with amp.autocast():
            loss = amp.model(torch.ones(16, 32)).float().square().mean()
        amp.backward(loss)
        amp.step()
        float8.precompute_float8_dynamic_scale_for_fsdp(model)

    step()
    snapshots.record()
    expected = outputs()
    for _ in range(3):
        step()
    assert not torch.equal(outputs(), expected)
    snapshots.rewind()
    assert torch.equal(outputs(), expected)


@on_ranks(2)
def test_it_goes_back_in_a_group_of_some_ranks():
    """Rank 0 makes no call."""
    group = dist.new_group([1])
    if dist.get_rank() == 0:
        return
    model, optimizer, _ = trained()
    guard = StepGuard(group)
    snapshots = Snapshots(model, optimizer, guard, every=1)
    train(model, optimizer, guard)
    snapshots.record()
    expected = weights(model)
    train(model, optimizer, guard, 1)
    snapshots.rewind()
    assert equal(weights(model), expected)


# -- devices ---------------------------------------------------------------------------------------


def on_device_guard(optimizer: torch.optim.Optimizer, kind: str) -> Any:
    return StepGuard() if kind == "guard" else DistGradScaler("sim", init_scale=8.0)


@on_devices(2)
@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        pytest.param("guard", True, id="guard and fused step"),
        pytest.param("scaler", False, id="scaler and foreach step", marks=pytest.mark.slow),
        pytest.param("guard", False, id="guard and foreach step", marks=pytest.mark.slow),
        pytest.param("scaler", True, id="scaler and fused step", marks=pytest.mark.slow),
    ],
)
def test_a_run_on_a_device_that_went_back_is_bit_identical(kind, fused):
    """Late reads of the device belong to the snapshot, or to the iterations that are taken back."""

    def run(goes_back: bool) -> tuple[list[Tensor], Any, float]:
        model, _, _ = trained()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        guard = on_device_guard(optimizer, kind)
        snapshots = Snapshots(model, optimizer, guard, every=2)

        def iterate(batch: int, factor: float = 1.0) -> None:
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(batch)
            inputs = torch.randn(4, 8, generator=generator).to(rank_device())
            guard.scale(model(inputs * factor).square().mean()).backward()
            guard.step(optimizer)
            guard.update()

        for batch in range(3):
            iterate(batch, INF if batch == 1 else 1.0)
            snapshots.record()
        if goes_back:
            iterate(50, INF)
            snapshots.record()
            iterate(51)
            snapshots.record()
            assert snapshots.rewind() == 0
            assert snapshots.rewind(older=1) == 2
        for batch in range(3, 6):
            iterate(batch)
            snapshots.record()
        return weights(model), guard.step_counts(optimizer), guard.get_scale()

    states = run(True), run(False)
    assert equal(states[0][0], states[1][0])
    assert states[0][1:] == states[1][1:]


@pytest.mark.slow
@on_devices(2)
def test_nan_on_a_device_of_one_rank_is_named_on_every_rank():
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard, every=1)
    train(model, optimizer, guard)
    snapshots.record()
    train(model, optimizer, guard, 1)
    if dist.get_rank() == 1:
        spoil(model[2].weight)
    with pytest.raises(NonFiniteWeightsError, match=r"2\.weight \(rank 1\)"):
        snapshots.record()
    assert snapshots.rewind() == 1


@on_devices(2)
def test_a_rank_that_reads_a_reply_before_a_rewind_does_not_wait_for_the_others():
    """The reply shows that ranks differ, so all ranks gather, also a rank that goes back."""
    model, optimizer, guard = trained()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots = Snapshots(model, optimizer, guard, every=1)
    train(model, optimizer, guard)
    snapshots.record()
    if dist.get_rank() == 0:
        guard.unscale_(optimizer)
    else:
        guard.unscale_(other)
        with pytest.raises(RankMismatchError, match="the optimizers"):
            guard.step_counts(other)
    assert snapshots.rewind() == 0


@on_devices(1)
def test_copies_of_tensors_on_a_device_are_pinned():
    copies = HostCopies()
    copies.add([torch.ones(3, device=rank_device()), torch.ones(3)])
    copies.allocate(None)
    assert [saved.values.is_pinned() for saved in copies.tensors] == [True, False]


@on_devices(1)
def test_generators_of_devices_go_back():
    model, optimizer, guard = trained()
    snapshots = Snapshots(model, optimizer, guard)
    snapshots.record()
    first = torch.rand(3, device=rank_device()).cpu()
    snapshots.rewind()
    assert torch.equal(torch.rand(3, device=rank_device()).cpu(), first)
