"""A scaler attached to a hook, with uneven inputs: it trains on, as torch's DDP does with Join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, comm_hooks
from tests.comm_hooks.training import agreed, inputs, mlp

WIDTHS = (17, 40, 30, 3)
EPOCHS = 3
PLAIN = 2
# Relative L2 error of the parameters' changes, beside torch's DDP, which rounds nothing.
BOUNDS = {"fp16": 1e-3, "int8": 3e-2}


class _Run:
    """One model and its optimizers, trained in epochs of uneven inputs and then in plain steps."""

    def __init__(self, wire: str | None, halves: bool, ordered: bool) -> None:
        # DDP orders buckets by rank 0's first gradients, unless it looks for unused parameters.
        self.model = DistributedDataParallel(
            mlp(*WIDTHS), bucket_cap_mb=0.002, find_unused_parameters=ordered
        )
        parameters = list(self.model.parameters())
        parts = [parameters[:3], parameters[3:]] if halves else [parameters]
        self.optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
        self.hook: Any = None
        self.scaler: DistGradScaler | None = None
        self.overflows = False
        if wire is not None:
            self.hook = comm_hooks.register(self.model, wire)
            self.scaler = DistGradScaler("cpu", init_scale=1024.0, growth_interval=2)
            self.scaler.attach(self.hook)
            parameters[1].register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor:
        if not self.overflows:
            return gradient
        gradient = gradient.clone()
        gradient[0] = float("inf")
        return gradient

    def step(self, number: int, overflows: bool, factor: float = 1.0) -> None:
        """Take a step; where there is no scaler, leave out the optimizer that overflows."""
        scaler = self.scaler
        self.overflows = overflows and factor != 0.0
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.model(inputs(number, WIDTHS[0])).square().mean() * factor
        if scaler is None:
            loss.backward()
            for optimizer in self.optimizers[int(overflows) :]:
                optimizer.step()
            return
        scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            scaler.step(optimizer)
        scaler.update()

    def train(self, counts: Sequence[int], overflow_at: int | None, joined: bool = True) -> None:
        """Epochs with Join; or with a loss of zero on the ranks that have no more inputs."""
        mine, most = counts[dist.get_rank()], max(counts)
        steps = mine if joined else most
        for epoch in range(EPOCHS):
            both = [self.model] if self.scaler is None else [self.model, self.scaler]
            with Join(both, enable=joined):
                for number in range(steps):
                    overflows = number == overflow_at
                    self.step(10 * epoch + number, overflows, float(number < mine))
        for number in range(PLAIN):
            self.step(1000 + number, False)

    def values(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()


def _beside_torch(
    wire: str, counts: Sequence[int], halves: bool, overflow_at: int | None
) -> tuple[float, bool, bool, Any]:
    start = nn.utils.parameters_to_vector(mlp(*WIDTHS).parameters()).detach()
    mine, zeros, torchs = (_Run(each, halves, counts[0] == 0) for each in (wire, wire, None))
    mine.train(counts, overflow_at)
    zeros.train(counts, overflow_at, joined=False)
    torchs.train(counts, overflow_at)
    error = (mine.values() - torchs.values()).norm() / (torchs.values() - start).norm()
    assert mine.scaler is not None
    return (
        error.item(),
        agreed(mine.values()),
        torch.equal(mine.values(), zeros.values()),
        mine.scaler.state_dict(),
    )


# A rank without inputs sends zeros, as one with a loss of zero does: fp16, without residuals,
# ends at the same bits. It hears of no scale until Join ends, so int8's residuals come at another.
def _check(results: Sequence[Any], wire: str) -> None:
    for error, same, equal, state in results:
        assert error < BOUNDS[wire]
        assert same
        assert equal or wire != "fp16"
        assert state == results[0][3]


@pytest.mark.parametrize(
    ("halves", "overflow_at"),
    [(False, None), (False, 3), (True, 3)],
    ids=["", "overflow", "overflow-of-one-optimizer"],
)
@pytest.mark.parametrize("wire", ["fp16", "int8"])
@pytest.mark.parametrize("counts", [(3, 5), (5, 3), (1, 5), (0, 4)], ids=str)
def test_epochs_of_uneven_inputs_and_plain_steps_after_them(
    ranks2, counts, wire, halves, overflow_at
):
    results = ranks2.run(_beside_torch, wire, counts, halves, overflow_at)
    _check(results, wire)


@pytest.mark.parametrize("overflow_at", [None, 3], ids=["", "overflow"])
@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_ranks_that_run_out_of_inputs_one_after_another(ranks4, wire, overflow_at):
    _check(ranks4.run(_beside_torch, wire, (3, 0, 5, 1), False, overflow_at), wire)
