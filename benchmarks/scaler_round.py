"""A round of scale, unscale, step and update of DistGradScaler beside torch's scalers.

    OMP_NUM_THREADS=1 python -m benchmarks.scaler_round [--ranks 1 2 4] [--rounds 40] [--fused]
        [--parameters 10 100 1000 10000] [--elements 25000] [--device cuda]

The optimizers' step does nothing, so that only the scaler is timed. All scalers see the same
gradients in turn; between two turns the gradients are multiplied by the loss scale again and the
ranks wait for each other, both untimed. A round takes as long as its slowest rank. On several ranks
GradScaler sends nothing.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from benchmarks.common import Timings, command, interleave, median, ratio, slowest, table
from distamp import DistGradScaler
from tests.ranks import RankPool

SCALE = 65536.0
OURS = "distamp"
SCALERS: dict[str, Any] = {
    OURS: DistGradScaler,
    "ShardedGradScaler": ShardedGradScaler,
    "GradScaler": torch.amp.GradScaler,
}
PEERS = [f"of {name}" for name in SCALERS if name != OURS]
HEADER = ["ranks", "parameters", "elements", "optimizers", "ms", *PEERS]


class NoStep(torch.optim.Optimizer):
    """An optimizer whose step does nothing."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


class NoFusedStep(NoStep):
    """As `NoStep`; says, as torch's fused optimizers do, that it divides and skips by itself."""

    _step_supports_amp_scaling = True


def compared(
    ranks: int,
    cases: Iterable[tuple[int, int, int, int]],
    fused: bool = False,
    device: str = "cpu",
) -> Iterator[list[str]]:
    """Yield a row of `HEADER` for each case: parameters, their elements, optimizers, rounds."""
    with RankPool(ranks, timeout=600) as pool:
        for parameters, elements, optimizers, rounds in cases:
            given = parameters, elements, optimizers, rounds, fused, device
            ours, *peers = slowest(pool.run(_measure, *given)).values()
            known = [f"{ranks}", f"{parameters:,}", f"{parameters * elements:,}", f"{optimizers}"]
            beside = [ratio(ours, each) for each in peers]
            yield [*known, median(ours), *beside]


def _measure(
    parameters: int, elements: int, optimizers: int, rounds: int, fused: bool, device: str
) -> Timings:
    """Return the times of all scalers on this rank."""
    given = [torch.zeros(elements, device=device, requires_grad=True) for _ in range(parameters)]
    gradients = [torch.full((elements,), SCALE, device=device) for _ in given]
    for parameter, gradient in zip(given, gradients, strict=True):
        parameter.grad = gradient
    kind = NoFusedStep if fused else NoStep
    opts = [kind(given[i::optimizers]) for i in range(optimizers)]

    def before() -> None:
        # A fused optimizer leaves gradients scaled.
        torch._foreach_mul_(gradients, SCALE if gradients[0][0] < SCALE else 1.0)
        dist.barrier()

    loss = torch.ones((), device=device, requires_grad=True) * 1.0

    def turn(name: str) -> Callable[[], None]:
        scaler, together = SCALERS[name](device, init_scale=SCALE), name == OURS and optimizers > 1

        def run() -> None:
            scaler.scale(loss)
            take(scaler, opts, together)

        return run

    return interleave({name: turn(name) for name in SCALERS}, rounds, before=before)


def take(scaler: Any, optimizers: Sequence[torch.optim.Optimizer], together: bool) -> None:
    """Step and update, by one `step_all` or one optimizer after the other."""
    if together:
        scaler.step_all(optimizers)
    else:
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()


def main(
    *,
    ranks: Sequence[int] = (1, 2, 4),
    rounds: int = 40,
    fused: bool = False,
    parameters: Sequence[int] = (1000, 20),
    optimizers: Sequence[int] = (1, 4),
    elements: int = 25_000,
    device: str = "cpu",
) -> None:
    """Compare a round of DistGradScaler with torch's scalers.

    Args:
        ranks: How many; one number or several.
        rounds: Of each row; ten times as many below 1 M elements.
        fused: Time fused optimizers' check alone.
        parameters: How many; one number or several.
        optimizers: How many share them; one number or several.
        elements: Of each parameter.
        device: Of parameters, gradients and scale.
    """
    cases = [
        (size, elements, count, rounds * (10 if size * elements < 10**6 else 1))
        for size in parameters
        for count in optimizers
    ]
    rows = (compared(size, cases, fused, device) for size in ranks)
    table(HEADER, itertools.chain.from_iterable(rows))


if __name__ == "__main__":
    command(main)
