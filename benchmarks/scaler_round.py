"""A round of scale, unscale, step and update of DistGradScaler, compared with torch's scalers.

    OMP_NUM_THREADS=1 python -m benchmarks.scaler_round [--ranks 1 2 4] [--rounds 40] [--fused]
        [--parameters 10 100 1000 10000] [--elements 25000] [--device cuda]

The step of the optimizers does nothing, so only the scaler is timed. All scalers get the same
gradients in turn. Between two turns the gradients are multiplied by the loss scale again and the
ranks wait for each other, and neither is timed. A round takes as long as its slowest rank. On
several ranks GradScaler sends nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from benchmarks.common import (
    Timings,
    format_median,
    format_ratio,
    interleave,
    print_table,
    run_command,
    slowest_times,
)
from distamp import DistGradScaler
from tests.ranks import RankPool

SCALE = 65536.0
DISTAMP = "distamp"
SCALERS: dict[str, Any] = {
    DISTAMP: DistGradScaler,
    "ShardedGradScaler": ShardedGradScaler,
    "GradScaler": torch.amp.GradScaler,
}
PEERS = [name for name in SCALERS if name != DISTAMP]
HEADER = [
    *("ranks", "parameters", "elements", "optimizers", "ms"),
    *(f"ratio to {name}" for name in PEERS),
]


class NoStep(torch.optim.Optimizer):
    """An optimizer with a step that does nothing."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


class NoFusedStep(NoStep):
    """A `NoStep` with the mark of fused optimizers, which unscale and skip by themselves."""

    _step_supports_amp_scaling = True


class Case(NamedTuple):
    """The sizes of a row of the table."""

    parameters: int
    elements: int
    optimizers: int
    rounds: int


def measure_cases(
    ranks: int, cases: Iterable[Case], fused: bool = False, device: str = "cpu"
) -> Iterator[list[str]]:
    """Yield a row of `HEADER` for each case."""
    with RankPool(ranks, timeout=600) as pool:
        for case in cases:
            times = slowest_times(pool.run(_time_scalers, case, fused, device))
            elements = case.parameters * case.elements
            row = [f"{ranks}", f"{case.parameters:,}", f"{elements:,}", f"{case.optimizers}"]
            row.append(format_median(times[DISTAMP]))
            row += [format_ratio(times[DISTAMP], times[peer]) for peer in PEERS]
            yield row


def _time_scalers(case: Case, fused: bool, device: str) -> Timings:
    """Return the times of all scalers on this rank."""
    params: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    for _ in range(case.parameters):
        param = torch.zeros(case.elements, device=device, requires_grad=True)
        param.grad = torch.full((case.elements,), SCALE, device=device)
        params.append(param)
        grads.append(param.grad)
    optimizer_class = NoFusedStep if fused else NoStep
    optimizers = []
    for index in range(case.optimizers):
        optimizers.append(optimizer_class(params[index :: case.optimizers]))

    def restore_gradients() -> None:
        # A scaler does not unscale the gradients of a fused optimizer.
        is_unscaled = bool(grads[0][0] < SCALE)
        torch._foreach_mul_(grads, SCALE if is_unscaled else 1.0)
        dist.barrier()

    loss = torch.ones((), device=device, requires_grad=True) * 1.0
    rounds: dict[str, Callable[[], None]] = {}
    for name, scaler_class in SCALERS.items():
        scaler = scaler_class(device, init_scale=SCALE)
        steps_all = name == DISTAMP and case.optimizers > 1

        def run_round(scaler: Any = scaler, steps_all: bool = steps_all) -> None:
            scaler.scale(loss)
            step_optimizers(scaler, optimizers, steps_all)

        rounds[name] = run_round
    return interleave(rounds, case.rounds, setup=restore_gradients)


def step_optimizers(
    scaler: Any, optimizers: Sequence[torch.optim.Optimizer], steps_all: bool
) -> None:
    """Step the optimizers together or in turn, and update the scale."""
    if steps_all:
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
        ranks: Numbers of ranks.
        rounds: Number of rounds of each row; ten times as many below 1 M elements.
        fused: Time only the check of fused optimizers.
        parameters: Numbers of parameters.
        optimizers: Numbers of optimizers that share the parameters.
        elements: Number of elements in each parameter.
        device: Device of parameters, gradients and scale.
    """
    cases = []
    for size in parameters:
        for count in optimizers:
            is_small = size * elements < 10**6
            cases.append(Case(size, elements, count, 10 * rounds if is_small else rounds))

    def measure_all() -> Iterator[list[str]]:
        for world_size in ranks:
            yield from measure_cases(world_size, cases, fused, device)

    print_table(HEADER, measure_all())


if __name__ == "__main__":
    run_command(main)
