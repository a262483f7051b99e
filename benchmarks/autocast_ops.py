"""What op lists cost, and what a region of ours gives a model beside torch's.

Every comparison interleaves both sides in this one process. Single ops: the least of many short
runs. All else: medians of paired rounds with their quartiles, in processor time. Run with:
OMP_NUM_THREADS=1 python -m benchmarks.autocast_ops
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.common import environment, markdown, ratio
from distamp import OpLists, autocast
from distamp.autocast import op_lists

CALLS = 300


def interleave(
    contenders: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Processor seconds of each contender in each round; the order turns from round to round."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-3, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.process_time()
            contenders[name]()
            if number >= 0:
                seconds[name].append(time.process_time() - start)
    return seconds


def repeat(call: Callable[[], object]) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(CALLS):
            call()

    return calls


def under(lists: OpLists | None, call: Callable[[], object]) -> Callable[[], None]:
    """Calls in a region with or without lists; entering it is a small part of what is timed."""
    calls = repeat(call)

    def region() -> None:
        with autocast("cpu", ops=lists):
            calls()

    return region


def microseconds(seconds: list[float]) -> str:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return f"{median / CALLS * 1e6:.2f} [{low / CALLS * 1e6:.2f}, {high / CALLS * 1e6:.2f}]"


def fastest(regions: Sequence[autocast], call: Callable[[], object], runs: int) -> list[float]:
    """Microseconds of a call in each region: the least of many short runs, taken in turn.

    The least, as other processes only ever add to a run that is shorter than a time slice.
    """
    timer = timeit.Timer("call()", globals={"call": call})
    least = [math.inf] * len(regions)
    for _ in range(runs):
        for at, region in enumerate(regions):
            with region:
                least[at] = min(least[at], timer.timeit(60) / 60 * 1e6)
    return least


def listed_ops(runs: int) -> None:
    """Listed beside unlisted, with inputs that neither side has to cast: the price of the list."""
    full, weight, bias = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    half, half_weight, half_bias = full.bfloat16(), weight.bfloat16(), bias.bfloat16()
    image, kernel = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 2, 2)
    # As torch lists them; on no list of torch's; and on another than torch's, beside autocast off.
    same = OpLists(lower_precision={"linear"}), True
    moved = OpLists(fp32={"erf", "gelu", "softplus", "sum", "softmax", "layer_norm", "cat"}), True
    away = OpLists(fp32={"linear", "conv2d"}), False
    ops: dict[str, tuple[Callable[[], Tensor], tuple[OpLists, bool]]] = {
        "linear, as torch lists it": (lambda: F.linear(half, half_weight, half_bias), same),
        "mm, as torch lists it": (lambda: torch.mm(half, half_weight), same),
        "linear, in fp32": (lambda: F.linear(full, weight, bias), away),
        "mm, in fp32": (lambda: torch.mm(full, weight), away),
        "conv2d, in fp32": (lambda: F.conv2d(image, kernel), away),
        "erf": (lambda: torch.erf(full), moved),
        "softplus": (lambda: F.softplus(full), moved),
        "gelu": (lambda: F.gelu(full), moved),
        "sum": (lambda: torch.sum(full), moved),
        "softmax": (lambda: torch.softmax(full, -1), moved),
        "layer_norm": (lambda: F.layer_norm(full, (4,), bias, bias), moved),
        "cat": (lambda: torch.cat([full, full]), moved),
    }
    rows = []
    for name, (call, (lists, enabled)) in ops.items():
        regions = autocast("cpu", enabled=enabled), autocast("cpu", ops=lists)
        unlisted, listed = fastest(regions, call, runs)
        rows.append([name, f"{unlisted:.2f}", f"{listed:.2f}", f"{listed - unlisted:+.2f}"])
    print("\nA listed op beside the same op unlisted, us a call\n")
    print(markdown(["op", "unlisted", "listed", "more"], rows))


def unlisted_ops(rounds: int) -> None:
    """Ops on no list: in a region with lists beside one without, and with autocast off."""
    full, weight = torch.randn(4, 4), torch.randn(4, 4)
    half, half_weight = full.bfloat16(), weight.bfloat16()
    lists = OpLists(fp32={"softmax"})
    ops: dict[str, Callable[[], Tensor]] = {
        "exp": lambda: torch.exp(full),
        "add": lambda: full + weight,
        "mm, in other lists": lambda: torch.mm(half, half_weight),
    }
    rows = []
    for name, call in ops.items():
        times = interleave({"with": under(lists, call), "without": under(None, call)}, rounds)
        rows.append(["region", name, str(ratio(times["with"], times["without"]))])
    off = {f"never {name}": repeat(call) for name, call in OFF.items()}
    after = interleave(off, rounds)
    for name in OFF:
        times_before = BEFORE[f"never {name}"]
        rows.append(["autocast off", name, str(ratio(after[f"never {name}"], times_before))])
    print("\nAn op on no list: with lists over without; off, after lists were used over before\n")
    print(markdown(["where", "op", "ratio"], rows))


_FULL, _WEIGHT = torch.randn(4, 4), torch.randn(4, 4)
# Ops that listed_ops and unlisted_ops list, timed before this process has any list.
OFF: dict[str, Callable[[], Tensor]] = {
    "mm": lambda: torch.mm(_FULL, _WEIGHT),
    "softmax": lambda: torch.softmax(_FULL, -1),
}
BEFORE: dict[str, list[float]] = {}


class Block(nn.Module):
    """A transformer block: attention and a perceptron, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Mix along the sequence, then within each position."""
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norms[0](x)).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


def conv_net() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def models(rounds: int) -> None:
    torch.manual_seed(0)
    cases = {
        "transformer block": (Block(256, 4), torch.randn(4, 128, 256)),
        "conv net": (conv_net(), torch.randn(8, 3, 64, 64)),
    }
    low = torch.bfloat16
    lists = OpLists(fp32={"layer_norm", "batch_norm"})
    rows = []
    for name, (model, x) in cases.items():

        def step(region: Callable[[], object], model: nn.Module = model, x: Tensor = x) -> None:
            model.zero_grad()
            with region():  # type: ignore[attr-defined]
                loss = model(x).float().square().mean()
            loss.backward()

        times = interleave(
            {
                "fp32": lambda: step(lambda: torch.autocast("cpu", enabled=False)),
                "torch": lambda: step(lambda: torch.autocast("cpu", dtype=low)),
                "ours": lambda: step(lambda: autocast("cpu", dtype=low)),
                "lists": lambda: step(lambda: autocast("cpu", dtype=low, ops=lists)),
            },
            rounds,
        )
        rows.append(
            [name, f"{statistics.median(times['fp32']) * 1e3:.1f}"]
            + [str(ratio(times[it], times["fp32"])) for it in ("torch", "ours", "lists")]
            + [str(ratio(times["ours"], times["torch"]))]
        )
    print("\nForward and backward: bf16 autocast over fp32, and ours over torch's\n")
    header = ["model", "fp32 ms", "torch", "ours", "ours, norms listed fp32", "ours / torch"]
    print(markdown(header, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--listed", action="store_true", help="the price of a listed op alone")
    options = parser.parse_args()
    rounds = options.rounds
    print(environment())
    BEFORE.update(interleave({f"never {name}": repeat(call) for name, call in OFF.items()}, rounds))
    listed_ops(rounds * 15)
    if options.listed:
        return
    unlisted_ops(rounds)
    models(rounds)
    lists = OpLists(fp32={"softmax"})
    pair = interleave(
        {"push": repeat(lambda: op_lists.restore(op_lists.push(lists, "cpu")))}, rounds
    )
    print(f"\nTaking lists up and putting them down: {microseconds(pair['push'])} us")


if __name__ == "__main__":
    main()
