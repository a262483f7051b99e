"""A scaler attached to a hook: the same skips as without; and what rounding took comes back."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, comm_hooks
from tests.comm_hooks.training import Given, agreed, inputs, mlp, relative, wrapped
from tests.on_ranks import on_ranks
from tests.ranks import subgroup
from tests.scaler.steps import through_a_file

WIDTHS = (17, 40, 30, 3)


def _train(
    layout: str,
    wire: str,
    attach: bool = True,
    fault: tuple[float, int, int] = (0.0, -1, 0),
    scale: float = 1024.0,
) -> tuple[list[Any], Tensor]:
    """What each step did, and the parameters; in the third a gradient of a rank may be spoilt."""
    group, rank = None, dist.get_rank()
    if layout == "two groups":
        group = [subgroup([0, 1]), subgroup([2, 3])][rank // 2]
    model = DistributedDataParallel(mlp(*WIDTHS), bucket_cap_mb=0.002, process_group=group)
    state = comm_hooks.register_comm_hook(model, wire)
    scaler = DistGradScaler("cpu", init_scale=scale, growth_interval=2, process_group=group)
    if attach:
        scaler.attach_comm_hook(state)
    parameters = list(model.parameters())
    halves = [parameters[:3], parameters[3:]] if layout == "two optimizers" else [parameters]
    optimizers = [torch.optim.Adam(half, 1e-3, fused=layout == "fused") for half in halves]
    did, step = [], 0
    value, spoilt, place = fault

    def spoil(gradient: Tensor) -> Tensor:
        first = torch.tensor([0] if (step, rank) == (2, spoilt) else [], dtype=torch.int64)
        return gradient.flatten().index_fill(0, first, value).view_as(gradient)

    parameters[place].register_hook(spoil)
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for last in [False, True] if layout == "accumulate" else [True]:
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(inputs(step + 100 * last, WIDTHS[0])).square().mean()
                scaler.scale(loss).backward()
        if layout == "clip":
            scaler.clip_grad_norm_(optimizers[0], 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        did.append((*(scaler.step_was_taken(o) for o in optimizers), scaler.get_scale()))
    return did, torch.cat([p.detach().flatten() for p in parameters])


LAYOUTS = ["plain", "fused", "accumulate", "clip", "two optimizers", "two groups"]


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "wire"),
    [*((each, "fp16") for each in LAYOUTS), *((x, "int8") for x in LAYOUTS[::3])],
)
def test_the_same_steps_are_skipped(layout, wire):
    value, spoilt, place = (math.inf, 3, 1) if wire == "fp16" else (math.nan, 0, 5)
    (did, mine), (alone, other) = (
        _train(layout, wire, how, (value, spoilt, place)) for how in (True, False)
    )
    assert did == alone
    spared = layout == "two groups" and dist.get_rank() // 2 != spoilt // 2
    assert [all(taken) for *taken, _ in did] == [True, True, spared, True, True]
    assert mine.isfinite().all()
    # A hook that hears of skips and scales feeds other errors back than one that does not.
    assert wire == "int8" or torch.allclose(mine, other, rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_the_loss_scale_does_not_matter():
    (_, one), (_, other) = (_train("plain", "int8", scale=scale) for scale in (1.0, 2.0**24))
    assert torch.equal(one, other)
    assert agreed(one)


# -- uneven inputs ---------------------------------------------------------------------------------


def _uneven(wire: str | None, counts: Sequence[int], bad: int | None) -> Tensor:
    """Parameters after two epochs of uneven inputs, of which a step may skip, and a plain step.

    Without a hook it is torch's DDP, and ranks that have no more inputs have a loss of zero.
    """
    # DDP orders buckets by rank 0's first gradients, unless it looks for unused parameters.
    settings = {"find_unused_parameters": counts[0] == 0}
    model = DistributedDataParallel(mlp(*WIDTHS), bucket_cap_mb=0.002, **settings)
    scaler = DistGradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=wire is not None)
    if wire is not None:
        scaler.attach_comm_hook(comm_hooks.register_comm_hook(model, wire))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = counts[dist.get_rank()]

    def step(number: int, skips: bool, factor: float = 1.0) -> None:
        sgd.zero_grad()
        loss = model(inputs(number, WIDTHS[0])).square().mean() * factor
        scaler.scale(loss * (math.inf if skips and wire else 1.0)).backward()
        if wire or not skips:
            scaler.step(sgd)
        scaler.update()

    for first in (0, 10):
        with Join([model, scaler], enable=wire is not None):
            for number in range(mine if wire else max(counts)):
                step(first + number, number == bad, float(number < mine))
        step(1000 + first, False)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@on_ranks("size")
@pytest.mark.parametrize("bad", [None, 3], ids=["", "overflow"])
@pytest.mark.parametrize(("wire", "bound"), [("fp16", 1e-3), ("int8", 3e-2)])
@pytest.mark.parametrize(("size", "counts"), [(2, (0, 4)), (4, (3, 0, 5, 1))])
def test_epochs_of_uneven_inputs_and_plain_steps_after_them(size, counts, wire, bound, bad):
    start = nn.utils.parameters_to_vector(mlp(*WIDTHS).parameters()).detach()
    mine, true = _uneven(wire, counts, bad), _uneven(None, counts, bad)
    assert relative(mine - start, true - start) < bound
    assert agreed(mine)


# -- bad input -------------------------------------------------------------------------------------


@on_ranks(1)
def test_power_sgd_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"PowerSGD cannot be joined.*error feedback keeps an inf"):
        DistGradScaler("cpu").attach_comm_hook(PowerSGDState(None))


@pytest.mark.parametrize("state", [None, "fp16", object()], ids=lambda s: type(s).__name__)
def test_what_is_no_hook_is_refused(state):
    with pytest.raises(TypeError, match=r"attach_comm_hook\(\) takes what"):
        DistGradScaler("cpu").attach_comm_hook(state)


# -- what rounding took comes back -----------------------------------------------------------------

LARGE = (19, 60, 41, 3)


@on_ranks("size")
@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize(("size", "numel"), [(2, 500), (4, 60_000)])
def test_a_bucket_of_an_optimizer_that_skips_begins_again(size, numel, every):
    """``b`` is right in float64, though every so many steps ``a``, in the same bucket, skips."""
    model = DistributedDataParallel(Given(numel, numel))
    state = comm_hooks.register_comm_hook(model, "int8")
    scaler = DistGradScaler("cpu", init_scale=2.0**10, backoff_factor=0.5)
    scaler.attach_comm_hook(state)
    a, b = (torch.optim.SGD([p], lr=1.0) for p in model.module.parts)
    true = torch.zeros(numel, dtype=torch.float64)
    for step in range(12):
        model.zero_grad()
        bad = every > 0 and step % every == every - 1
        x = inputs(step, numel, rows=1)[0]
        factor = math.inf if bad and dist.get_rank() == 0 else 1.0
        scaler.scale(model([x * factor, x])).backward()
        scaler.step(a)
        scaler.step(b)
        assert (scaler.step_was_taken(a), scaler.step_was_taken(b)) == (not bad, True)
        (residuals,) = state.state_dict()["residuals"].values()
        assert bool(residuals[1].any()) != bad
        scaler.update()
        everyone = x.double()
        dist.all_reduce(everyone)
        true -= everyone / size
    assert relative(model.module.parts[1].detach(), true) < 0.05


@on_ranks(4)
@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize("what", ["attached", "never attached", "detached"])
def test_after_inf_and_nan_all_steps_are_finite_and_right(what, ranks_per_host):
    """Of twelve means; in the second some ranks have inf and NaN."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Linear(5000, 1, bias=False))
    state = comm_hooks.register_comm_hook(model, "int8", ranks_per_host=ranks_per_host)
    scaler = DistGradScaler("cpu", init_scale=2.0**17)
    if what != "never attached":
        scaler.attach_comm_hook(state)
    sgd, found = torch.optim.SGD(model.parameters(), lr=0.0), []
    for step in range(12):
        sgd.zero_grad()
        if step == 4 and what == "detached":
            scaler.detach_comm_hook(state)
        x = inputs(step, 5000, rows=1)
        true = x[0].clone()
        dist.all_reduce(true)
        if step == 1:
            x[0, 10 + 1000 * rank] = (math.inf, math.nan)[rank % 2]
        scaler.scale(model(x).sum()).backward()
        mean = model.module.weight.grad[0] / scaler.get_scale()
        found.append(relative(mean * size, true))
        scaler.step(sgd)
        assert scaler.step_was_taken(sgd) == (step != 1)
        scaler.update()
    assert not math.isfinite(found[1])
    # An attached scaler alone tells a hook that the scale was halved.
    assert max(found[2:]) < (0.04 if what == "never attached" else 0.02)


# -- checkpoints -----------------------------------------------------------------------------------


def _trained(model: Any, *steps: int) -> Tensor:
    for step in steps:
        model.zero_grad()
        model(inputs(step, LARGE[0])).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.05).step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@on_ranks(4)
def test_a_run_goes_on_to_the_bit_where_ddp_keeps_its_buckets():
    # Else its first pass after a start has parameters in another order than all that follow.
    (whole, state), *others = (
        wrapped(mlp(*LARGE), "int8", find_unused_parameters=True) for _ in range(3)
    )
    _trained(whole, 0, 1, 2, 3)
    weights, saved = through_a_file((whole.module.state_dict(), state.state_dict()))
    names = {n for key in saved["residuals"] for n in key.partition(": ")[2].split(", ")}
    assert {"0.weight", "2.weight"} <= names, "those of buckets that are not too small"
    for model, _ in others:
        model.module.load_state_dict(weights)
    (resumed, its_state), (forgotten, _) = others
    its_state.load_state_dict(saved)
    expected = _trained(whole, 4, 5, 6, 7)
    assert torch.equal(_trained(resumed, 4, 5, 6, 7), expected)
    assert not torch.equal(_trained(forgotten, 4, 5, 6, 7), expected)


@on_ranks(4)
@pytest.mark.parametrize(
    ("whose", "says"),
    [
        ("other hosts", r"of 4 in 2x2, saved by 4 ranks, and this is rank . of 4 in 4x1"),
        ("another rank", "residuals are those of rank"),
        ("its own", ""),
    ],
)
def test_residuals_of_another_rank_or_of_other_hosts_are_dropped(whose, says):
    states = []
    for ranks_per_host in (2 if whose == "other hosts" else 1, 1):
        model, state = wrapped(mlp(*LARGE), "int8", ranks_per_host=ranks_per_host)
        model(inputs(0, LARGE[0])).sum().backward()
        states.append(state)
    saved, state = states
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, saved.state_dict())
    told = pytest.warns(UserWarning, match=says) if says else contextlib.nullcontext()
    with told:
        state.load_state_dict(given[dist.get_rank() - (whose == "another rank")])
    assert bool(state.state_dict()["residuals"]) is (whose == "its own")


@on_ranks(2)
def test_what_is_no_state_is_refused_and_one_without_names_is_not_saved():
    _, state = wrapped(mlp(*LARGE), "int8")
    damaged = {**state.state_dict(), "residuals": {"a": [torch.full((3,), math.nan)]}}
    for wrong in ({}, {"version": 1}, damaged):
        with pytest.raises(ValueError, match=r"load what hook\.state_dict\(\) returned"):
            state.load_state_dict(wrong)
    model, _ = wrapped(mlp(*LARGE), None)
    nameless = comm_hooks.CommHook("int8")
    model.register_comm_hook(nameless, comm_hooks.fp16_compress_hook)
    model(inputs(0, LARGE[0])).sum().backward()
    with pytest.raises(RuntimeError, match=r"Call hook\.name_parameters"):
        nameless.state_dict()


@on_ranks("size")
@pytest.mark.parametrize(("size", "numel"), [(2, 3000), (4, 60_000)])
def test_what_rounding_took_does_not_add_up_and_waits_while_a_parameter_is_not_used(size, numel):
    """The error of the sum of all means of each layer, where the second is used in half of them."""
    model: Any = DistributedDataParallel(Given(numel, numel), find_unused_parameters=True)
    comm_hooks.register_comm_hook(model, "int8")
    totals, exact = torch.zeros(2, numel), torch.zeros(2, numel)
    everyone = torch.randn(size, 2, numel, generator=torch.Generator().manual_seed(0))
    found = []
    for step in range(32):
        used = 2 - step % 2
        model.zero_grad()
        model(everyone[dist.get_rank(), :used]).backward()
        for place, parameter in enumerate([*model.module.parts][:used]):
            totals[place] += parameter.grad
            exact[place] += everyone[:, place].mean(0)
        found.append([*map(relative, totals, exact)])
    always, sometimes = found[-1]
    # 32 errors of the same kind would make 32 of one, and independent ones 5.7.
    assert always <= 2 * found[0][0] / 32
    # Twice as few steps make twice the relative error; lost feedback sixty times.
    assert sometimes < 4 * always
