"""One overflow on one of two ranks: a picture of torch's scaler and of distamp's.

    python examples/one_overflow.py                 # writes one_overflow.svg; needs matplotlib
    python examples/one_overflow.py picture.png

Two ranks train a layer that they share, with DistributedDataParallel. Before that layer, each rank
has an expert layer that no other rank has, as in a mixture of experts. In one step rank 0 gets an
outlier, and the float16 gradient of its expert overflows. The gradient of the shared layer stays
finite.

torch's scaler asks no other rank: rank 0 skips the step and halves its scale, and rank 1 steps.
After that step the shared layer differs between the ranks. With distamp's scaler both ranks skip.

Both runs have the same data, weights and settings. Nothing is patched, and the process group is
real.
"""

import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler

STEPS = 60
OVERFLOW_STEP = 15
OUTLIER = 4.0
SCALERS = {"torch.amp.GradScaler": torch.amp.GradScaler, "distamp.DistGradScaler": DistGradScaler}
# The line styles of the two ranks, so that equal curves stay visible.
RANK_STYLES = (
    {"color": "#c2410c", "lw": 2.4},
    {"color": "#1d4ed8", "lw": 2.4, "ls": (0, (4, 2))},
)


@dataclass(frozen=True)
class Track:
    """The shared weight and the loss scale of one rank after each step."""

    weight: list[float]
    scale: list[float]


class Layer(nn.Module):
    """An expert layer of this rank, and a layer that all ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(1, 1, bias=False)
        self.shared = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.expert.weight, 0.1)
        nn.init.constant_(self.shared.weight, 20.0)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs to outputs, which training moves towards the targets."""
        return self.shared(self.expert(inputs))


def train(scaler: Any) -> Track:
    """Train on the data of this rank.

    Collective: every rank must call this.
    """
    layer = Layer()
    # This is torch's mark for a parameter that differs between ranks. FSDP sets it too.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, ["expert.weight"])
    model = DistributedDataParallel(layer)
    groups = [
        {"params": layer.expert.parameters(), "lr": 1e-5},
        {"params": layer.shared.parameters(), "lr": 10.0},
    ]
    optimizer = torch.optim.SGD(groups)
    track = Track([layer.shared.weight.item()], [scaler.get_scale()])
    for step in range(1, STEPS + 1):
        has_outlier = dist.get_rank() == 0 and step == OVERFLOW_STEP
        inputs = torch.full((1, 1), OUTLIER if has_outlier else 1.0)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(inputs)
        target = 3.0 + 0.5 * math.sin(step / 5)
        error = outputs.float() - target
        loss = 0.5 * error.square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        track.weight.append(layer.shared.weight.item())
        track.scale.append(scaler.get_scale())
    return track


def train_with_each() -> dict[str, Track]:
    """Train with torch's scaler and then with distamp's.

    Collective: every rank must call this.
    """
    tracks = {}
    for name, scaler_class in SCALERS.items():
        scaler = scaler_class("cpu", init_scale=2.0**9, growth_interval=1000)
        tracks[name] = train(scaler)
    return tracks


def run_rank(rank: int, store: str) -> dict[str, Track]:
    """Join the process group, and train."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tracks = train_with_each()
    dist.destroy_process_group()
    return tracks


def draw(ranks: list[dict[str, Track]], path: Path) -> None:
    """Draw the shared weight above the scale, in a column for each scaler."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "distamp"
    matplotlib.rcParams["font.size"] = 11
    matplotlib.rcParams["axes.spines.top"] = False
    matplotlib.rcParams["axes.spines.right"] = False
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 1))
    for (weights, scales), name in zip(axes.T, SCALERS, strict=True):
        tracks = [rank[name] for rank in ranks]
        draw_column(weights, scales, tracks)
        weights.set_title(name, fontsize=13, fontweight="bold")
    first = axes[0, 0]
    first.set(ylim=(8, 62), ylabel="a weight that\nranks share")
    first.text(OVERFLOW_STEP - 0.8, 44, "float16\noverflow\non rank 0", ha="right")
    first.legend(loc="lower right", frameon=False)
    axes[1, 0].set_ylabel("loss scale")
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata, facecolor="white", dpi=150)
    print(f"wrote {path}")


def draw_column(weights: Any, scales: Any, tracks: list[Track]) -> None:
    """Draw the tracks of both ranks with one scaler into two panels."""
    for rank, (track, style) in enumerate(zip(tracks, RANK_STYLES, strict=True)):
        weights.plot(track.weight, label=f"rank {rank}", **style)
        scales.plot(track.scale, drawstyle="steps-post", **style)
    for panel in (weights, scales):
        panel.axvline(OVERFLOW_STEP, color="#6b7280", lw=1, ls=":")
    gap = abs(tracks[0].weight[-1] - tracks[1].weight[-1])
    caption = f"the ranks differ by {gap:.1f}" if gap else "the ranks are bit-identical"
    weights.text(0.97, 0.95, caption, ha="right", transform=weights.transAxes, fontsize=12)
    scales.set_yscale("log", base=2)
    scales.set_xlabel("step")


def main() -> None:
    """Run both scalers, print the difference between the ranks, and draw it."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "one_overflow.svg")
    with tempfile.TemporaryDirectory() as folder, mp.get_context("spawn").Pool(2) as pool:
        ranks = pool.starmap(run_rank, [(rank, f"{folder}/store") for rank in range(2)])
    for name in SCALERS:
        first, second = (rank[name] for rank in ranks)
        weights = f"{first.weight[-1]:.4f} on rank 0, {second.weight[-1]:.4f} on rank 1"
        scales = f"{first.scale[-1]:g} and {second.scale[-1]:g}"
        print(f"{name}: shared weight {weights}; loss scale {scales}")
    draw(ranks, path)


if __name__ == "__main__":
    main()
