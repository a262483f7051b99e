"""One overflow on one of two ranks: torch's scaler beside distamp's, as a picture.

    python examples/one_overflow.py                       # writes one_overflow.svg
    python examples/one_overflow.py --out picture.png     # needs matplotlib

Two ranks train a layer that they share, with DistributedDataParallel, behind an expert that each
rank has for itself, as in a mixture of experts. In one step rank 0 is given an outlier, and the
float16 gradient of its expert overflows; the gradient of the shared layer does not. torch's scaler
asks no other rank: rank 0 skips the step and halves its scale, and rank 1 steps. From then on the
shared layer differs between the ranks. distamp's scaler skips the step on both.

Both runs have the same data, weights and settings. Nothing is patched, and the process group is
real.
"""

from __future__ import annotations

import argparse
import math
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

STEPS, OVERFLOW, OUTLIER = 60, 15, 4.0
SCALERS = {"torch.amp.GradScaler": torch.amp.GradScaler, "distamp.DistGradScaler": DistGradScaler}


@dataclass(frozen=True)
class Track:
    """What one rank had after each step: the weight that ranks share, and its loss scale."""

    weight: list[float]
    scale: list[float]


class Layer(nn.Module):
    """An expert of this rank's own, and a weight that all ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(1, 1, bias=False)
        self.shared = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.expert.weight, 0.1)
        nn.init.constant_(self.shared.weight, 20.0)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what is to follow the targets."""
        return self.shared(self.expert(inputs))


def train(scaler: Any) -> Track:
    """Train on this rank's data; every rank calls this."""
    layer = Layer()
    # torch's own mark for a parameter that is not the same on all ranks, as FSDP and others set it.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, ["expert.weight"])
    model = DistributedDataParallel(layer)
    groups = [
        {"params": layer.expert.parameters(), "lr": 1e-5},
        {"params": layer.shared.parameters(), "lr": 10.0},
    ]
    optimizer = torch.optim.SGD(groups)
    track = Track([layer.shared.weight.item()], [scaler.get_scale()])
    for step in range(1, STEPS + 1):
        outlier = dist.get_rank() == 0 and step == OVERFLOW
        inputs = torch.full((1, 1), OUTLIER if outlier else 1.0)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(inputs)
        target = 3.0 + 0.5 * math.sin(step / 5)
        loss = 0.5 * (outputs.float() - target).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        track.weight.append(layer.shared.weight.item())
        track.scale.append(scaler.get_scale())
    return track


def train_with_each() -> dict[str, Track]:
    """Train with one scaler after the other; every rank calls this."""
    settings = {"init_scale": 2.0**9, "growth_interval": 1000}
    return {name: train(scaler("cpu", **settings)) for name, scaler in SCALERS.items()}


def on_rank(rank: int, store: str, results: Any) -> None:
    """Join the other rank, and train."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results.update({(name, rank): track for name, track in train_with_each().items()})
    dist.destroy_process_group()


def run() -> dict[tuple[str, int], Track]:
    """Return the track of each rank with each scaler."""
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        results = manager.dict()
        mp.spawn(on_rank, (f"{folder}/store", results), nprocs=2)
        return dict(results)


def draw(tracks: dict[tuple[str, int], Track], path: Path) -> None:
    """Draw the shared weight over the scale, a column for each scaler."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "distamp", "font.size": 11})
    from matplotlib import pyplot

    shape: dict[str, Any] = {"figsize": (9, 4.6), "height_ratios": (3, 1), "layout": "constrained"}
    figure, axes = pyplot.subplots(2, 2, sharex=True, sharey="row", **shape)
    looks = ({"color": "#c2410c", "lw": 2.4}, {"color": "#1d4ed8", "lw": 2.4, "ls": (0, (4, 2))})
    for column, name in enumerate(SCALERS):
        upper, lower = axes[:, column]
        upper.set_title(name, fontsize=13, fontweight="bold")
        for rank, look in enumerate(looks):
            track = tracks[name, rank]
            upper.plot(track.weight, label=f"rank {rank}", **look)
            lower.plot(track.scale, drawstyle="steps-post", **look)
        for axis in (upper, lower):
            axis.axvline(OVERFLOW, color="#6b7280", lw=1, ls=":")
            axis.spines[["top", "right"]].set_visible(False)
        gap = abs(tracks[name, 0].weight[-1] - tracks[name, 1].weight[-1])
        says = f"the ranks differ by {gap:.1f}" if gap else "the ranks are equal, to the bit"
        upper.text(0.97, 0.95, says, ha="right", transform=upper.transAxes, fontsize=12)
        lower.set_yscale("log", base=2)
        lower.set_xlabel("step")
    axes[0, 0].set_ylim(8, 62)
    axes[0, 0].text(OVERFLOW - 0.8, 44, "float16\noverflow\non rank 0", ha="right")
    axes[0, 0].legend(loc="lower right", frameon=False)
    axes[0, 0].set_ylabel("a weight that\nranks share")
    axes[1, 0].set_ylabel("loss scale")
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata, facecolor="white", dpi=150)
    print(f"wrote {path}")


def main() -> None:
    """Run both, print how far ranks are from each other, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("one_overflow.svg"))
    options = parser.parse_args()
    tracks = run()
    for name in SCALERS:
        first, second = tracks[name, 0], tracks[name, 1]
        print(
            f"{name}: shared weight {first.weight[-1]:.4f} on rank 0, {second.weight[-1]:.4f} on "
            f"rank 1; loss scale {first.scale[-1]:g} and {second.scale[-1]:g}"
        )
    draw(tracks, options.out)


if __name__ == "__main__":
    main()
