"""How the scaler's round and the hooks' exchange grow, beside torch's in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.growth [--only parameters optimizers ranks tensors hosts]

prints the tables of docs/results/growth.md. The round is that of `scaler_round`, over parameters of
16 elements; the exchange is a training step of `comm_hooks_step`. Ranks share this machine's cores,
and hosts are groups of ranks on it (``ranks_per_host=``). On several ranks GradScaler sends
nothing.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from benchmarks import scaler_round
from benchmarks.comm_hooks_step import FP32, TORCH, time_steps
from benchmarks.common import command, median, ratio, slowest, table
from tests.ranks import RankPool

Rows = Iterable[list[str]]

ELEMENTS = 16
# Of the layers of a model that is nothing but tensors, and of one that is nothing but bytes.
THIN, WIDE = 16, 1024
WIRES = ("fp16", "int8")


def parameters() -> Rows:
    """The round against the number of parameters."""
    return _rounds([1], [(count, 1) for count in (10, 100, 1_000, 10_000)])


def optimizers() -> Rows:
    """The round against the number of optimizers: one `step_all`, and torch's loop."""
    return _rounds([1, 2], [(640, count) for count in (1, 4, 16, 64)])


def ranks() -> Rows:
    """The round against the number of ranks."""
    return _rounds([1, 2, 4, 8], [(100, 1)])


def _rounds(ranks: Sequence[int], sizes: Sequence[tuple[int, int]]) -> Rows:
    """A round of each number of parameters and optimizers."""

    def compared(ranks: int) -> Rows:
        rounds = (max(20, min(300, 200_000 // size // ranks**2)) for size, _ in sizes)
        cases = zip(sizes, rounds, strict=True)
        whole = [(size, ELEMENTS, count, some) for (size, count), some in cases]
        return scaler_round.compared(ranks, whole)

    return itertools.chain.from_iterable(map(compared, ranks))


def tensors() -> Rows:
    """A step against the number of parameters, on two ranks; bytes of a rank, of fp32's."""
    counts = (10, 100, 1_000, 10_000)
    return _exchanges((f"{n:,} parameters", 2, THIN, n // 2, None) for n in counts)


def hosts() -> Rows:
    """A step of 8 MB against the number of hosts of two ranks.

    Bytes: what a rank sends to other hosts (on one host: to the other rank), of an fp32 ring's.
    """
    return _exchanges((f"{n} x 2", 2 * n, WIDE, 2, 2) for n in (1, 2, 3, 4))


def _exchanges(cases: Iterable[tuple[str, int, int, int, int | None]]) -> Iterator[list[str]]:
    """A training step of each case: its name, ranks, width, layers and ranks on a host."""
    for name, size, *model in cases:
        with RankPool(size, timeout=600) as pool:
            found = pool.run(time_steps, WIRES, 15, *model)
        times, sent = slowest([each for each, _ in found]), found[0][1]
        beside = [ratio(times[wire], times[TORCH]) for wire in WIRES]
        share = [f"{sent[wire] / sent[FP32]:.2f}" for wire in WIRES]
        yield [name, str(size), median(times[TORCH]), *beside, *share]


STEP = ["", "ranks", "ms, torch's", "fp16 of torch's", "int8 of torch's"]
STEP += ["fp16 bytes", "int8 bytes"]
HEADERS: dict[Callable[[], Rows], list[str]] = {
    parameters: scaler_round.HEADER,
    optimizers: scaler_round.HEADER,
    ranks: scaler_round.HEADER,
    tensors: STEP,
    hosts: STEP,
}


def main(*, only: Sequence[str] = ()) -> None:
    """Print how cost grows: medians, and ratios with quartiles.

    Args:
        only: Which tables; all of them, if not given.
    """
    for part, header in HEADERS.items():
        if not only or part.__name__ in only:
            says = (part.__doc__ or "").replace("\n    ", "\n").strip()
            table(header, part(), f"## {part.__name__.capitalize()}\n\n{says}\n")


if __name__ == "__main__":
    command(main)
