"""Each trainer at each precision in each layout: does a NaN on one of two ranks spoil anything?

    python -m tests.trainers.cells > docs/results/trainer_cells.md

A small model is trained for six steps on two gloo ranks. In the third, rank 1 alone has a NaN in a
gradient, after the wrapper has reduced it. A cell is right if both ranks have the same weights
after every step, if that step left the weights unchanged and every other step moved them, and if
the trainer's own account of steps, rates and skips has one skip.
"""

import importlib
import itertools
import math
import platform
import time
from importlib.metadata import version
from types import SimpleNamespace

import torch

from tests.ranks import RankPool
from tests.trainers.common import FAULT, STEPS, rank, train

__all__ = ["LAYOUTS", "PACKAGES", "PRECISIONS", "find_faults", "run"]

PRECISIONS = ("fp16", "bf16", "fp32")
LAYOUTS = ("DDP", "FSDP2", "LoRA on FSDP2")
# The package of each trainer.
PACKAGES = {
    "Lightning": "lightning",
    "Fabric": "lightning",
    "Accelerate": "accelerate",
    "Trainer": "transformers",
    "TRL": "trl",
}
# The name of each trainer's file, as in in_fabric.py.
FILES = {
    "Lightning": "lightning",
    "Fabric": "fabric",
    "Accelerate": "accelerate",
    "Trainer": "transformers",
    "TRL": "transformers",
}


def run(trainer: str, precision: str, layout: str) -> SimpleNamespace:
    """Train for one cell on this rank; return the observations of each step."""
    torch.manual_seed(rank())
    options = {"precision": precision, "layout": layout, "value": math.nan, "clip": 0.5}
    if trainer == "TRL":
        options["by_trl"] = True
    return train(FILES[trainer], **options)


def find_faults(runs: list[SimpleNamespace]) -> list[str]:
    """Return the faults of a cell as phrases.

    Args:
        runs: The observations of both ranks.
    """
    run_0, run_1 = runs
    faults = []
    if (run_0.weights, run_0.skipped) != (run_1.weights, run_1.skipped):
        faults.append("ranks differ")
    if not all(map(math.isfinite, run_0.weights)):
        faults.append("weights are NaN")
    faults += _find_moves_in_wrong_steps("weights", run_0.weights)
    # Fabric has no schedule, so its run records no rates.
    if run_0.rates:
        faults += _find_moves_in_wrong_steps("rates", run_0.rates)
    if run_0.skipped != [step == FAULT for step in range(STEPS)]:
        faults.append(f"skips are reported as {run_0.skipped}")
    if _drop_norm_of_fault(run_0.norms) != _drop_norm_of_fault(run_1.norms):
        faults.append("norms differ between ranks")
    return faults


def _find_moves_in_wrong_steps(name: str, values: list[float]) -> list[str]:
    """Return a fault unless every step except the faulty one changes the value."""
    moved = []
    for previous, current in itertools.pairwise(values):
        moved.append(previous != current)
    if moved == [step != FAULT for step in range(1, STEPS)]:
        return []
    return [f"{name} moved in {moved}"]


def _drop_norm_of_fault(norms: list[float]) -> list[float]:
    return [norm for step, norm in enumerate(norms) if step != FAULT]


def main() -> None:
    """Print the table of all cells."""
    packages = dict.fromkeys([*PACKAGES.values(), "peft"])
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    date = time.strftime("%Y-%m-%d")
    python = platform.python_version()
    print("# Trainers, precisions, layouts")
    print()
    print(f"{date}, torch {torch.__version__}, Python {python}, two gloo ranks; {versions}.")
    print((__doc__ or "").partition("\n")[2])
    print("| Trainer | Layout | Precision | |")
    print("|---|---|---|---|")
    # Ranks find the function by the name of its module, which is not __main__ in a rank.
    run_cell = importlib.import_module("tests.trainers.cells").run
    with RankPool(2, timeout=280) as pool:
        for trainer, layout, precision in itertools.product(PACKAGES, LAYOUTS, PRECISIONS):
            faults = find_faults(pool.run(run_cell, trainer, precision, layout))
            print(f"| {trainer} | {layout} | {precision} | {'; '.join(faults) or 'right'} |")


if __name__ == "__main__":
    main()
