"""Cost of the checks beyond the gradient: a guard with and without them in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.beyond [--rounds 25] [--device cuda]

One row is one check and one model of random weights. Only the guarded step is timed, not the
forward and backward passes. A comparison of replicas runs in one of 20 steps, so a turn is 20
steps. On several ranks a turn takes as long as its slowest rank. The second table has whole
training steps, and the last one counts the messages and bytes of one step. Ranks on one GPU send
their messages by gloo.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import (
    Timings,
    format_median,
    format_ratio,
    interleave,
    print_table,
    run_command,
    slowest_times,
)
from distamp import StepGuard, initialize
from launch.config import Config
from launch.model import GPT
from tests.collectives import count_collectives
from tests.ranks import RankPool

PLAIN, CHECKED = "without", "with"
EVERY = 20
VOCABULARY = 256
CHECKS: dict[str, dict[str, Any]] = {
    "check_update": {"check_update": True},
    f"check_replicas_every={EVERY}": {"check_replicas_every": EVERY},
}


class Case(NamedTuple):
    """A model and its optimizer.

    Args:
        check: A key of `CHECKS`.
        optimizer: ``fused`` or ``foreach``, of AdamW.
        parameters: The number of parameters.
        elements: The number of elements of each.
        ranks: The number of ranks, in DDP if there are several.
        steps: Steps of one turn.
        device: The device of the parameters.
    """

    check: str
    optimizer: str
    parameters: int
    elements: int
    ranks: int
    steps: int
    device: str = "cpu"


SIZES = ((24, 349_525), (300, 13_333), (300, 1_333))
CASES = [Case("check_update", "fused", *size, 1, 1) for size in SIZES]
CASES.append(Case("check_update", "foreach", 300, 13_333, 1, 1))
CASES += [Case(f"check_replicas_every={EVERY}", "fused", *size, 2, EVERY) for size in SIZES]


def guarded_steps(case: Case, settings: dict[str, Any]) -> Callable[[], None]:
    """Return a function that takes the steps of one turn."""
    weights = nn.ParameterList(torch.randn(case.elements) for _ in range(case.parameters))
    weights.to(case.device)
    model: nn.Module = weights
    if case.ranks > 1:
        model = DistributedDataParallel(weights)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.01)
    options: dict[str, bool] = {case.optimizer: True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, **options)
    guard = StepGuard(**settings)

    def steps() -> None:
        for _ in range(case.steps):
            guard.step(optimizer)
            guard.update()
        if case.device != "cpu":
            torch.accelerator.synchronize()

    return steps


def measure(case: Case, rounds: int) -> Timings:
    """Return the times with and without the check on this rank."""
    contenders = {
        PLAIN: guarded_steps(case, {}),
        CHECKED: guarded_steps(case, CHECKS[case.check]),
    }
    return interleave(contenders, rounds, setup=lambda: wait_for_all(case.device))


def wait_for_all(device: str) -> None:
    """Wait until the device of each rank is idle."""
    if device != "cpu":
        torch.accelerator.synchronize()
    dist.barrier()


TRAINING: dict[str, dict[str, Any]] = {
    "check_update": {"check_update": True},
    "check_replicas_every=100": {"check_replicas_every": 100},
    "snapshots(every=50)": {"snapshots": 50},
    "all three": {"check_update": True, "check_replicas_every": 100, "snapshots": 50},
}


def training_steps(settings: dict[str, Any], device: str) -> Callable[[], None]:
    """Return a function that takes 100 training steps of the launcher's GPT in DDP."""
    torch.manual_seed(0)
    config = Config(layers=2, d_model=96, heads=4, seq_len=64)
    model = DistributedDataParallel(GPT(config, VOCABULARY).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options = dict(settings)
    interval = options.pop("snapshots", 0)
    amp = initialize(model, optimizer, "fp32", **options)
    snapshots = amp.snapshots(every=interval) if interval else None
    tokens = torch.randint(VOCABULARY, (4, config.seq_len)).to(device)

    def steps() -> None:
        for _ in range(100):
            amp.zero_grad()
            logits = amp.model(tokens)
            amp.backward(nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
            amp.step(max_norm=1.0)
            if snapshots is not None:
                snapshots.record()
        if device != "cpu":
            torch.accelerator.synchronize()

    return steps


def measure_training(rounds: int, device: str) -> Timings:
    """Return the times of 100 training steps without and with each check on this rank."""
    contenders = {PLAIN: training_steps({}, device)}
    for name, settings in TRAINING.items():
        contenders[name] = training_steps(settings, device)
    return interleave(contenders, rounds, warmup=1, setup=lambda: wait_for_all(device))


def count_messages(check: str, device: str) -> list[str]:
    """Return messages and bytes of a step without and with a check."""
    case = Case(check, "fused", 24, 1_333, 2, 1, device)
    cells: list[str] = []
    every_step = {"check_replicas_every": 1} if "replicas" in check else CHECKS[check]
    for settings in ({}, every_step):
        step = guarded_steps(case, settings)
        for _ in range(3):
            step()
        with count_collectives() as collectives:
            step()
        cells.append(f"{collectives.count}, {collectives.bytes} bytes")
    return cells


def main(*, rounds: int = 25, device: str = "cpu") -> None:
    """Measure the checks.

    Args:
        rounds: The number of turns of each row.
        device: The device of the models.
    """

    def time_rows() -> Iterator[list[object]]:
        for case in (case._replace(device=device) for case in CASES):
            pool = pair if case.ranks > 1 else one_rank
            timings = slowest_times(pool.run(measure, case, rounds))
            millions = case.parameters * case.elements / 1e6
            yield [
                case.check,
                case.optimizer,
                f"{millions:.1f} M in {case.parameters}",
                case.ranks,
                format_median(timings[PLAIN], 1e3 / case.steps),
                format_ratio(timings[CHECKED], timings[PLAIN]),
            ]

    def training_rows() -> Iterator[list[object]]:
        timings = slowest_times(pair.run(measure_training, max(3, rounds // 3), device))
        for name in TRAINING:
            ratio = format_ratio(timings[name], timings[PLAIN])
            yield [name, format_median(timings[PLAIN], 10.0), ratio]

    def message_rows() -> Iterator[list[object]]:
        for check in CHECKS:
            yield [check, *pair.run(count_messages, check, device)[0]]

    with RankPool(1, timeout=600) as one_rank, RankPool(2, timeout=600) as pair:
        header = ["check", "AdamW", "elements", "ranks", "ms a step without", "with, of without"]
        print_table(header, time_rows())
        header = ["check", "ms a step without", "with, of without"]
        print_table(header, training_rows(), "A training step of the launcher's GPT on two ranks")
        print_table(["check", PLAIN, CHECKED], message_rows(), "Messages and bytes of one step")


if __name__ == "__main__":
    run_command(main)
