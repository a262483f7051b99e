"""clip_grad_norm_ on simulated devices, where ranks differ after their first clip.

The messages of later clips are read on the host a call late, so that what a rank does meanwhile
must follow from what all ranks know. References are roots that can be taken by hand.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import DistGradScaler
from tests.scaler.steps import error_of

SCHEDULES = [("late", 0), ("late_others", 0), ("random", 11)]


class _Stage:
    """One stage of a pipeline: parameters of its own, all of value 1, and lr 1."""

    def __init__(self, *sizes: int, **settings: Any) -> None:
        self.scaler = DistGradScaler("sim", init_scale=64.0, **settings)
        self.parameters: list[nn.Parameter] = []
        self.optimizer: Any = None
        for size in sizes:
            self.add(size)

    def add(self, size: int) -> None:
        """Add a parameter in a group of its own."""
        device = f"sim:{dist.get_rank()}"
        self.parameters.append(nn.Parameter(torch.ones(size, device=device)))
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        else:
            self.optimizer.add_param_group({"params": self.parameters[-1:]})

    def step(
        self, factor: float = 1.0, clipped: Any = None, clips: bool = True
    ) -> tuple[float, bool, list[float]]:
        """One iteration whose gradients are all ``factor``; norm, whether it stepped, change."""
        before = [float(p.detach().sum()) for p in self.parameters]
        self.optimizer.zero_grad()
        loss = torch.stack([p.sum() for p in self.parameters]).sum() * factor
        self.scaler.scale(loss).backward()
        norm = torch.zeros(())
        if clips:
            given = clipped or self.optimizer
            norm = self.scaler.clip_grad_norm_(given, 1.0, sharded=lambda _: True)
        self.scaler.step(self.optimizer)
        stepped = self.scaler.stepped(self.optimizer)
        self.scaler.update()
        after = [float(p.detach().sum()) for p in self.parameters]
        pairs = zip(before, after, self.parameters, strict=True)
        changes = [(old - new) / p.numel() for old, new, p in pairs]
        return norm.item(), stepped, changes


def _check(ranks: list[list[Any]], counts: list[int], may_skip: set[int]) -> None:
    """Each norm is the root of the number of elements, or all ranks skip where they may."""
    for step, count in enumerate(counts):
        norms, stepped, changes = zip(*(rank[step] for rank in ranks), strict=True)
        assert len(set(stepped)) == 1, (step, stepped)
        if not stepped[0]:
            assert step in may_skip, (step, norms)
            assert not any(map(math.isfinite, norms)), (step, norms)
            assert not any(map(any, changes))
            continue
        assert norms == pytest.approx([math.sqrt(count)] * len(ranks), rel=1e-6), step
        for change in changes:
            assert change == pytest.approx([1 / math.sqrt(count)] * len(change), rel=1e-3), step


def _added(ranks: list[int], sizes: tuple[int, int]) -> Any:
    """After three clips stages add parameters, and clip three times more; then again."""
    rank = dist.get_rank()
    stage = _Stage(3 + rank)
    found = []
    for number in range(9):
        if number in (3, 6) and rank in ranks:
            stage.add(sizes[rank])
        found.append(stage.step())
    return found


def test_stages_that_all_add_other_parameters_clip_by_the_norm_of_all(sim2):
    for schedule, seed in SCHEDULES:
        found = sim2.run(_added, [0, 1], (5, 6), schedule=schedule, seed=seed)
        _check(found, [7] * 3 + [18] * 3 + [29] * 3, may_skip={3, 6})


def _clip_of_what_nobody_has_seen() -> Any:
    """Rank 1 first clips parameters of no known optimizer, which is refused, and then goes on."""
    stage = _Stage(3 + dist.get_rank())
    errors, found = [], []
    for step in range(6):
        clipped = None
        if step == 0 and dist.get_rank() == 1:
            clipped = stage.parameters

        def one_step(clipped: Any = clipped) -> None:
            found.append(stage.step(clipped=clipped))

        error = error_of(one_step)
        errors.append(None if error is None else error[1])
        if error is not None:
            stage.scaler.update(64.0)
    return errors, found[-3:], [p.detach().cpu() for p in stage.parameters]


def test_a_clip_that_one_rank_refuses_before_it_knows_the_optimizer_stops_every_rank(sim2):
    for schedule, seed in SCHEDULES:
        ranks = sim2.run(_clip_of_what_nobody_has_seen, schedule=schedule, seed=seed)
        steps = [[number for number, error in enumerate(each[0]) if error] for each in ranks]
        assert steps[0] == steps[1], ranks
        assert steps[0] in ([0], [1])
        assert all("no optimizer this scaler has" in str(each[0]) for each in ranks)
        _check([each[1] for each in ranks], [7] * 3, may_skip=set())
        assert ranks[0][2][0][0] == ranks[1][2][0][0]  # as many steps


def _clipped_of_several_kinds(kind: str) -> Any:
    """Gradients of two dtypes on two devices, and one that is missing; and the waits for them."""
    from tests.simulated.device import refuse

    devices = [kind, kind] if kind == "cpu" else ["sim:0", "sim:1"]
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).to(device) for device in devices]
    layers += [nn.Linear(4, 4).bfloat16().to(devices[0]), nn.Linear(4, 4).to(devices[0])]
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    scaler = DistGradScaler(kind, init_scale=64.0)
    inputs = [torch.ones(2, 4, dtype=p.dtype, device=p.device) for p in parameters[::2]]
    for number in range(3):
        # The first clip looks at what there is.
        with refuse() if number else contextlib.nullcontext():
            used = zip(layers[:3], inputs, strict=False)
            losses = [layer(x).float().square().sum().to(devices[0]) for layer, x in used]
            scaler.scale(torch.stack(losses).sum()).backward()
            norm = scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return norm, [p.detach().cpu() for p in parameters]


def test_a_clip_of_gradients_of_several_kinds_waits_for_none(sim):
    expected = sim.one(_clipped_of_several_kinds, "cpu")
    for schedule, seed in SCHEDULES:
        found = sim.one(_clipped_of_several_kinds, "sim", schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
