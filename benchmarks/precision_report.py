"""What recording costs: a step under precision_report beside one under a bare TorchDispatchMode.

    OMP_NUM_THREADS=1 python benchmarks/precision_report.py

The peer is the least that anything can cost that sees every kernel: a dispatch mode that does
nothing. Steps are interleaved; each line is the median over rounds, with the middle half of them.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from precision_report import GPT

from distamp import autocast, precision_report, preflight


class Nothing(TorchDispatchMode):
    """Sees every kernel and lets it pass."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def step(model: torch.nn.Module, inputs: torch.Tensor) -> None:
    with autocast("cpu", dtype=torch.bfloat16):
        loss = model(inputs).float().square().mean()
    loss.backward()
    model.zero_grad()


def timed(context: Callable[[], AbstractContextManager[Any]], run: Callable[[], None]) -> float:
    with context():
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin


def spread(values: list[float], unit: float = 1.0, digits: int = 2) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle * unit:.{digits}f} [{low * unit:.{digits}f}, {high * unit:.{digits}f}]"


def measure(name: str, model: torch.nn.Module, inputs: torch.Tensor, rounds: int) -> None:
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": nullcontext,
        "mode": Nothing,
        "report": lambda: precision_report(model),
    }
    with precision_report(model) as report:
        step(model, inputs)
    kernels = report.totals.calls
    times: dict[str, list[float]] = {each: [] for each in contexts}
    for _ in range(rounds):
        for each, context in contexts.items():
            times[each].append(timed(context, lambda: step(model, inputs)))
    ratio = [r / m for r, m in zip(times["report"], times["mode"], strict=True)]
    extra = [(r - m) / kernels for r, m in zip(times["report"], times["mode"], strict=True)]
    slower = [r / p for r, p in zip(times["report"], times["plain"], strict=True)]
    print(f"{name}: {kernels} kernels a step")
    for each, values in times.items():
        print(f"  {each:8} {spread(values, 1e3)} ms")
    print(f"  report over a bare dispatch mode  {spread(ratio)}")
    print(f"  report over no mode at all        {spread(slower)}")
    print(f"  added to each kernel              {spread(extra, 1e6, 1)} us")
    begin = time.perf_counter()
    preflight(model, inputs)
    print(f"  preflight of it, once             {time.perf_counter() - begin:.2f} s")


def conv_net() -> nn.Module:
    """Return three stages of convolution, batch norm and ReLU, and a classifier."""
    stages: list[nn.Module] = []
    for inner, outer in ((3, 16), (16, 32), (32, 64)):
        stages += [nn.Conv2d(inner, outer, 3, 2, 1, bias=False), nn.BatchNorm2d(outer)]
        stages.append(nn.ReLU(inplace=True))
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    ids = torch.randint(256, (1, 16))
    print("small enough that kernels hardly count:")
    measure("GPT, 4 blocks, 16 tokens", GPT(width=32, block=16), ids, rounds)
    measure("conv net, 2 images of 8x8", conv_net(), torch.randn(2, 3, 8, 8), rounds)
    print("of a size that is trained:")
    ids = torch.randint(256, (8, 128))
    measure("GPT, 4 blocks, 8 x 128 tokens", GPT(width=256), ids, max(rounds // 4, 5))


if __name__ == "__main__":
    main()
