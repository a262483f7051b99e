"""Launches and bytes of a bucket on a device, counted on a CPU, at several numbers of ranks.

    python -m benchmarks.comm_hooks_launches [--megabytes 25]

Counts what torch's ops would launch where Triton is missing, and what its kernels do.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from unittest.mock import patch

import torch

from benchmarks.common import markdown
from distamp.comm_hooks import blocks, engine, kernels, reference
from tests.comm_hooks.test_launches import launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=25.0)
    parser.add_argument("--wires", nargs="+", default=["fp16", "int16", "int8"])
    given = parser.parse_args()
    numel = int(given.megabytes * 2**20) // 4
    rows = []
    for wire in given.wires:
        for size in (2, 8, 256):
            rows.append([wire, str(size), *(_count(wire, size, numel, on) for on in (False, True))])
    print(markdown(["format", "ranks", "torch's ops", "Triton's kernels"], rows))


def _count(wire: str, size: int, numel: int, with_kernels: bool) -> str:
    how = (kernels, kernels.NAME) if with_kernels else (reference, reference.NAME)
    with ExitStack() as stack:
        for module in (reference, blocks):
            stack.enter_context(patch.object(module, "on_host", lambda _: False))
        stack.enter_context(patch.object(engine, "arithmetic_for", lambda _: how))
        # Nothing is computed by a kernel here, only counted.
        stack.enter_context(patch.object(kernels, "_launch", lambda *_, **__: torch.zeros(1)))
        return str(launches(wire, size, numel, shards=False, fed_back=wire == "int8").total())


if __name__ == "__main__":
    main()
