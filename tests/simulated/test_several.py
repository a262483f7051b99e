"""Several on simulated devices: ranks that part or train together, models over two, optimizers."""

import contextlib
import gc
import itertools
from collections.abc import Callable
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
from tests.place import here
from tests.ranks import logged, mesh
from tests.scaler.steps import INF, NAN, error_of
from tests.simulated.pools import SimPool, under_schedules


@on_devices(2)
@pytest.mark.parametrize("call", ["step", "unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize("half", [False, True])
def test_an_overflow_on_either_device_of_one_rank_skips_the_step_on_all(half, call):
    """A model over two devices on each rank."""
    devices = [f"sim:{dist.get_rank() + place}" for place in (0, 2)]
    model = nn.ModuleList([nn.Linear(2, 2, bias=False, device=each) for each in devices])
    if half:
        model.half()
    weights = [*model.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.25)
    _kept = half and MasterParameters(optimizer)
    scaler = DistGradScaler("sim", init_scale=8.0, fp16_grads="master" if half else "error")
    for overflowing in (None, 0, 1):
        before = [weight.detach().clone() for weight in weights]
        scaler.scale(torch.ones((), device=devices[0]))
        for number, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, scaler.get_scale() / 2)
            if number == overflowing and dist.get_rank():
                weight.grad[0, 0] = torch.inf
        if call == "unscale_":
            scaler.unscale_(optimizer)
        elif call == "clip_grad_norm_":
            norm = scaler.clip_grad_norm_(optimizer, 9.0).item()
            assert norm == pytest.approx(2.0**0.5) or overflowing is not None
        scaler.step(optimizer)
        scaler.update()
        moved = [(b - weight)[1, 1].item() for b, weight in zip(before, weights, strict=True)]
        assert moved == [0.125 if overflowing is None else 0.0] * 2


def _other_scales(made: Any, optimizer: Any) -> None:
    made.update(4.0 if dist.get_rank() else 8.0)
    made.step(optimizer)


def _bad_norm_type(made: Any, optimizer: Any) -> None:
    made.clip_grad_norm_(optimizer, 1.0, norm_type=-1.0)
    made.step(optimizer)


# What is done in the place of a step.
WRONG: dict[str, Callable[[Any, Any], None]] = {
    "other scales": _other_scales,
    # By one the step is a spike, by the other it is none.
    "other limits": lambda made, optimizer: made.step(
        optimizer, skip_norm_above=torch.full((), 0.5 + dist.get_rank(), device="sim")
    ),
    "other norms": lambda made, optimizer: made.step(optimizer, max_norm=9.0 + dist.get_rank()),
    "max_norm of all": lambda made, optimizer: made.step(optimizer, max_norm=-1.0),
    "norm_type of all": _bad_norm_type,
}


@on_devices(2)
@pytest.mark.parametrize(
    ("by", "what"),
    [*itertools.product(["scaler", "guard"], list(WRONG)[1:]), ("scaler", "other scales")],
)
def test_a_fused_step_out_of_lockstep_or_in_error_is_taken_by_nobody(by, what):
    """After a step ranks part, or all make a mistake, whose reply the host reads late."""
    weight = torch.ones(1, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=True)
    made = StepGuard() if by == "guard" else DistGradScaler("sim", init_scale=2.0)
    raised = False
    for number in range(3):
        optimizer.zero_grad()
        made.scale(weight.sum()).backward()
        try:
            WRONG[what](made, optimizer) if number == 1 else made.step(optimizer)
            made.update()
        except (RankMismatchError, ValueError):
            raised = True
            break
    assert (weight.item(), raised) == (0.75, True)


@on_devices(2)
@pytest.mark.parametrize("norm", [{}, {"max_norm": 100.0}])
def test_more_optimizers_than_a_message_has_words_for(norm):
    """Of 30 optimizers one overflows, and one has no gradient on any rank."""
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
    assert {each.taken for each in counts[:28]} == {1 if norm else 2}
    assert (counts[28].taken, counts[28].skipped) == (0, 0)
    assert (counts[29].taken, counts[29].skipped) == (1, 1)
    assert not guard.step_was_taken(optimizers[28])


@on_devices(2)
@pytest.mark.parametrize("norm", [{}, {"max_norm": 100.0}])
@pytest.mark.parametrize("fused", [False, True])
def test_the_result_of_a_step_is_false_for_an_idle_optimizer(fused, norm):
    """Nothing is read on the host before the result; the other optimizer overflows at last."""
    models = [nn.Linear(4, 1, device="sim") for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused) for m in models]
    amp = distamp.initialize(models, optimizers, "bf16")
    for factor, trains, expected in (
        (1.0, False, [True, True, False]),
        (1.0, True, [True, True, True]),
        (INF, False, [False, False, False]),
    ):
        amp.zero_grad()
        amp.backward((amp.models[0](torch.ones(2, 4, device="sim")) * factor).sum())
        if trains and dist.get_rank():
            amp.backward(amp.models[1](torch.ones(2, 4, device="sim")).sum())
        result = amp.step(**norm, **({"shard_group_fn": lambda _: True} if norm else {}))
        assert amp.scaler.found_inf(optimizers[1]).item() == 0.0
        assert amp.scaler.step_was_taken(optimizers[1]) is trains
        assert [bool(flag) for flag in (result, *result.optimizers)] == expected
    counts = amp.scaler.step_counts(optimizers[1])
    assert (counts.taken, counts.skipped) == (1, 0)


def _count_host_copies():
    return sum(isinstance(value, device_utils.AsyncHostCopy) for value in gc.get_objects())


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
def test_one_rank_may_ask_for_the_counts_of_fused_steps():
    """Rank 0 reads late what others read at their next message."""
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
def test_replicas_that_part_after_a_norm_are_seen_by_the_next_one():
    """From the second step on more takes part, which differs; a device says so at the next."""
    weights = [torch.ones(1, device="sim", requires_grad=True) for _ in range(2)]
    optimizer, guard, raised = torch.optim.SGD(weights, lr=1.0, fused=True), StepGuard(), []
    for step in range(4):
        weights[0].grad = torch.ones(1, device="sim")
        weights[1].grad = torch.full((1,), 1.0 + dist.get_rank(), device="sim") if step else None
        error = error_of(guard.step, optimizer, max_norm=1.0)
        guard.update()
        raised.append(error[0] if error else "")
    assert raised == ["", "", "ReplicaMismatchError", "ReplicaMismatchError"]


@on_devices(2)
@pytest.mark.parametrize("by", ["method", "function"])
def test_a_clip_on_one_rank_beside_a_fused_step_raises_on_every_rank(by):
    """After clips that found replicas alike; the rank that stepped raises at its next call."""
    weight = torch.ones(1, device="sim", requires_grad=True)
    optimizer, guard = torch.optim.SGD([weight], lr=1.0, fused=True), StepGuard()
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
    """Six steps by `distamp.initialize`, of which one overflows: the weights, and who stepped."""
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(here())
    model = DistributedDataParallel(distamp.cast_model(net, name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    amp, taken = distamp.initialize(model, optimizer, name), []
    for step in range(6):
        amp.zero_grad()
        x = torch.linspace(-1, 1, 128).view(8, 16).add(step).to(here())
        with amp.autocast():
            loss = amp.model(x).float().square().mean()
        # Where no loss is scaled nothing is skipped.
        bad = dist.get_rank() and step == 2 and LEVELS[name].loss_scale != 1.0
        amp.backward(loss * (INF if bad else 1.0))
        amp.clip_grad_norm_(1.0)
        taken.append(bool(amp.step()))
    return [p.detach().float().cpu() for p in model.parameters()], taken


@pytest.mark.parametrize(("name", "schedule", "seed"), under_schedules((each,) for each in LEVELS))
def test_a_level_trains_as_on_the_cpu(sim2, ranks2, name, schedule, seed):
    found = sim2.run(level, name, schedule=schedule, seed=seed)
    # The CPU has autocast lists of its own, which shows in half precision in the last place.
    torch.testing.assert_close(found, ranks2.run(level, name), rtol=3e-2, atol=3e-3)


@on_devices(2)
@pytest.mark.parametrize(("level", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_level_runs_where_offloaded_parameters_compute(level, dtype):
    """One step where parameters rest on the CPU and compute on the device."""
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).to(here())
    over = mesh((2,), ("shard",))
    model = fully_shard(net, mesh=over, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"init_scale": 64.0} if level == "fp16" else {}
    amp = distamp.initialize(model, optimizer, level, **settings)
    with amp.autocast():
        out = amp.model(torch.full((2, 8), 2.0 + dist.get_rank(), device=here()))
    amp.backward(out.float().square().mean())
    assert (out.dtype, amp.clip_grad_norm_(1.0) > 0, bool(amp.step())) == (dtype, True, True)


@pytest.mark.usefixtures("sim2")
def test_a_group_of_the_device_alone():
    """As after init_process_group("nccl"): no gloo, so what ranks compare goes by the device."""
    with contextlib.closing(SimPool(2, backend="sim:simccl")) as pool:
        first, second = pool.run(level, "fp16")
        assert first[1] == second[1] == [True, True, False, True, True, True]
        assert all(map(torch.equal, first[0], second[0]))


@on_devices(2)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_each_bad_rank_logs_its_own_skip(fused):
    weight = torch.ones(2, device="sim", requires_grad=True)
    optimizer, guard = torch.optim.AdamW([weight], fused=fused), StepGuard()
    with logged("distamp.guard") as told:
        for value in (1.0, NAN if dist.get_rank() else 1.0, 1.0):
            weight.grad = torch.full_like(weight, value)
            guard.step(optimizer)
            guard.update()
        guard.step_counts(optimizer)
    assert len(told) == dist.get_rank()
    assert all("step 2 of AdamW" in line and "on rank 1" in line for line in told)


@on_devices(2)
def test_ranks_that_ended_join_with_different_optimizer_states_raise():
    model = DistributedDataParallel(nn.Linear(4, 2, device=here()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    guard = StepGuard()

    def epoch() -> None:
        with Join([model, guard]):
            for _ in range(1 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                model(torch.ones(1, 4, device=here())).sum().backward()
                guard.step(optimizer)
                guard.update()

    with pytest.raises(CallOrderError, match="Rank 1 of the group has the state to keep"):
        epoch()
