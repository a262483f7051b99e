"""Train the launcher's GPT with gradients in each wire format, and draw the losses beside fp32's.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m benchmarks.comm_hooks_training
        [--formats fp32 fp16 ...] [--seeds 0 1 ...] [--folder runs/comm_hooks]
        [flags of launch/train.py]

With one seed, every format starts from the same weights and sees the same text in the same order. A
run that is whole in the folder already is not run again. The folder gets validation.png, with the
means over the seeds, and table.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path
from statistics import mean

import torch.distributed as dist

from benchmarks.common import markdown
from distamp import comm_hooks
from launch.config import Config, parse
from launch.parallel import join
from launch.stop import Stop
from launch.train import run as train

FP32 = "fp32"
FORMATS = (FP32, *comm_hooks.WIRE_FORMATS)
COLORS = ("#222222", "#9a9a9a", "#c2571a", "#1f5fae", "#2f8f4e", "#8c1d18", "#7a4fb5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/comm_hooks"))
    given, flags = parser.parse_known_args()
    with join(Config()):
        for seed in given.seeds:
            for name in given.formats:
                folder = given.folder / name / str(seed)
                run(name, folder, [*flags, "--seed", str(seed)])
                gc.collect()  # DDP's reducer, which holds the group, lies in a cycle
        if os.environ.get("RANK", "0") == "0":
            report(given.formats, given.seeds, given.folder)


def run(name: str, folder: Path, flags: list[str]) -> None:
    """Train with gradients in one format."""
    if (folder / "curves.png").exists():
        return
    if dist.is_initialized():
        dist.barrier()
    hook = [] if name == FP32 else ["--hook", name]
    train(parse([*flags, *hook, "--run-dir", str(folder), "--overwrite"]), Stop())


def report(names: list[str], seeds: list[int], folder: Path) -> None:
    """Print a table of final losses and draw all validations."""
    curves = {name: [_validations(folder / name / str(seed)) for seed in seeds] for name in names}
    last = {name: [curve[-1][1] for curve in each] for name, each in curves.items()}
    rows = []
    for name in names:
        beside = ""
        if FP32 in last and name != FP32:
            ratios = [loss / fp32 - 1 for loss, fp32 in zip(last[name], last[FP32], strict=True)]
            beside = f"{mean(ratios):+.2%}"
            if len(ratios) > 1:
                beside += f" [{min(ratios):+.2%}, {max(ratios):+.2%}]"
        rows.append([name, f"{mean(last[name]):.4f}", beside])
    table = markdown(["gradients in", "validation loss", "beside fp32"], rows)
    (folder / "table.md").write_text(table + "\n")
    print(table)
    draw({name: _mean_curve(each) for name, each in curves.items()}, folder / "validation.png")


def _validations(folder: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]


def _mean_curve(curves: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    return [
        (points[0][0], mean(loss for _, loss in points)) for points in zip(*curves, strict=True)
    ]


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Draw validation losses, and below how far each is from fp32's."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=[1.4, 1], layout="constrained"
    )
    fp32 = dict(curves.get(FP32, []))
    for (name, curve), color in zip(curves.items(), COLORS, strict=False):
        steps, losses = zip(*curve, strict=True)
        top.plot(steps, losses, color=color, lw=1.4, marker="o", ms=3, label=name)
        if name != FP32 and fp32:
            difference = [100 * (loss / fp32[step] - 1) for step, loss in curve]
            bottom.plot(steps, difference, color=color, lw=1.2, marker="o", ms=3)
    bottom.axhspan(-0.5, 0.5, color="#e8eef7", zorder=0)
    bottom.axhline(0, color=COLORS[0], lw=1)
    top.set_ylabel("validation loss (nats per byte)")
    bottom.set_ylabel("beside fp32 (%)")
    bottom.set_xlabel("step")
    top.legend(frameon=False, ncol=2, title="gradients on the wire in")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6", lw=0.6)
    figure.suptitle("Byte-level GPT, 4 ranks, DDP")
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
