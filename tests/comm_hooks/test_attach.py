"""A scaler attached to a hook: the same skips as without, also where inputs are uneven."""

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
from tests.comm_hooks.training import agreed, inputs, mlp, relative
from tests.on_ranks import on_ranks
from tests.ranks import subgroup

WIDTHS = (17, 40, 30, 3)


def _train(layout: str, wire: str, attach: bool, fault: tuple[float, int, int]) -> Any:
    """What each step did, and the parameters; in the third, one gradient of one rank is spoilt."""
    group, rank = None, dist.get_rank()
    if layout == "two groups":
        group = [subgroup([0, 1]), subgroup([2, 3])][rank // 2]
    model = DistributedDataParallel(mlp(*WIDTHS), bucket_cap_mb=0.002, process_group=group)
    state = comm_hooks.register(model, wire)
    scaler = DistGradScaler("cpu", init_scale=1024.0, growth_interval=2, process_group=group)
    if attach:
        scaler.attach(state)
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
        did.append((*(scaler.stepped(o) for o in optimizers), scaler.get_scale()))
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
        scaler.attach(comm_hooks.register(model, wire))
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
        DistGradScaler("cpu").attach(PowerSGDState(None))


@pytest.mark.parametrize("state", [None, "fp16", object()], ids=lambda s: type(s).__name__)
def test_what_is_no_hook_is_refused(state):
    with pytest.raises(TypeError, match=r"attach\(\) takes what"):
        DistGradScaler("cpu").attach(state)
