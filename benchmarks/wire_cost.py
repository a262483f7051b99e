"""What a million elements cost to encode, decode and add up in each format, beside torch's casts.

    OMP_NUM_THREADS=1 python -m benchmarks.wire_cost [--elements 6553600] [--rounds 40]
    python -m benchmarks.wire_cost --device cuda

A gradient bucket of 25 MiB, in memory of the caller's own on both sides; the encoding divides by 8
as well. On a CPU one thread's processor time stands beside that of ``.half()`` and ``.float()``, on
a GPU the bytes that Triton's kernels move in a second beside those of a copy.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import environment, interleave, markdown, ratio
from distamp.comm_hooks import WIRE_FORMATS, WireFormat, formats
from distamp.comm_hooks.formats import BLOCK, Places, Source

COPY = "copy"


def calls_of(wire: WireFormat, values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return what encodes, decodes, and adds two ranks' rows, in one format."""
    # The kernels need Triton, which a CPU need not have.
    how: Any = formats
    if values.is_cuda:
        how = importlib.import_module("distamp.comm_hooks.kernels")
    numel = values.numel()
    padded = -(-numel // BLOCK) * BLOCK
    places = Places(padded, [(0, 0, numel)])
    pair = torch.zeros(2, wire.row_bytes(padded), dtype=torch.uint8, device=values.device)
    sent, out, none = pair[:1], torch.empty_like(values), values.view(1, -1)[:0]
    source = Source(values, none, places, 1, 0.125)
    adding = source._replace(places=Places(padded, places.runs, (0, 0)), own=0)
    return {
        "encode": lambda: how.encode(wire, source, sent),
        "decode": lambda: how.decode(wire, sent, places, out),
        "add": lambda: how.sum_rows(wire, adding, pair, out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=25 << 18, help="on a GPU 16 times as many")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    print(f"{environment()}\n")
    gpu = given.device == "cuda"
    elements = given.elements * (16 if gpu else 1)
    values = torch.randn(elements, device=given.device)
    half, other = torch.empty_like(values, dtype=torch.float16), torch.empty_like(values)
    contenders: dict[str, Callable[[], object]] = {
        COPY: lambda: other.copy_(values),
        ".half()": lambda: half.copy_(values),
        ".float()": lambda: other.copy_(half),
    }
    moved = {COPY: 8 * elements, ".half()": 6 * elements, ".float()": 6 * elements}
    for wire in WIRE_FORMATS.values():
        row = wire.row_bytes(elements)
        for what, call in calls_of(wire, values).items():
            contenders[f"{wire.name} {what}"] = call
            moved[f"{wire.name} {what}"] = 4 * elements + row * (2 if what == "add" else 1)
    clock = time.perf_counter if gpu else time.thread_time
    times = interleave(contenders, given.rounds, warmup=5, clock=clock)
    rates = {name: [moved[name] / each for each in times[name]] for name in contenders}
    rows = []
    for name, each in times.items():
        cast = ".half()" if name.endswith("encode") else ".float()"
        micros = f"{statistics.median(each) / elements * 1e12:.0f}"
        speed = f"{statistics.median(rates[name]) / 1e9:.1f}"
        rows.append(
            [name, micros, ratio(each, times[cast]), speed, ratio(rates[name], rates[COPY])]
        )
    header = ["", "us for a million", "of .half() (encode) or .float()", "GB/s", "of a copy's"]
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
