"""Two optimizers of which one overflows: each update of the other, beside float64.

Trainers call ``update()`` after each optimizer's step, so the scale moves while gradients of the
second optimizer wait for theirs.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainers.common import FAULT, data, in_ranks, model, needs, quiet

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("lightning")]
needs("lightning", "accelerate")

SCALE = 2.0**8
LR = 0.05
STEPS = 5


class Updates:
    """What each step moved the two halves of a model by, and what float64 says it should."""

    def __init__(self, net: nn.Sequential, fault: int) -> None:
        self.net, self.fault, self.step = net, fault, 0
        self.optimizers = [torch.optim.SGD(half.parameters(), lr=LR) for half in net[::2]]
        self.wrong: list[str] = []

    def before(self, inputs: Tensor, targets: Tensor) -> None:
        """Keep the weights, and their gradients in float64."""
        exact = copy.deepcopy(self.net).double()
        exact.zero_grad()
        (exact(inputs.double()) - targets.double()).square().mean().backward()
        self.gradients = [[p.grad.float() for p in half.parameters()] for half in exact[::2]]
        self.weights = [[p.detach().clone() for p in half.parameters()] for half in self.net[::2]]

    def plant(self) -> None:
        """Let the first half overflow."""
        if self.step == self.fault:
            self.net[0].weight.grad[0, 0] = torch.inf

    def after(self) -> None:
        """Note every update that is not float64's, to what float16 allows."""
        for number, half in enumerate(self.net[::2]):
            skipped = number == 0 and self.step == self.fault
            moved = [
                p.detach() - w for p, w in zip(half.parameters(), self.weights[number], strict=True)
            ]
            wanted = [g * (0.0 if skipped else -LR) for g in self.gradients[number]]
            off = sum((a - b).square().sum() for a, b in zip(moved, wanted, strict=True)) ** 0.5
            size = sum(b.square().sum() for b in wanted) ** 0.5
            if off > 0.02 * size:
                self.wrong.append(
                    f"step {self.step}, half {number}: off by {off:.3g} of {size:.3g}"
                )
        self.step += 1


@pytest.mark.parametrize("fault", [0, FAULT])
@pytest.mark.parametrize("clips", [False, True])
@in_ranks
def test_accelerate_unscales_both_and_then_steps_each(fault: int, clips: bool):
    quiet()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from distamp.integrations.accelerate import prepare

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    net = model()
    seen = Updates(net, fault)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    scaler = prepare(accelerator, init_scale=SCALE)
    optimizers = [accelerator.prepare(each) for each in seen.optimizers]
    inputs, targets = data(4 * STEPS).tensors
    for batch in zip(inputs.split(4), targets.split(4), strict=True):
        seen.before(*batch)
        with accelerator.autocast():
            loss = (net(batch[0]).float() - batch[1]).square().mean()
        accelerator.backward(loss)
        seen.plant()
        if clips:  # unscales both; the norm is too small to clip
            accelerator.clip_grad_norm_(net[2].parameters(), 1e6)
        for each in optimizers:
            each.step()
        seen.after()
        for each in optimizers:
            each.zero_grad()
    assert seen.wrong == [], seen.wrong
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("fault", [0, FAULT])
@in_ranks
def test_lightnings_manual_optimization_steps_one_after_the_other(fault: int):
    quiet()
    import lightning.pytorch as pl

    from distamp.integrations.lightning import MixedPrecision

    class Manual(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = model()
            self.seen = Updates(self.net, fault)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.seen.before(*batch)
            first.zero_grad()
            second.zero_grad()
            self.manual_backward((self.net(batch[0]).float() - batch[1]).square().mean())
            self.seen.plant()
            first.step()
            second.step()
            self.seen.after()

        def configure_optimizers(self) -> Any:
            return self.seen.optimizers

    precision = MixedPrecision("16-mixed", "cpu", init_scale=SCALE)
    module = Manual()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data(4 * STEPS), batch_size=4))
    assert module.seen.step == STEPS
    assert module.seen.wrong == [], module.seen.wrong
    assert precision.scaler.get_scale() == SCALE / 2
