"""Draw the figures of the concept pages: ``python docs/drawings.py`` writes them as SVG.

python docs/drawings.py              # every figure
python docs/drawings.py dtypes       # the figures of these names
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
matplotlib.rcParams.update({"svg.hashsalt": "distamp", "font.size": 11})
from matplotlib import pyplot  # noqa: E402
from torch import nn  # noqa: E402

import distamp  # noqa: E402
from distamp.levels import LEVELS  # noqa: E402

FOLDER = Path(__file__).with_name("images")
sys.path.insert(0, str(Path(__file__).parents[1]))  # for benchmarks and tests
BLUE, ORANGE, GREY, GREEN = "#dbeafe", "#ffedd5", "#f3f4f6", "#dcfce7"


def canvas(width: float, height: float) -> Any:
    """Return axes in inches, without a frame."""
    figure = pyplot.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(axes: Any, x: float, y: float, text: str, colour: str = GREY, w: float = 1.35) -> None:
    """Draw a box of height 0.7 with its centre at (x, y)."""
    style = {"boxstyle": "round,pad=0.02,rounding_size=0.08", "fc": colour, "ec": "#374151"}
    patch = matplotlib.patches.FancyBboxPatch((x - w / 2, y - 0.35), w, 0.7, lw=1.2, **style)
    axes.add_patch(patch)
    axes.text(x, y, text, ha="center", va="center", fontsize=10.5)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    """Draw an arrow."""
    look = {"arrowstyle": "-|>", "color": "#374151", "lw": 1.3, **style}
    axes.annotate("", end, start, arrowprops=look)


def save(axes: Any, name: str) -> None:
    """Write a figure."""
    path = FOLDER / f"concept_{name}.svg"
    axes.figure.savefig(path, metadata={"Date": None}, facecolor="white")
    pyplot.close(axes.figure)
    print(f"wrote {path}")


def one_step() -> None:
    """From the loss to the update."""
    axes = canvas(9.4, 3.0)
    upper = [("forward\nin fp16", BLUE), ("loss\nin fp32", GREY), ("x scale", ORANGE),
             ("backward\nin fp16", BLUE), ("gradients,\nscaled", ORANGE)]  # fmt: skip
    lower = [("unscale\nand check", GREY), ("one message:\nanyone inf?", GREEN), ("clip", GREY),
             ("step,\nor skip", GREEN), ("new scale,\nthe same\neverywhere", ORANGE)]  # fmt: skip
    for y, boxes in ((2.35, upper), (0.75, lower)):
        for index, (text, colour) in enumerate(boxes):
            x = 0.95 + 1.87 * index
            box(axes, x, y, text, colour)
            if index:
                arrow(axes, (x - 1.87 + 0.7, y), (x - 0.7, y))
    axes.plot([8.43, 8.43, 0.95, 0.95], [1.95, 1.55, 1.55, 1.55], color="#374151", lw=1.3)
    arrow(axes, (0.95, 1.56), (0.95, 1.13))
    save(axes, "one_step")


def ranks() -> None:
    """Where ranks can differ, and what they agree on."""
    axes = canvas(9.4, 3.4)
    for rank, y, found in ((0, 2.75, "inf found"), (1, 0.65, "all finite")):
        axes.text(0.15, y, f"rank {rank}", va="center", fontweight="bold")
        box(axes, 1.6, y, "gradients of\nthis rank", BLUE)
        box(axes, 3.4, y, found, ORANGE if rank == 0 else GREY)
        box(axes, 8.5, y, "skip,\nhalve the scale", GREEN, w=1.6)
        arrow(axes, (2.3, y), (2.7, y))
        arrow(axes, (4.1, y), (5.0, 1.95 if rank == 0 else 1.45))
        arrow(axes, (6.85, 1.95 if rank == 0 else 1.45), (7.65, y))
    text = "one all-reduce:\nflags, and a hash of call,\nscale and settings"
    box(axes, 5.92, 1.7, text, GREEN, w=2.0)
    axes.text(5.92, 0.55, "without it rank 1 would step here", ha="center", color="#9a3412")
    save(axes, "ranks")


def loss_scale() -> None:
    """What float16 loses of small gradients, and what a scale saves."""
    _, axes = pyplot.subplots(figsize=(9.4, 3.4), layout="constrained")
    generator = torch.Generator().manual_seed(0)
    logs = torch.randn(200_000, generator=generator) * 4.0 - 21.0
    counts, edges = torch.histogram(logs, bins=80, range=(-40.0, 16.0))
    middle = (edges[:-1] + edges[1:]) / 2
    highest = counts.max()
    for shift, colour, label in ((0, "#9ca3af", "gradients as they are"),
                                 (16, "#1d4ed8", "the same, times $2^{16}$")):  # fmt: skip
        axes.fill_between(middle + shift, counts / highest, alpha=0.45, color=colour, label=label)
    axes.axvspan(-40, -24, color="#fee2e2", zorder=0)
    axes.axvspan(16, 22, color="#fee2e2", zorder=0)
    axes.axvspan(-24, -14, color="#fef9c3", zorder=0)
    axes.text(-39.5, 1.12, "becomes 0", color="#991b1b")
    axes.text(-23.8, 1.12, "loses digits", color="#854d0e")
    axes.text(-13.8, 1.12, "float16 keeps 11 bits")
    axes.text(16.2, 1.12, "inf", color="#991b1b")
    small = torch.tensor(1e-8).log2().item()
    arrow(axes, (small, 0.12), (small + 16, 0.12), color="black", lw=1.6)
    axes.plot([small], [0.12], "o", color="black")
    axes.text(small + 0.4, 0.17, "a gradient of 1e-8")
    axes.set(xlim=(-40, 22), ylim=(0, 1.25), yticks=[])
    axes.set_xlabel("size of a gradient, as a power of two")
    axes.legend(loc="center right", frameon=False)
    save(axes, "loss_scale")


def wire() -> None:
    """What crosses the wire of one piece of a bucket."""
    axes = canvas(9.4, 3.3)
    axes.text(0.15, 3.0, "a block: 256 elements; of int8, of one parameter", fontweight="bold")
    box(axes, 1.0, 2.35, "unit\n2 bytes", ORANGE, w=1.4)
    box(
        axes,
        4.3,
        2.35,
        "256 payloads of 2 bytes (fp16, inf and\nNaN as they are) or 1 byte (int8)",
        BLUE,
        w=5.0,
    )
    axes.text(7.0, 2.35, "value = payload x unit;\nint8: a NaN unit is a bad block", va="center")
    stages = [("each rank:\nencode", BLUE), ("send each part\nto its owner", GREY),
              ("owner:\nsum in fp32", GREEN), ("encode the mean,\nsend to all", GREY),
              ("each rank:\ndecode", BLUE)]  # fmt: skip
    for index, (text, colour) in enumerate(stages):
        x = 1.0 + 1.85 * index
        box(axes, x, 0.9, text, colour, w=1.5)
        if index:
            arrow(axes, (x - 1.85 + 0.76, 0.9), (x - 0.76, 0.9))
    axes.text(4.7, 0.2, "rounded twice, however many ranks; never inside a sum", ha="center")
    save(axes, "wire")


def precision() -> None:
    """What runs in which precision, in a region of float16."""
    axes = canvas(9.4, 3.2)
    axes.text(0.15, 2.95, "float32", fontweight="bold")
    axes.text(0.15, 1.55, "float16", fontweight="bold")
    top = {0.95: "weights", 4.3: "softmax, norms,\nlosses, sums", 6.35: "gradients of\nweights",
           8.35: "optimizer,\nits state"}  # fmt: skip
    for x, text in top.items():
        box(axes, x, 2.35, text, GREY, w=1.6)
    box(axes, 2.6, 0.9, "linear, matmul,\nconv, attention", BLUE, w=1.7)
    box(axes, 6.35, 0.9, "backward of\nthe same", BLUE, w=1.6)
    arrow(axes, (0.95, 1.95), (2.0, 1.3))
    axes.text(0.55, 1.15, "cast,\nkept for\nthe region", fontsize=9.5, va="center")
    arrow(axes, (3.0, 1.3), (3.9, 1.95))
    arrow(axes, (4.75, 1.95), (5.7, 1.3))
    axes.text(4.75, 1.3, "times\nthe scale", fontsize=9.5, va="center")
    arrow(axes, (6.35, 1.3), (6.35, 1.95))
    arrow(axes, (7.2, 2.35), (7.5, 2.35))
    others = "add, mul, relu and most others run in the dtype that they are given"
    axes.text(4.7, 0.2, others, ha="center")
    save(axes, "precision")


#: For each layout, the quarters of a weight that each of four ranks holds, and the ranks that see a
#: NaN in the gradient of the first quarter after the reduction.
_LAYOUT_TEXTS = {
    "DDP": "every rank sees it",
    "FSDP2": "one rank sees it",
    "HSDP, 2 x 2": "the replicas of\none shard see it",
    "tensor parallel": "one rank sees it",
}


def layouts() -> None:
    """Draw the measured parts of a weight on each rank, and the ranks that see a NaN."""
    from benchmarks.layout_parts import measure

    axes = canvas(9.4, 3.3)
    for column, (name, ranks_of_layout) in enumerate(measure().items()):
        left = 0.25 + 2.35 * column
        text = _LAYOUT_TEXTS[name]
        axes.text(left + 0.9, 3.0, name, ha="center", fontweight="bold")
        for rank, (parts, sees_nan) in enumerate(ranks_of_layout):
            x, y = left + 1.05 * (rank % 2), 1.75 - 1.1 * (rank // 2)
            for part in range(4):
                is_held = part in parts
                corner = (x + 0.2 * part, y)
                style = {"fc": BLUE if is_held else "white", "ec": "#9ca3af", "lw": 1.0}
                axes.add_patch(matplotlib.patches.Rectangle(corner, 0.2, 0.55, **style))
            if sees_nan:
                axes.text(x + 0.1, y + 0.27, "x", color="#b91c1c", fontsize=14, fontweight="bold",
                          ha="center", va="center")  # fmt: skip
            axes.text(x + 0.4, y + 0.66, f"rank {rank}", ha="center", fontsize=9)
        axes.text(left + 0.9, 0.25, text, ha="center", va="center", fontsize=9.5)
    save(axes, "layouts")


_DTYPE_COLOURS = {"fp32": GREY, "fp16": ORANGE, "bf16": BLUE, "fp8": GREEN}
_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def measure_dtypes(level: str) -> dict[str, str]:
    """Train one step of a small model at a level, and return its dtypes by the part of the step."""
    torch.manual_seed(0)
    model = distamp.cast_model(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)), level)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)
    amp = distamp.initialize(model, optimizer, level)
    linear, norm = amp.model
    outputs = []
    linear.register_forward_hook(lambda module, args, output: outputs.append(output))
    with amp.autocast():
        loss = amp.model(torch.randn(32, 32)).float().square().mean()
    amp.backward(loss)
    gradient = linear.weight.grad
    amp.step()
    stepped = optimizer.param_groups[0]["params"][0]
    compute = _DTYPE_NAMES[outputs[0].dtype]
    if type(linear).__name__ == "Float8Linear":
        compute = "fp8"  # its operands; the output has the dtype of the region
    return {
        "weights": _DTYPE_NAMES[linear.weight.dtype],
        "batch norm": _DTYPE_NAMES[norm.weight.dtype],
        "compute": compute,
        "gradients": _DTYPE_NAMES[gradient.dtype],
        "masters": _DTYPE_NAMES[stepped.dtype] if amp.masters else "none",
        "optimizer state": _DTYPE_NAMES[optimizer.state[stepped]["exp_avg"].dtype],
    }


def dtypes() -> None:
    """Draw the dtypes of one step at each level, as measured by that step."""
    axes = canvas(9.4, 0.3 + 0.85 * (len(LEVELS) + 1) * 0.62)
    for row, level in enumerate(LEVELS):
        y = axes.get_ylim()[1] - 0.95 - 0.53 * row
        axes.text(0.15, y, level, fontweight="bold", va="center")
        for column, (part, dtype) in enumerate(measure_dtypes(level).items()):
            x = 2.1 + 1.3 * column
            if row == 0:
                axes.text(x, y + 0.5, part, ha="center", va="center", fontsize=10)
            colour = _DTYPE_COLOURS.get(dtype, "white")
            cell = matplotlib.patches.Rectangle(
                (x - 0.62, y - 0.24), 1.24, 0.48, fc=colour, ec="white"
            )
            axes.add_patch(cell)
            axes.text(x, y, dtype, ha="center", va="center", fontsize=10.5)
    save(axes, "dtypes")


def read_table(page: str, heading: str, label: str) -> list[list[str]]:
    """Return the rows of the first table after a heading whose header begins with a label."""
    text = (FOLDER.parent / "results" / page).read_text()
    after = text[text.index(heading) :]
    lines = after[after.index(f"| {label} |") :].splitlines()
    rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def bars(name: str, labels: list[str], values: list[float], axis_label: str, mark: float) -> None:
    """Draw horizontal bars with a line for the value of the peer."""
    size = (8.2, 0.5 * len(labels) + 1.1)
    axes = pyplot.figure(figsize=size, layout="constrained").add_subplot()
    axes.barh(labels, values, color="#93c5fd", height=0.6)
    axes.bar_label(axes.containers[0], fmt="%.2f", padding=4)
    if mark:
        axes.axvline(mark, color="#6b7280", lw=1, ls=":")
    axes.invert_yaxis()
    axes.set_xlabel(axis_label)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    save(axes, name)


def overhead() -> None:
    """Draw the time of a scaler's round beside torch's, from docs/results/scaler_figures.md."""
    labels, values = [], []
    for ranks_used, parameters, _, optimizers, _, of_sharded, of_torch in read_table(
        "scaler_figures.md", "## A whole round", "ranks"
    ):
        if optimizers != "1":
            continue
        peer, ratio = (
            ("ShardedGradScaler", of_sharded) if of_torch == "-" else ("GradScaler", of_torch)
        )
        rank_word = "rank" if ranks_used.startswith("1") else "ranks"
        labels.append(f"{ranks_used.replace(', fused', '')} {rank_word}, {parameters} parameters"
                      f"{', fused' if 'fused' in ranks_used else ''}: {peer}")  # fmt: skip
        values.append(float(ratio.split()[0]))
    bars("overhead", labels, values, "time of one round, of torch's (dotted: equal)", 1.0)


def slow_link() -> None:
    """Draw the seconds of a step over a slow link, from docs/results/comm_hooks_figures.md."""
    rows = read_table("comm_hooks_figures.md", "The same with `--hosts 2 --local 2`", "step with")
    names = {"compute": "compute alone", "torch fp16": "torch's fp16 hook",
             "fp16": "distamp fp16", "int8": "distamp int8"}  # fmt: skip
    labels = [names[row[0]] for row in rows]
    bars("slow_link", labels, [float(row[1]) for row in rows], "seconds for one step", 0.0)


if __name__ == "__main__":
    drawings = (one_step, ranks, loss_scale, wire, precision, layouts, dtypes, overhead, slow_link)
    for draw in drawings:
        if draw.__name__ in sys.argv[1:] or len(sys.argv) == 1:
            draw()
