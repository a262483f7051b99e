"""Several ranks, devices or optimizers: skips together, fused steps, errors and levels."""

import contextlib
import functools
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp import DistGradScaler, StepGuard, device_utils
from distamp.errors import CallOrderError, RankMismatchError
from distamp.masters import MasterParameters
from distamp.precision_level import LEVELS
from tests.on_ranks import on_devices
from tests.place import rank_device
from tests.ranks import logged, mesh
from tests.scaler.steps import INF, NAN, error_of
from tests.simulated.pools import SCHEDULES, SimPool, under_schedules

slow = pytest.mark.slow


@on_devices(2)
@pytest.mark.parametrize("call", ["step", "unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize("half", [False, True])
def test_an_overflow_on_either_device_of_one_rank_skips_the_step_on_all(half, call):
    """The model of each rank is on two devices."""
    rank = dist.get_rank()
    devices = [f"sim:{rank}", f"sim:{rank + 2}"]
    model = nn.ModuleList(nn.Linear(2, 2, bias=False, device=device) for device in devices)
    if half:
        model.half()
    weights = [*model.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.25)
    _masters = MasterParameters(optimizer) if half else None
    scaler = DistGradScaler("sim", init_scale=8.0, fp16_grads="master" if half else "error")
    for overflowing in (None, 0, 1):
        old_weights = [weight.detach().clone() for weight in weights]
        scaler.scale(torch.ones((), device=devices[0]))
        for number, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, scaler.get_scale() / 2)
            if number == overflowing and rank == 1:
                weight.grad[0, 0] = torch.inf
        if call == "unscale_":
            scaler.unscale_(optimizer)
        elif call == "clip_grad_norm_":
            norm = scaler.clip_grad_norm_(optimizer, 9.0)
            if overflowing is None:
                assert norm.item() == pytest.approx(2.0**0.5)
        scaler.step(optimizer)
        scaler.update()
        expected_change = 0.125 if overflowing is None else 0.0
        for weight, old_weight in zip(weights, old_weights, strict=True):
            change = old_weight - weight
            assert change[1, 1].item() == expected_change


def different_scales(scaler: Any, optimizer: Any) -> None:
    scaler.update(4.0 if dist.get_rank() else 8.0)
    scaler.step(optimizer)


def different_limits(scaler: Any, optimizer: Any) -> None:
    """Step with a limit that the norm exceeds on rank 0 alone."""
    limit = torch.full((), 0.5 + dist.get_rank(), device="sim")
    scaler.step(optimizer, skip_norm_above=limit)


def different_norms(scaler: Any, optimizer: Any) -> None:
    scaler.step(optimizer, max_norm=9.0 + dist.get_rank())


def negative_max_norm(scaler: Any, optimizer: Any) -> None:
    scaler.step(optimizer, max_norm=-1.0)


def negative_norm_type(scaler: Any, optimizer: Any) -> None:
    scaler.clip_grad_norm_(optimizer, 1.0, norm_type=-1.0)
    scaler.step(optimizer)


MISTAKES = [different_limits, different_norms, negative_max_norm, negative_norm_type]


def _check_that_no_rank_takes_the_second_step(scaler: Any, mistake: Any) -> None:
    """Make a mistake in the second step; the host reads the reply to a fused step late."""
    weight = torch.ones(1, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=True)

    def train(step: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        step(optimizer)
        scaler.update()

    def train_with_the_mistake() -> None:
        train(functools.partial(mistake, scaler))
        train(scaler.step)

    train(scaler.step)
    with pytest.raises((RankMismatchError, ValueError)):
        train_with_the_mistake()
    assert weight.item() == 0.75, "the first step alone was taken"


@on_devices(2)
@pytest.mark.parametrize("mistake", [different_scales, *MISTAKES])
def test_no_rank_takes_a_fused_step_with_a_mistake_by_a_scaler(mistake):
    scaler = DistGradScaler("sim", init_scale=2.0)
    _check_that_no_rank_takes_the_second_step(scaler, mistake)


@on_devices(2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_no_rank_takes_a_fused_step_with_a_mistake_by_a_guard(mistake):
    _check_that_no_rank_takes_the_second_step(StepGuard(), mistake)


@on_devices(2)
def test_clips_of_different_optimizers_raise_on_both_ranks_and_leave_weights_equal():
    """The host reads the reply to a clip late, so the steps that follow may have been taken."""
    scaler = DistGradScaler("sim", init_scale=2.0)
    weights = []
    optimizers = []
    for _ in range(2):
        weight = torch.ones(1, device="sim", requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.25, fused=True)
        weights.append(weight)
        optimizers.append(optimizer)

    def train(clipped: int) -> None:
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = None
            scaler.scale(2.0 * weight).backward()
            scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizers[clipped], 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    def train_twice() -> None:
        train(dist.get_rank())
        train(0)

    train(0)
    error = error_of(train_twice)
    assert error is not None, "nothing was raised"
    assert error[0] == "RankMismatchError", error
    local_values = torch.cat(weights).tolist()
    values: list[Any] = [None, None]
    dist.all_gather_object(values, local_values)
    assert values[0] == values[1]


@on_devices(2)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("call", ["step", "unscale_", "clip_grad_norm_", "max_norm"])
def test_the_first_step_of_a_rank_that_scales_no_loss_is_taken(call, fused):
    """The last stage of a pipeline scales the loss, and the other stages only step."""
    weight = torch.ones(1, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=fused)
    scaler = DistGradScaler("sim", init_scale=4.0)
    if dist.get_rank() == 1:
        scaler.scale(weight.sum()).backward()
    else:
        weight.grad = torch.full_like(weight, 4.0)
    if call == "unscale_":
        scaler.unscale_(optimizer)
    elif call == "clip_grad_norm_":
        scaler.clip_grad_norm_(optimizer, 100.0)
    max_norm = 100.0 if call == "max_norm" else None
    scaler.step(optimizer, max_norm=max_norm)
    scaler.update()
    assert weight.item() == 0.75
    assert scaler.get_scale() == 4.0
    assert scaler.step_counts(optimizer).skipped == 0


@on_devices(2)
@pytest.mark.parametrize("norm", [{}, pytest.param({"max_norm": 100.0}, marks=slow)])
def test_more_optimizers_than_a_message_has_words_for(norm):
    """One of 30 optimizers overflows, and another has no gradient on any rank."""
    weights = [torch.ones(1, device="sim", requires_grad=True) for _ in range(30)]
    optimizers = [torch.optim.SGD([weight], lr=0.25, fused=True) for weight in weights]
    guard = StepGuard()
    for number in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        weights[28].grad = None
        if number and dist.get_rank():
            weights[29].grad = torch.full_like(weights[29], INF)
        guard.step_all(optimizers, **norm)
        guard.update()
    counts = [guard.step_counts(optimizer) for optimizer in optimizers]
    *good, idle, overflowed = counts
    for count in good:
        assert count.taken == (1 if norm else 2)
    assert (idle.taken, idle.skipped) == (0, 0)
    assert (overflowed.taken, overflowed.skipped) == (1, 1)
    assert not guard.step_was_taken(optimizers[28])


@on_devices(2)
@pytest.mark.parametrize(
    ("fused", "norm"),
    [
        pytest.param(False, {}, id="plain"),
        pytest.param(False, {"max_norm": 100.0}, id="plain, max_norm", marks=slow),
        pytest.param(True, {}, id="fused", marks=slow),
        pytest.param(True, {"max_norm": 100.0}, id="fused, max_norm"),
    ],
)
def test_the_result_of_a_step_is_false_for_an_idle_optimizer(fused, norm):
    """The host reads nothing before the result. The first optimizer overflows in the last step."""
    models = [nn.Linear(4, 1, device="sim") for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused) for m in models]
    amp = distamp.initialize(models, optimizers, "bf16")

    def step(factor: float, second_trains: bool) -> list[bool]:
        """Step on the device; return the result of all optimizers, and of each."""
        x = torch.ones(2, 4, device="sim")
        amp.zero_grad()
        loss = amp.models[0](x).sum()
        amp.backward(loss * factor)
        if second_trains and dist.get_rank():
            second_loss = amp.models[1](x).sum()
            amp.backward(second_loss)
        limits: dict[str, Any] = dict(norm)
        if norm:
            limits["shard_group_fn"] = lambda _: True
        result = amp.step(**limits)
        assert amp.scaler.found_inf(optimizers[1]).item() == 0.0
        assert amp.scaler.step_was_taken(optimizers[1]) is second_trains
        return [bool(flag) for flag in (result, *result.optimizers)]

    assert step(1.0, second_trains=False) == [True, True, False]
    assert step(1.0, second_trains=True) == [True, True, True]
    assert step(INF, second_trains=False) == [False, False, False]
    counts = amp.scaler.step_counts(optimizers[1])
    assert (counts.taken, counts.skipped) == (1, 0)


def _count_host_copies():
    # isinstance would also read the attribute __class__ of each object.
    return sum(type(value) is device_utils.AsyncHostCopy for value in gc.get_objects())


@slow
@on_devices(2)
def test_a_disabled_scalers_clips_keep_no_copies():
    weight = torch.ones(1, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=True)
    scaler = DistGradScaler("sim", enabled=False)
    before = _count_host_copies()
    for _ in range(20):
        optimizer.zero_grad()
        weight.sum().backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
    assert _count_host_copies() <= before + 1


@on_devices(2)
def test_one_rank_alone_may_read_the_counts_of_fused_steps():
    """Rank 0 reads the collapse in the counts, and rank 1 at its next message."""
    weight = torch.ones(1, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler = DistGradScaler("sim", max_consecutive_skips=2)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale((weight * torch.inf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    error = error_of(scaler.step_counts, optimizer) if dist.get_rank() == 0 else None
    scaler.scale((weight * 0.25).sum()).backward()
    error = error or error_of(scaler.step, optimizer)
    assert error is not None
    assert error[0] == "LossScaleCollapseError"


@on_devices(2)
def test_replicas_that_diverge_after_a_norm_raise_at_the_next_norm():
    """A second weight with different gradients joins in the second step.

    The device reports the difference at the step after it.
    """
    weights = [torch.ones(1, device="sim", requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=1.0, fused=True)
    guard = StepGuard()
    errors = []
    for step in range(4):
        weights[0].grad = torch.ones(1, device="sim")
        if step > 0:
            weights[1].grad = torch.full((1,), 1.0 + dist.get_rank(), device="sim")
        error = error_of(guard.step, optimizer, max_norm=1.0)
        guard.update()
        errors.append(error[0] if error else "")
    assert errors == ["", "", "ReplicaMismatchError", "ReplicaMismatchError"]


@on_devices(2)
@pytest.mark.parametrize("by", ["method", "function"])
def test_a_clip_on_one_rank_beside_a_fused_step_raises_on_every_rank(by):
    """Replicas are equal before. The rank that stepped raises at its next call."""
    weight = torch.ones(1, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    guard = StepGuard()
    for _ in range(2):
        weight.grad = torch.full((1,), 0.25, device="sim")
        guard.clip_grad_norm_(optimizer, 1.0)
        guard.step(optimizer)
        guard.update()
    weight.grad = torch.full((1,), 0.25, device="sim")
    error = None
    if dist.get_rank() == 0:
        guard.step(optimizer)
        guard.update()
        error = error_of(guard.step, optimizer)
    elif by == "function":
        error = error_of(distamp.clip_grad_norm_, optimizer, 1.0)
    else:
        guard.clip_grad_norm_(optimizer, 1.0)
        error = error_of(guard.nonfinite_report)
    assert error is not None
    assert error[0] == "RankMismatchError"
    assert "rank 0: step()" in error[1]
    assert "clip_grad_norm_" in error[1]
    assert weight.item() == 0.5


# -- levels ----------------------------------------------------------------------------------------


def level(name: str) -> Any:
    """Train six steps at a level; return the weights, and whether each step was taken.

    The third step overflows on rank 1 if the level scales its losses.
    """
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    net = distamp.cast_model(net.to(rank_device()), name)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    amp = distamp.initialize(model, optimizer, name)
    taken = []
    for step in range(6):
        amp.zero_grad()
        x = torch.linspace(-1, 1, 128).view(8, 16) + step
        x = x.to(rank_device())
        with amp.autocast():
            out = amp.model(x).float()
            loss = out.square().mean()
        scales_losses = LEVELS[name].loss_scale != 1.0
        overflows = dist.get_rank() and step == 2 and scales_losses
        amp.backward(loss * (INF if overflows else 1.0))
        amp.clip_grad_norm_(1.0)
        taken.append(bool(amp.step()))
    return [p.detach().float().cpu() for p in model.parameters()], taken


# The group of the device alone trains at fp16, with a loss scale.
QUICK_LEVELS = ("bf16-O2",)


def _levels_under_schedules() -> list[Any]:
    """Return a quick case for every quick level; all other cases are slow."""
    parameters = under_schedules((name,) for name in QUICK_LEVELS)
    for name in LEVELS:
        if name not in QUICK_LEVELS:
            for schedule in SCHEDULES:
                parameters.append(pytest.param(name, *schedule, marks=slow))
    return parameters


@pytest.mark.parametrize(("name", "schedule", "seed"), _levels_under_schedules())
def test_a_level_trains_as_on_the_cpu(sim2, ranks2, name, schedule, seed):
    results = sim2.run(level, name, schedule=schedule, seed=seed)
    expected = ranks2.run(level, name)
    # The CPU has other autocast lists, so half-precision weights differ in the last place.
    torch.testing.assert_close(results, expected, rtol=3e-2, atol=3e-3)


@on_devices(2)
@pytest.mark.parametrize(("level", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_level_runs_where_offloaded_parameters_compute(level, dtype):
    """One step where parameters rest on the CPU and compute on the device."""
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    net.to(rank_device())
    policy = CPUOffloadPolicy(pin_memory=False)
    model = fully_shard(net, mesh=mesh((2,), ("shard",)), offload_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"init_scale": 64.0} if level == "fp16" else {}
    amp = distamp.initialize(model, optimizer, level, **settings)
    x = torch.full((2, 8), 2.0 + dist.get_rank(), device=rank_device())
    with amp.autocast():
        out = amp.model(x)
    loss = out.float().square().mean()
    amp.backward(loss)
    assert out.dtype is dtype
    assert amp.clip_grad_norm_(1.0) > 0
    assert bool(amp.step())


@pytest.mark.usefixtures("sim2")
def test_a_group_of_the_device_alone():
    """init_process_group("nccl") makes a group without gloo, which compares ranks by the device."""
    with contextlib.closing(SimPool(2, backend="sim:simccl")) as pool:
        first, second = pool.run(level, "fp16")
    (first_weights, first_taken), (second_weights, second_taken) = first, second
    assert first_taken == [True, True, False, True, True, True]
    assert second_taken == first_taken
    assert all(map(torch.equal, first_weights, second_weights))


@on_devices(2)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_each_bad_rank_logs_its_own_skip(fused):
    weight = torch.ones(2, device="sim", requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=fused)
    guard = StepGuard()
    with logged("distamp.guard") as lines:
        for value in (1.0, NAN if dist.get_rank() else 1.0, 1.0):
            weight.grad = torch.full_like(weight, value)
            guard.step(optimizer)
            guard.update()
        guard.step_counts(optimizer)
    assert len(lines) == dist.get_rank()
    for line in lines:
        assert "step 2 of AdamW" in line
        assert "on rank 1" in line


@on_devices(2)
def test_ranks_that_ended_join_with_different_optimizer_states_raise():
    model = DistributedDataParallel(nn.Linear(4, 2, device=rank_device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    guard = StepGuard()

    def epoch() -> None:
        with Join([model, guard]):
            for _ in range(1 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                inputs = torch.ones(1, 4, device=rank_device())
                model(inputs).sum().backward()
                guard.step(optimizer)
                guard.update()

    with pytest.raises(CallOrderError, match="Rank 1 of the group has the state to keep"):
        epoch()
