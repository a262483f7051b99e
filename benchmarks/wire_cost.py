"""What a million elements cost to encode, decode and add up in each format, beside torch's casts.

    OMP_NUM_THREADS=1 python -m benchmarks.wire_cost [--elements 6553600] [--rounds 40]
    python -m benchmarks.wire_cost --device cuda

A gradient bucket of 25 MiB, in memory of the caller's own on both sides; the encoding divides by 8
as well. On a CPU one thread's processor time stands beside that of ``.half()`` and ``.float()``, on
a GPU the bytes that encoding and decoding move in a second beside those of a copy.
"""

import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch

from benchmarks.common import command, interleave, median, ratio, table
from distamp.comm_hooks import COMM_FORMATS, CommFormat, formats
from distamp.comm_hooks.formats import BLOCK, Places, Source

COPY = "copy"


def calls_of(wire: CommFormat, values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return what encodes, decodes, and adds two ranks' rows, in one format."""
    numel = values.numel()
    padded = -(-numel // BLOCK) * BLOCK
    places = Places(padded, [(0, 0, numel)])
    pair = torch.zeros(2, wire.row_bytes(padded), dtype=torch.uint8, device=values.device)
    sent, out, none = pair[:1], torch.empty_like(values), values.view(1, -1)[:0]
    source = Source(values, none, places, 1, 0.125)
    adding = source._replace(places=Places(padded, places.runs, (0, 0)), own=0)
    return {
        "encode": lambda: formats.encode(wire, source, sent),
        "decode": lambda: formats.decode(wire, sent, places, out),
        "add": lambda: formats.sum_rows(wire, adding, pair, out),
    }


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
            moved[f"{wire.name} {what}"] = 4 * elements + row * (2 if what == "add" else 1)
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
