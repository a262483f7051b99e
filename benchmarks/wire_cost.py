"""What a million elements cost to encode, decode and add up in each format, beside torch's casts.

    OMP_NUM_THREADS=1 python -m benchmarks.wire_cost [--elements 6553600] [--rounds 40]
    python -m benchmarks.wire_cost --device cuda

A gradient bucket of 25 MiB in blocks. On a CPU one thread's processor time stands beside that of
``.half()`` and ``.float()``, on a GPU the bytes that encoding and decoding move in a second beside
those of a copy.
"""

import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch

from benchmarks.common import command, interleave, median, ratio, table
from distamp.comm_hooks import COMM_FORMATS, CommFormat
from distamp.comm_hooks.collectives import CPU_CHUNK_BLOCKS, count_blocks
from distamp.comm_hooks.formats import BLOCK_NUMEL

COPY = "copy"


def calls_of(wire: CommFormat, values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return functions that encode, decode and add all elements in one format."""
    blocks = values.view(-1, BLOCK_NUMEL)
    out = torch.empty_like(blocks)
    # A CPU encodes chunks that fit into its cache, as hooks do.
    size = CPU_CHUNK_BLOCKS if values.device.type == "cpu" else count_blocks(values.numel())
    chunks = []
    for source, target in zip(blocks.split(size), out.split(size), strict=True):
        nbytes = wire.row_bytes(source.numel())
        data = torch.zeros(nbytes, dtype=torch.uint8, device=values.device)
        chunks.append((source, data, target))

    def encode() -> None:
        for source, data, _ in chunks:
            wire.encode(source, data)

    def decode() -> None:
        for _, data, target in chunks:
            wire.decode(data, target)

    def add() -> None:
        for _, data, target in chunks:
            wire.decode(data, target, accumulate=True)

    return {"encode": encode, "decode": decode, "add": add}


def main(
    *, elements: int = 25 << 18, rounds: int = 40, device: Literal["cpu", "cuda"] = "cpu"
) -> None:
    """Compare what each format costs with torch's casts, and with a copy.

    Args:
        elements: On a GPU 16 times as many.
        rounds: Of each.
        device: Where they lie.
    """
    gpu = device == "cuda"
    elements *= 16 if gpu else 1
    values = torch.randn(elements, device=device)
    half, other = torch.empty_like(values, dtype=torch.float16), torch.empty_like(values)
    contenders: dict[str, Callable[[], object]] = {
        COPY: lambda: other.copy_(values),
        ".half()": lambda: half.copy_(values),
        ".float()": lambda: other.copy_(half),
    }
    moved = {COPY: 8 * elements, ".half()": 6 * elements, ".float()": 6 * elements}
    for wire in COMM_FORMATS.values():
        row = wire.row_bytes(elements)
        for what, call in calls_of(wire, values).items():
            contenders[f"{wire.name} {what}"] = call
            moved[f"{wire.name} {what}"] = row + 4 * elements * (2 if what == "add" else 1)
    clock = time.perf_counter if gpu else time.thread_time
    times = interleave(contenders, rounds, warmup=5, clock=clock)
    rates = {name: [moved[name] / each for each in times[name]] for name in contenders}
    rows = []
    for name, each in times.items():
        cast = ".half()" if name.endswith("encode") else ".float()"
        speed = f"{statistics.median(rates[name]) / 1e9:.1f}"
        beside = ratio(each, times[cast]), speed, ratio(rates[name], rates[COPY])
        rows.append([name, median(each, 1e12 / elements), *beside])
    header = ["", "us for a million", "of .half() (encode) or .float()", "GB/s", "of a copy's"]
    table(header, rows)


if __name__ == "__main__":
    command(main)
