"""Each trainer at each precision in each layout: does a NaN on one of two ranks spoil anything?

    python -m tests.trainers.cells > docs/results/trainer_cells.md

A small model is trained for six steps on two gloo ranks. In the third, rank 1 alone has a NaN in a
gradient, after the wrapper has reduced it. A cell is right if both ranks have the same weights
after every step, if that step left them as they were and every other moved them, and if the
trainer's own account of steps, rates and skips knows of one skip.
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

__all__ = ["LAYOUTS", "PRECISIONS", "TRAINERS", "faults_of", "run"]

PRECISIONS = ("fp16", "bf16", "fp32")
LAYOUTS = ("DDP", "FSDP2", "LoRA on FSDP2")
# Their packages.
TRAINERS = {
    "Lightning": "lightning",
    "Fabric": "lightning",
    "Accelerate": "accelerate",
    "Trainer": "transformers",
    "TRL": "trl",
}


def run(trainer: str, precision: str, layout: str) -> SimpleNamespace:
    """Run a cell on this rank."""
    torch.manual_seed(rank())
    options = {"precision": precision, "layout": layout, "value": math.nan, "clip": 0.5}
    if trainer == "TRL":
        options["by_trl"] = True
    name = {"Trainer": "transformers", "TRL": "transformers"}.get(trainer, trainer.lower())
    return train(name, **options)


def faults_of(runs: list[SimpleNamespace]) -> list[str]:
    """What is wrong with a cell, in words; nothing where it is right."""
    one, other = runs
    faults = []
    if (one.weights, one.skipped) != (other.weights, other.skipped):
        faults.append("ranks differ")
    if not all(map(math.isfinite, one.weights)):
        faults.append("weights are NaN")
    for name, seen in (("weights", one.weights), ("rates", one.rates)):
        moved = [before != after for before, after in itertools.pairwise(seen)]
        if seen and moved != [step != FAULT for step in range(1, STEPS)]:
            faults.append(f"{name} moved in {moved}")
    if one.skipped != [step == FAULT for step in range(STEPS)]:
        faults.append(f"skips are told as {one.skipped}")
    norms = [n for step, n in enumerate(one.norms) if step != FAULT]
    if norms != [n for step, n in enumerate(other.norms) if step != FAULT]:
        faults.append("norms differ between ranks")
    return faults


def main() -> None:
    versions = ", ".join(
        f"{each} {version(each)}" for each in dict.fromkeys([*TRAINERS.values(), "peft"])
    )
    print(f"# Trainers, precisions, layouts\n\n{time.strftime('%Y-%m-%d')}, torch", end=" ")
    print(f"{torch.__version__}, Python {platform.python_version()}, two gloo ranks; {versions}.")
    print((__doc__ or "").partition("\n")[2])
    print("| Trainer | Layout | Precision | |\n|---|---|---|---|")
    # By its own name, by which ranks find it: not as __main__.
    here = importlib.import_module("tests.trainers.cells").run
    pool = RankPool(2, timeout=280)
    for trainer, layout, precision in itertools.product(TRAINERS, LAYOUTS, PRECISIONS):
        faults = faults_of(pool.run(here, trainer, precision, layout))
        print(f"| {trainer} | {layout} | {precision} | {'; '.join(faults) or 'right'} |")
    pool.close()


if __name__ == "__main__":
    main()
