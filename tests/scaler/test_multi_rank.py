"""What the scaler sends, counted in every layout beside what the optimizer itself sends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distamp import DistGradScaler
from tests.scaler.layouts import LAYOUTS, WORLD
from tests.scaler.reference import KINDS

IN_A_GROUP = [name for name, layout in LAYOUTS.items() if layout.group == "default"]
ADAM = "Adam for-loop"


class Training:
    """A layout with two optimizers and a scaler."""

    def __init__(self, name: str) -> None:
        self.layout = LAYOUTS[name]()
        self.optimizers = [self.layout.optimizer(KINDS[ADAM], part) for part in self.layout.parts()]
        self.layout.attach(self.optimizers)
        self.scaler = DistGradScaler("cpu", process_group=self.layout.process_group())
        self.iteration = 0

    def backward(self) -> None:
        self.layout.zero_grad(self.optimizers)
        self.layout.backward(self.scaler, self.iteration, 1, [1.0])
        self.iteration += 1

    def step(self, order: str) -> None:
        scaler, optimizers = self.scaler, self.optimizers
        if order == "unscale_ each":
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        elif order == "unscale_ together":
            scaler.unscale_(*optimizers)
        if order == "step_all":
            scaler.step_all(optimizers)
        else:
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()


def _flag_after_a_fault(name: str) -> float:
    training = Training(name)
    layout, scaler, optimizer = training.layout, training.scaler, training.optimizers[0]
    training.backward()
    if dist.get_rank() == 1:
        assert layout.plant(optimizer, float("nan"), 0)
    scaler.unscale_(optimizer)
    flag = scaler.found_inf(optimizer)
    assert flag.shape == torch.Size([])
    return flag.item()


@pytest.mark.parametrize("layout", [name for name in IN_A_GROUP if name != "DDP, two groups"])
def test_every_rank_holds_the_flag_as_a_0_d_one(ranks, layout):
    assert ranks(WORLD).run(_flag_after_a_fault, layout) == [1.0] * WORLD
