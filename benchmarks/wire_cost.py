"""The cost of encoding, decoding and adding a million elements in each format.

    OMP_NUM_THREADS=1 python -m benchmarks.wire_cost [--elements 6553600] [--rounds 40]
    python -m benchmarks.wire_cost --device cuda

The data are a gradient bucket of 25 MiB in blocks. On a CPU, the processor time of one thread is
compared with ``.half()`` and ``.float()``. On a GPU, the bytes that encoding and decoding move in a
second are compared with a copy.
"""

import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch

from benchmarks.common import format_median, format_ratio, interleave, print_table, run_command
from distamp.comm_hooks import COMM_FORMATS, CommFormat
from distamp.comm_hooks.collectives import CPU_CHUNK_BLOCKS, count_blocks
from distamp.comm_hooks.formats import BLOCK_NUMEL

COPY, TO_HALF, TO_FLOAT = "copy", ".half()", ".float()"


def make_calls(comm_format: CommFormat, values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return functions that encode, decode and add all elements in one format."""
    blocks = values.view(-1, BLOCK_NUMEL)
    out = torch.empty_like(blocks)
    # A CPU encodes chunks that fit into its cache, as hooks do.
    size = CPU_CHUNK_BLOCKS if values.device.type == "cpu" else count_blocks(values.numel())
    chunks = []
    for source, target in zip(blocks.split(size), out.split(size), strict=True):
        nbytes = comm_format.row_bytes(source.numel())
        data = torch.zeros(nbytes, dtype=torch.uint8, device=values.device)
        chunks.append((source, data, target))

    def encode() -> None:
        for source, data, _ in chunks:
            comm_format.encode(source, data)

    def decode() -> None:
        for _, data, target in chunks:
            comm_format.decode(data, target)

    def add() -> None:
        for _, data, target in chunks:
            comm_format.decode(data, target, accumulate=True)

    return {"encode": encode, "decode": decode, "add": add}


def main(
    *, elements: int = 25 << 18, rounds: int = 40, device: Literal["cpu", "cuda"] = "cpu"
) -> None:
    """Compare the cost of each format with torch's casts and with a copy.

    Args:
        elements: Number of elements, a multiple of 256; a GPU gets 16 times as many.
        rounds: Number of rounds of each row.
        device: Device of the elements.
    """
    is_gpu = device == "cuda"
    if is_gpu:
        elements *= 16
    values = torch.randn(elements, device=device)
    half = torch.empty_like(values, dtype=torch.float16)
    copied = torch.empty_like(values)
    contenders: dict[str, Callable[[], object]] = {
        COPY: lambda: copied.copy_(values),
        TO_HALF: lambda: half.copy_(values),
        TO_FLOAT: lambda: copied.copy_(half),
    }
    moved_bytes = {COPY: 8 * elements, TO_HALF: 6 * elements, TO_FLOAT: 6 * elements}
    for comm_format in COMM_FORMATS.values():
        for action, call in make_calls(comm_format, values).items():
            name = f"{comm_format.name} {action}"
            contenders[name] = call
            # Adding reads the fp32 values that it writes.
            fp32_passes = 2 if action == "add" else 1
            moved_bytes[name] = comm_format.row_bytes(elements) + 4 * elements * fp32_passes
    clock = time.perf_counter if is_gpu else time.thread_time
    times = interleave(contenders, rounds, warmup=5, clock=clock)
    rates = {}
    for name in contenders:
        rates[name] = [moved_bytes[name] / seconds for seconds in times[name]]
    rows = []
    for name, seconds in times.items():
        cast = TO_HALF if name.endswith("encode") else TO_FLOAT
        gigabytes = statistics.median(rates[name]) / 1e9
        row = [name, format_median(seconds, 1e12 / elements), format_ratio(seconds, times[cast])]
        row += [f"{gigabytes:.1f}", format_ratio(rates[name], rates[COPY])]
        rows.append(row)
    header = ["", "us for a million", "ratio to .half() (encode) or .float()"]
    header += ["GB/s", "ratio to a copy"]
    print_table(header, rows)


if __name__ == "__main__":
    run_command(main)
