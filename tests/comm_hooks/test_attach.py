"""A scaler joined with a hook: the same skips as without."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, comm_hooks
from distamp.comm_hooks import WIRE_FORMATS
from tests.comm_hooks.training import inputs, mlp
from tests.ranks import subgroup

WIDTHS = (17, 40, 30, 3)
JOINED = list(WIRE_FORMATS)
STEPS = 5


@dataclass(frozen=True)
class Fault:
    """``value`` in one gradient of one rank, before the ranks exchange it."""

    value: float
    rank: int
    step: int = 2
    parameter: int = 1


def _optimizer(layout: str, parameters: Any) -> torch.optim.Optimizer:
    if layout == "ZeRO":
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=1e-3)
    fused = {"fused": True} if layout == "fused" else {}
    return torch.optim.Adam(parameters, lr=1e-3, **fused)


def _model(layout: str) -> Any:
    group = None
    if layout == "two groups":
        groups = [subgroup([0, 1]), subgroup([2, 3])]
        group = groups[dist.get_rank() // 2]
    net = mlp(*WIDTHS)
    if layout == "experts":
        ignored = ["4.weight", "4.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    return DistributedDataParallel(
        net,
        bucket_cap_mb=0.002,
        process_group=group,
        gradient_as_bucket_view=layout == "views",
    )


def _plant(model: nn.Module, fault: Fault | None, now: list[int]) -> None:
    if fault is None or dist.get_rank() != fault.rank:
        return

    def spoil(gradient: Tensor) -> Tensor:
        if now[0] != fault.step:
            return gradient
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = fault.value
        return spoilt

    list(model.parameters())[fault.parameter].register_hook(spoil)


def _train(layout: str, wire: str, attach: bool, fault: Fault | None) -> tuple[Any, ...]:
    """What each step did, whether the parameters are finite, and their values."""
    model = _model(layout)
    state = comm_hooks.register(model, wire)
    group = model.process_group if layout == "two groups" else None
    scaler = DistGradScaler("cpu", init_scale=1024.0, growth_interval=2, process_group=group)
    if attach:
        scaler.attach(state)
    optimizers = [_optimizer(layout, model.parameters())]
    if layout == "two optimizers":
        parameters = list(model.parameters())
        optimizers = [_optimizer(layout, half) for half in (parameters[:3], parameters[3:])]
    now = [0]
    _plant(model, fault, now)
    did = []
    for step in range(STEPS):
        now[0] = step
        for optimizer in optimizers:
            optimizer.zero_grad()
        if layout == "accumulate":
            with model.no_sync():
                scaler.scale(model(inputs(step, WIDTHS[0])).square().mean()).backward()
        scaler.scale(model(inputs(step + 100, WIDTHS[0])).square().mean()).backward()
        if layout == "clip":
            scaler.clip_grad_norm_(optimizers[0], 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        did.append((*(scaler.stepped(o) for o in optimizers), scaler.get_scale()))
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    return did, bool(values.isfinite().all()), values


LAYOUTS = ["plain", "fused", "views", "accumulate", "clip", "two optimizers", "two groups"]


def _compare(cells: list[tuple[str, str, Fault | None]]) -> list[Any]:
    """The cells in which a joined scaler does something else than one by itself."""
    wrong: list[Any] = []
    for layout, wire, fault in cells:
        did, finite, values = _train(layout, wire, True, fault)
        did_without, _, values_without = _train(layout, wire, False, fault)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, did)
        same = layout == "two groups" or all(each == everyone[0] for each in everyone)
        skips = sum(not all(each[:-1]) for each in did)
        mine = fault is not None and (
            layout != "two groups" or fault.rank // 2 == dist.get_rank() // 2
        )
        # A hook that hears of skips and scales feeds other errors back than one that is not.
        fed_back = WIRE_FORMATS[wire].needs_error_feedback
        if not (
            did == did_without
            and same
            and finite
            and skips == int(mine)
            and (fed_back or torch.allclose(values, values_without, rtol=1e-5, atol=1e-7))
        ):
            wrong.append((layout, wire, fault, did, did_without, same))
    return wrong


def _cells() -> list[tuple[str, str, Fault | None]]:
    faults = [
        Fault(value, rank, parameter=parameter)
        for value, rank, parameter in itertools.product(
            (float("inf"), float("nan")), range(4), (0, 5)
        )
    ]
    return [(*each[:2], each[2]) for each in itertools.product(LAYOUTS, JOINED, [None, *faults])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_steps_are_skipped(ranks4, layout):
    cells = [cell for cell in _cells() if cell[0] == layout]
    # The slow test has every combination.
    some = cells[::9] if layout == "plain" else cells[5::25]
    assert layout != "plain" or {cell[1] for cell in some} == set(JOINED)
    assert ranks4.run(_compare, some, timeout=240) == [[]] * 4


# -- bad input --------------------------------------------------------------------------------


def test_power_sgd_is_refused_with_the_reason(ranks1):
    assert "error feedback keeps an inf" in ranks1.run(_attach_power_sgd)[0]


def _attach_power_sgd() -> str:
    with pytest.raises(ValueError, match="PowerSGD cannot be joined") as error:
        DistGradScaler("cpu").attach(PowerSGDState(None))
    return str(error.value)


@pytest.mark.parametrize("state", [None, "fp16", object()], ids=lambda s: type(s).__name__)
def test_what_is_no_hook_is_refused(state):
    with pytest.raises(TypeError, match=r"attach\(\) takes what"):
        DistGradScaler("cpu").attach(state)
