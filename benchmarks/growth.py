"""The growth of the scaler's round and of the hooks' messages, compared with torch in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.growth [--only parameters optimizers ranks tensors hosts]

The benchmark prints the tables of docs/results/growth.md. The round is that of `scaler_round`, with
parameters of 16 elements. The messages come from a training step of `comm_hooks_step`. The ranks
share the cores of this machine, and hosts are groups of ranks on it (``ranks_per_host=``). On
several ranks GradScaler sends nothing.
"""

from collections.abc import Callable, Iterator, Sequence

from benchmarks.comm_hooks_step import FP32, TORCH, time_steps
from benchmarks.common import format_median, format_ratio, print_table, run_command, slowest_times
from benchmarks.scaler_round import HEADER, Case, measure_cases
from tests.ranks import RankPool

Rows = Iterator[list[str]]

ELEMENTS = 16
# Widths of the layers of a model with many small tensors, and of a model with many bytes.
NARROW = 16
WIDE = 1024
PARAMETER_COUNTS = (10, 100, 1_000, 10_000)
FORMATS = ("fp16", "int8")


def parameters() -> Rows:
    """The round with increasing numbers of parameters."""
    sizes = [(count, 1) for count in PARAMETER_COUNTS]
    return _measure_rounds([1], sizes)


def optimizers() -> Rows:
    """The round with increasing numbers of optimizers: one `step_all`, and torch's loop."""
    sizes = [(640, count) for count in (1, 4, 16, 64)]
    return _measure_rounds([1, 2], sizes)


def ranks() -> Rows:
    """The round with increasing numbers of ranks."""
    return _measure_rounds([1, 2, 4, 8], [(100, 1)])


def _measure_rounds(world_sizes: Sequence[int], sizes: Sequence[tuple[int, int]]) -> Rows:
    """Yield rows for numbers of parameters and optimizers on each number of ranks."""
    for world_size in world_sizes:
        cases = []
        for num_params, num_optimizers in sizes:
            rounds = 200_000 // num_params // world_size**2
            rounds = max(20, min(300, rounds))
            cases.append(Case(num_params, ELEMENTS, num_optimizers, rounds))
        yield from measure_cases(world_size, cases)


def tensors() -> Rows:
    """A step with increasing numbers of parameters, on two ranks. Bytes of a rank, of fp32's."""
    for count in PARAMETER_COUNTS:
        layers = count // 2
        yield _measure_step(f"{count:,} parameters", 2, NARROW, layers, None)


def hosts() -> Rows:
    """A step of 8 MB with increasing numbers of hosts of two ranks.

    The columns of bytes count the messages of a rank to other hosts, or to the second rank if there
    is only one host, as a fraction of an fp32 ring's.
    """
    for count in (1, 2, 3, 4):
        world_size = 2 * count
        yield _measure_step(f"{count} x 2", world_size, WIDE, 2, 2)


def _measure_step(
    name: str, world_size: int, width: int, layers: int, ranks_per_host: int | None
) -> list[str]:
    """Return the row of a training step."""
    with RankPool(world_size, timeout=600) as pool:
        results = pool.run(time_steps, FORMATS, 15, width, layers, ranks_per_host)
    times = slowest_times([rank_times for rank_times, _ in results])
    _, sent = results[0]
    row = [name, str(world_size), format_median(times[TORCH])]
    for comm_format in FORMATS:
        row.append(format_ratio(times[comm_format], times[TORCH]))
    for comm_format in FORMATS:
        ratio = sent[comm_format] / sent[FP32]
        row.append(f"{ratio:.2f}")
    return row


STEP_HEADER = [
    *("", "ranks", "ms, torch's hook", "fp16, ratio to torch's", "int8, ratio to torch's"),
    *("fp16 bytes", "int8 bytes"),
]
TABLES: dict[Callable[[], Rows], list[str]] = {
    parameters: HEADER,
    optimizers: HEADER,
    ranks: HEADER,
    tensors: STEP_HEADER,
    hosts: STEP_HEADER,
}


def main(*, only: Sequence[str] = ()) -> None:
    """Print the growth of the costs: medians, and ratios with quartiles.

    Args:
        only: Tables to print. The default is all of them.
    """
    for measure, header in TABLES.items():
        if only and measure.__name__ not in only:
            continue
        heading = measure.__name__.capitalize()
        text = (measure.__doc__ or "").replace("\n    ", "\n").strip()
        print_table(header, measure(), f"## {heading}\n\n{text}\n")


if __name__ == "__main__":
    run_command(main)
