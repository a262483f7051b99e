"""How the scaler's round and the hooks' exchange grow, beside torch's in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.growth [--only parameters optimizers ranks message
        tensors hosts]

prints the tables of docs/results/growth.md. The round is that of `scaler_round`, over parameters of
16 elements; the exchange is a training step of `comm_hooks_step`. Ranks share this machine's cores,
and hosts are groups of ranks on it (``ranks_per_host=``). On several ranks GradScaler sends
nothing. What is calculated says so.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks import comm_hooks_step, scaler_round
from benchmarks.common import environment, markdown, ratio, slowest
from tests.ranks import RankPool

ELEMENTS = 16
# Of the layers of a model that is nothing but tensors, and of one that is nothing but bytes.
THIN, WIDE = 16, 1024


def _rounds(ranks: int, cases: Sequence[tuple[int, int]]) -> list[list[str]]:
    """A round of each case of parameters and optimizers."""
    rounds = [max(20, min(300, 200_000 // size // ranks**2)) for size, _ in cases]
    sizes = [(size, ELEMENTS, count) for size, count in cases]
    whole = [(*each, some) for each, some in zip(sizes, rounds, strict=True)]
    return list(scaler_round.compared(ranks, whole))


def parameters() -> str:
    """The round against the number of parameters."""
    rows = _rounds(1, [(count, 1) for count in (10, 100, 1_000, 10_000)])
    return markdown(scaler_round.HEADER, rows)


def optimizers() -> str:
    """The round against the number of optimizers: one `step_all`, and torch's loop."""
    cases = [(640, count) for count in (1, 4, 16, 64)]
    return markdown(scaler_round.HEADER, _rounds(1, cases) + _rounds(2, cases))


def ranks() -> str:
    """The round against the number of ranks."""
    rows = [row for size in (1, 2, 4, 8) for row in _rounds(size, [(100, 1)])]
    return markdown(scaler_round.HEADER, rows)


def message() -> str:
    """Calculated: what a rank sends for a step of four optimizers with gradients of one dtype.

    A ring passes on 2 (N - 1) pieces, a tree goes up and down log2 N levels.
    """
    rows = []
    for size in (8, 64, 1_024):
        waits = f"{2 * (size - 1):,} or {2 * math.ceil(math.log2(size))}"
        ours = ["1", "8 (32 on a device)", waits]
        sharded = ["4", "16", f"four times {waits}"]
        rows += [[f"{size:,}", "distamp, `step_all`", *ours], ["", "ShardedGradScaler", *sharded]]
    return markdown(["ranks", "", "all-reduces", "bytes", "hops in a row, ring or tree"], rows)


def _exchanges(cases: Iterable[tuple[str, int, int, int, int | None]]) -> str:
    """A training step of each case: its name, ranks, width, layers and ranks on a host."""
    none, peer, wires = comm_hooks_step.NONE, comm_hooks_step.TORCH, ["fp16", "int8"]
    rows = []
    for name, size, *model in cases:
        with RankPool(size, timeout=600) as pool:
            found = pool.run(comm_hooks_step.time_steps, [none, peer, *wires], 15, *model)
        times, sent = slowest([each for each, *_ in found]), found[0][1]
        cells = [ratio(times[wire], times[peer]) for wire in wires]
        cells += [f"{sent[wire] / sent[none]:.2f}" for wire in wires]
        rows.append([name, str(size), f"{1e3 * statistics.median(times[peer]):.3g}", *cells])
    header = ["", "ranks", "ms, torch's", "fp16 of torch's", "int8 of torch's"]
    return markdown([*header, "fp16 bytes", "int8 bytes"], rows)


def tensors() -> str:
    """A step against the number of parameters, on two ranks; bytes of a rank, of fp32's."""
    counts = (10, 100, 1_000, 10_000)
    return _exchanges((f"{n:,} parameters", 2, THIN, n // 2, None) for n in counts)


def hosts() -> str:
    """A step of 8 MB against the number of hosts of two ranks.

    Bytes: what a rank sends to other hosts (on one host: to the other rank), of an fp32 ring's.
    """
    return _exchanges((f"{n} x 2", 2 * n, WIDE, 2, 2) for n in (1, 2, 3, 4))


PARTS: dict[str, Callable[[], str]] = {
    part.__name__: part for part in (parameters, optimizers, ranks, message, tensors, hosts)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    print(f"{environment()}; medians, ratios with quartiles", flush=True)
    for name in parser.parse_args().only:
        says = (PARTS[name].__doc__ or "").replace("\n    ", "\n").strip()
        print(f"\n## {name.capitalize()}\n\n{says}\n\n{PARTS[name]()}", flush=True)


if __name__ == "__main__":
    main()
