"""The results of benchmarks/levels.py as a page: two tables and a picture."""

import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import markdown

__all__ = ["BEGIN", "CONTROL", "END", "HOOKS", "LEVELS", "RESULTS", "render", "write"]

# fp32 from weights that were rounded to fp16 once: what chance alone makes of so small a change.
CONTROL = "O0, rounded"
# O0 on two ranks under DistributedDataParallel, and with gradients reduced in a wire format.
TWO_RANKS = "O0, 2 ranks"
HOOKS = {TWO_RANKS: None, "hook fp16": "fp16", "hook int8": "int8"}
LEVELS = ("O0", CONTROL, "O1", "O2", "O3", "bf16", *HOOKS)
PAGE = Path("docs/levels.md")
RESULTS = Path("docs/results/levels.json")
IMAGE = Path("docs/images/levels.png")
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->"


def render(results: dict[str, Any]) -> str:
    """Return the results as they stand in the page: two tables and the picture."""
    runs, seeds = results["runs"], sorted({run["seed"] for run in results["runs"]})
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    losses, memory = [], []
    for task in tasks:
        for level in LEVELS:
            base, mine = (_losses(runs, task, each) for each in (_base(level), level))
            if not mine or not base:
                continue  # not run yet
            beside = [(m / b - 1) * 100 for m, b in zip(mine, base, strict=True)]
            spread = statistics.stdev(mine) if len(mine) > 1 else 0.0
            change = f"{statistics.mean(beside):+.2f} % ({min(beside):+.2f} to {max(beside):+.2f})"
            skipped = [r["skipped"] for r in runs if (r["task"], r["level"]) == (task, level)]
            losses.append(
                [
                    task,
                    level,
                    f"{statistics.mean(mine):.4f} ± {spread:.4f}",
                    "" if level == _base(level) else change,
                    str(round(statistics.mean(skipped), 1)),
                ]
            )
            one = next(r for r in runs if (r["task"], r["level"]) == (task, level))["memory"]
            if level != CONTROL and level not in HOOKS:
                memory.append([task, level, *(f"{value / 1024:,.0f}" for value in one.values())])
    header = [
        "Model",
        "Level",
        "Validation loss",
        "beside O0 of the same ranks, seed by seed",
        "Steps skipped",
    ]
    kinds = ["Weights", "Masters", "Gradients", "Optimizer state", "Activations"]
    return (
        f"`{CONTROL}` is fp32 from weights that were rounded to fp16 once: what chance makes of so "
        f"small a change. A hook is beside `{TWO_RANKS}`, O0 under DistributedDataParallel. "
        "Nats per byte and per digit, mean and standard deviation "
        f"over {len(seeds)} seeds; {results['steps']} steps each. {results['environment']}. "
        f"Written by `{results['command']}`.\n\n{markdown(header, losses)}\n\n"
        "![Validation loss of each level beside O0](images/levels.png)\n\n"
        "KiB at one step, each tensor counted once.\n\n"
        f"{markdown(['Model', 'Level', *kinds], memory)}\n"
    )


def _base(level: str) -> str:
    return TWO_RANKS if level in HOOKS else "O0"


def _losses(runs: list[dict[str, Any]], task: str, level: str) -> list[float]:
    found = [r for r in runs if r["task"] == task and r["level"] == level]
    return [r["loss"] for r in sorted(found, key=lambda r: r["seed"])]


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw the loss of every run beside that of O0 from the same seed, and the memory."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    runs = results["runs"]
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    figure, axes = plt.subplots(2, len(tasks), figsize=(5 * len(tasks), 6.5), squeeze=False)
    for column, task in enumerate(tasks):
        top, bottom = axes[0][column], axes[1][column]
        top.axhspan(-1, 1, color="0.92")
        for place, level in enumerate(LEVELS):
            base, mine = (_losses(runs, task, each) for each in (_base(level), level))
            beside = [100 * (m / b - 1) for m, b in zip(mine, base, strict=True)]
            top.plot([place] * len(beside), beside, "o", color=f"C{place}")
        top.set_title(task)
        top.set_xticks(range(len(LEVELS)), [level.replace(", ", "\n") for level in LEVELS])
        shown = [level for level in LEVELS if level != CONTROL and level not in HOOKS]
        below = [0.0] * len(shown)
        for kind in ("weights", "masters", "gradients", "optimizer", "activations"):
            sizes = [
                next(r for r in runs if (r["task"], r["level"]) == (task, level))["memory"][kind]
                / 2**20
                for level in shown
            ]
            bottom.bar(shown, sizes, bottom=below, label=kind)
            below = [a + b for a, b in zip(below, sizes, strict=True)]
    axes[0][0].set_ylabel("validation loss beside O0, %\n(each dot a seed, grey: 1 %)")
    axes[1][0].set_ylabel("MiB at one step")
    axes[1][-1].legend(fontsize=8, loc="upper right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": ""})
    plt.close(figure)


def write(results: dict[str, Any]) -> None:
    """Put the results into the page, between its two marks, and draw the picture."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}{render(results)}{END}{after}")
    plot(results, IMAGE)
