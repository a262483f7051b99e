"""What a million elements cost to encode, decode and add up in each format, beside ``.half()``.

    OMP_NUM_THREADS=1 python -m benchmarks.wire_cost [--elements 6553600] [--rounds 40]
    python -m benchmarks.wire_cost --device cuda

One thread, memory of the caller's own (``out=``) on both sides, a gradient bucket of 25 MiB. The
encoding divides by 8 as well; a decoded value is compared with ``.float()``. Times are those of the
processor, which a busy machine lengthens less than the clock's. On a GPU Triton's
kernels are compared with a copy, in bytes moved per second.
"""

import argparse
import importlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Timings, environment, interleave, markdown, ratio
from distamp.comm_hooks import WIRE_FORMATS, WireFormat, formats
from distamp.comm_hooks.formats import BLOCK, Places, Source

HALF, FLOAT, COPY = ".half()", ".float()", "copy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=25 << 18)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    print(environment())
    if arguments.device == "cuda":
        print(_on_gpu(arguments.elements * 16, arguments.rounds))
        return
    torch.set_num_threads(1)
    print(_on_cpu(arguments.elements, arguments.rounds))


def _on_cpu(elements: int, rounds: int) -> str:
    values = torch.randn(elements)
    half, single = torch.empty(elements, dtype=torch.float16), torch.empty(elements)
    contenders: dict[str, Callable[[], object]] = {
        HALF: lambda: half.copy_(values),
        FLOAT: lambda: single.copy_(half),
    }
    for wire in WIRE_FORMATS.values():
        contenders |= _of_format(wire, values)
    timings = _processor_times(contenders, rounds)
    rows = [
        [HALF, _micros(timings, HALF, elements), "1", "", "", ""],
        [FLOAT, "", "", _micros(timings, FLOAT, elements), "1", ""],
    ]
    for name in WIRE_FORMATS:
        encode, decode, add = (f"{name} {what}" for what in ("encode", "decode", "add"))
        rows.append(
            [
                name,
                _micros(timings, encode, elements),
                str(ratio(timings[encode], timings[HALF])),
                _micros(timings, decode, elements),
                str(ratio(timings[decode], timings[FLOAT])),
                _micros(timings, add, elements),
            ]
        )
    header = ["", "encode, us", f"of {HALF}", "decode, us", f"of {FLOAT}", "decode and add two, us"]
    return f"\nMicroseconds per million elements:\n\n{markdown(header, rows)}"


def _processor_times(contenders: dict[str, Callable[[], object]], rounds: int) -> Timings:
    """Seconds that this thread ran for, round by round, in an order drawn anew for each."""
    names, order = list(contenders), random.Random(0)
    timings: Timings = {name: [] for name in names}
    for number in range(-3, rounds):
        for name in order.sample(names, len(names)):
            start = time.thread_time()
            contenders[name]()
            if number >= 0:
                timings[name].append(time.thread_time() - start)
    return timings


def _of_format(
    wire: WireFormat, values: Tensor, how: Any = formats
) -> dict[str, Callable[[], object]]:
    numel = values.numel()
    places = Places(1, -(-numel // BLOCK) * BLOCK, [(0, 0, numel)])
    pair = torch.zeros(2, wire.row_bytes(places.numel), dtype=torch.uint8, device=values.device)
    sent, out, none = pair[:1], torch.empty_like(values), values.view(1, -1)[:0]
    source = Source(values, none, places, 1, 0.125)
    adding = source._replace(places=Places(2, places.numel, places.runs), own=0)
    return {
        f"{wire.name} encode": lambda: how.encode(wire, source, sent),
        f"{wire.name} decode": lambda: how.decode(wire, sent, places, out),
        f"{wire.name} add": lambda: how.sum_rows(wire, adding, pair, out),
    }


def _micros(timings: Timings, name: str, elements: int) -> str:
    return f"{statistics.median(timings[name]) / elements * 1e12:.0f}"


def _on_gpu(elements: int, rounds: int) -> str:
    values = torch.randn(elements, device="cuda")
    other = torch.empty_like(values)
    contenders: dict[str, Callable[[], object]] = {COPY: lambda: other.copy_(values)}
    kernels = importlib.import_module("distamp.comm_hooks.kernels")
    moved = {COPY: 8 * elements}
    for wire in WIRE_FORMATS.values():
        contenders |= _of_format(wire, values, kernels)
        row = wire.row_bytes(elements)
        moved[f"{wire.name} encode"] = moved[f"{wire.name} decode"] = 4 * elements + row
        moved[f"{wire.name} add"] = 4 * elements + 2 * row
    timings = interleave(contenders, rounds, warmup=5)
    rates = {name: [moved[name] / each for each in timings[name]] for name in contenders}
    rows = [
        [name, f"{statistics.median(each) / 1e9:.0f}", str(ratio(each, rates[COPY]))]
        for name, each in rates.items()
    ]
    return f"\n{markdown(['', 'GB/s', 'of copy'], rows)}"


if __name__ == "__main__":
    main()
