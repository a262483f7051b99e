"""What regions, regions with op lists and carried states cost beside torch.autocast.

Each comparison runs both sides in turn, many times, in this one process; what is printed is the
median of the paired ratios and their quartiles. Times are the thread's own processor time, so that
what else the machine does widens the spread and does not move the ratio. Run with:
OMP_NUM_THREADS=1 python -m benchmarks.autocast_region
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distamp import AutocastState, OpLists, autocast

Run = Callable[[], Any]


def paired(ours: Run, theirs: Run, *, number: int, rounds: int) -> tuple[float, float, list[float]]:
    """Seconds of one call of each, and the ratios of all rounds; the order alternates."""
    times: tuple[list[float], list[float]] = ([], [])
    for each in (ours, theirs):
        each()
    for round_ in range(rounds):
        for side in (0, 1) if round_ % 2 else (1, 0):
            call = (ours, theirs)[side]
            start = time.thread_time()
            for _ in range(number):
                call()
            times[side].append((time.thread_time() - start) / number)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return statistics.median(times[0]), statistics.median(times[1]), ratios


def show(name: str, ours: Run, theirs: Run, *, number: int, rounds: int, unit: float = 1e6) -> None:
    mine, peer, ratios = paired(ours, theirs, number=number, rounds=rounds)
    low, mid, high = statistics.quantiles(ratios, n=4)
    label = {1e6: "us", 1e3: "ms"}[unit]
    print(
        f"{name:<68} {mine * unit:8.2f} {peer * unit:8.2f} {label}   "
        f"{mid:5.2f} [{low:.2f}, {high:.2f}]"
    )


def regions(rounds: int) -> None:
    low = torch.bfloat16
    mine, peer = autocast("cpu", dtype=low), torch.autocast("cpu", dtype=low)

    def new_ours() -> None:
        with autocast("cpu", dtype=low):
            pass

    def new_theirs() -> None:
        with torch.autocast("cpu", dtype=low):
            pass

    def kept_ours() -> None:
        with mine:
            pass

    def kept_theirs() -> None:
        with peer:
            pass

    def nested_ours() -> None:
        with mine, autocast("cpu", enabled=False):
            pass

    def nested_theirs() -> None:
        with torch.autocast("cpu", dtype=low), torch.autocast("cpu", enabled=False):
            pass

    lists = OpLists(fp32={"softmax"})
    kept_with_lists = autocast("cpu", dtype=low, ops=lists)

    def lists_new() -> None:
        with autocast("cpu", dtype=low, ops=lists):
            pass

    def lists_kept() -> None:
        with kept_with_lists:
            pass

    decorated_ours, decorated_theirs = mine(int), peer(int)
    n = 2000
    show("enter and leave, a new object each time", new_ours, new_theirs, number=n, rounds=rounds)
    show("enter and leave, one object kept", kept_ours, kept_theirs, number=n, rounds=rounds)
    show("one kept (ours), one new (torch)", kept_ours, new_theirs, number=n, rounds=rounds)
    show("a disabled region inside a region", nested_ours, nested_theirs, number=n, rounds=rounds)
    show("a decorated function", decorated_ours, decorated_theirs, number=n, rounds=rounds)
    show("with op lists, beside ours without, new", lists_new, new_ours, number=n, rounds=rounds)
    show("with op lists, beside ours without, kept", lists_kept, kept_ours, number=n, rounds=rounds)
    show("with op lists, beside torch's without, new", lists_new, new_theirs, number=n,
         rounds=rounds)  # fmt: skip


def states(rounds: int) -> None:
    with autocast("cpu", dtype=torch.float16):
        state = AutocastState.capture()

    def theirs() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            pass

    def apply() -> None:
        with state.apply():
            pass

    def all_three() -> None:
        with AutocastState.capture().apply():
            pass

    def to_new_state() -> None:
        AutocastState.capture()
        with state.apply():
            pass

    n = 2000
    show("capture (beside one region of torch's)", AutocastState.capture, theirs, number=n,
         rounds=rounds)  # fmt: skip
    show("apply and restore", apply, theirs, number=n, rounds=rounds)
    show("capture, apply, restore: the same state", all_three, theirs, number=n, rounds=rounds)
    show("capture, apply, restore: another state", to_new_state, theirs, number=n, rounds=rounds)


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend and feed forward."""
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, 8, width // 8)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.BatchNorm2d(128), nn.ReLU(),
        nn.Conv2d(128, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def optimizer_step(model: nn.Module, x: torch.Tensor, region: Any, microbatches: int) -> Run:
    """Forward and backward of a step's microbatches, and a step that costs next to nothing."""
    optimizer = torch.optim.SGD([next(model.parameters())], lr=1e-6)

    def run() -> None:
        for part in x.chunk(microbatches):
            with region:
                loss = model(part).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def models(rounds: int) -> None:
    torch.manual_seed(0)
    made = autocast("cpu", dtype=torch.bfloat16)
    peer = torch.autocast("cpu", dtype=torch.bfloat16)
    off = autocast("cpu", enabled=False)
    for name, model, x in (
        ("transformer block, width 512", Block(512), torch.randn(8, 64, 512)),
        ("conv net", conv_net(), torch.randn(8, 3, 32, 32)),
    ):
        for label, region, against, micro in (
            ("fp32 over torch bf16", off, peer, 1),
            ("bf16 over torch bf16", made, peer, 1),
            ("bf16 over torch bf16, 4 microbatches", made, peer, 4),
        ):
            ours = optimizer_step(model, x, region, micro)
            theirs = optimizer_step(model, x, against, micro)
            show(f"{name}: {label}", ours, theirs, number=1, rounds=rounds, unit=1e3)


def main() -> None:
    torch.set_num_threads(1)  # processor time of one thread is all there is
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41, help="paired rounds of each comparison")
    options = parser.parse_args()
    rounds = options.rounds
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} thread(s)")
    print(f"{'':<68} {'ours':>8} {'torch':>8}      ratio [quartiles]")
    regions(rounds)
    states(rounds)
    models(rounds)


if __name__ == "__main__":
    main()
