"""Each trainer at each precision in each layout: does a NaN on one of two ranks spoil anything?

    python -m tests.trainers.cells --page docs/results/trainer_cells.md

A small model is trained for six steps on two gloo ranks. In the third, rank 1 alone has a NaN in a
gradient, after the wrapper has reduced it. A cell is right if both ranks have the same weights
after every step, if that step left them as they were and every other moved them, and if the
trainer's own account of steps, rates and skips knows of one skip. Cells of packages that are not
installed are left out.
"""

import argparse
import datetime
import importlib
import importlib.util
import itertools
import math
import platform
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.ranks import RankPool
from tests.trainers.common import (
    FAULT,
    data,
    digest,
    model,
    quiet,
    rank,
    with_adapters,
)

__all__ = ["LAYOUTS", "PRECISIONS", "TRAINERS", "faults_of", "run"]

STEPS = 6
# In fp16 the first loss scale: at the default's the first steps are skipped, too.
SCALE = {"fp16": {"init_scale": 2.0**7}}
PRECISIONS = ("fp16", "bf16", "fp32")
LAYOUTS = ("DDP", "FSDP2", "LoRA on FSDP2")
NAN = float("nan")


class Cell(NamedTuple):
    """What one rank saw.

    Args:
        weights: A number for all trained weights after each step.
        skipped: For each step, whether the trainer says that it was skipped.
        norms: The norm before clipping that the trainer gives, where it does.
    """

    weights: list[float]
    skipped: list[bool]
    norms: list[float]


def made(layout: str, net: Any, *adapted: str) -> Any:
    """The model, with adapters of peft over some modules where the layout asks for that."""
    return with_adapters(net, *adapted) if layout.startswith("LoRA") else net


def shard(net: nn.Module, mesh: Any) -> nn.Module:
    for module in [m for m in net.modules() if type(m) is nn.Linear]:
        fully_shard(module, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def smallest(layout: str) -> int | None:
    """From how many parameters on a module is sharded by itself: peft's have no forward."""
    return {"DDP": None, "FSDP2": 10}.get(layout, 10**9)


def waited(skipped: list[bool], schedule: list[Any]) -> list[bool]:
    """In which steps a trainer says that it skipped, and leaves the schedule where it was."""
    stayed = [before == now for before, now in itertools.pairwise([None, *schedule])]
    return [each and same for each, same in zip(skipped, stayed, strict=True)]


# -- trainers --------------------------------------------------------------------------------------


def lightnings(package: Any, precision: str) -> Any:
    """The plugin of Lightning or Fabric for a precision."""
    name = {"fp16": "16-mixed", "bf16": "bf16-mixed"}.get(precision)
    settings = SCALE.get(precision, {})
    return package.MixedPrecision(name, "cpu", **settings) if name else package.Precision()


def in_lightning(precision: str, layout: str) -> Cell:
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader

    from distamp.integrations import lightning
    from tests.trainers.in_lightning import Net, trainer_with

    cell = Cell([], [], [])

    class Module(Net):
        def __init__(self) -> None:
            super().__init__({"value": NAN})
            self.net, self.before = made(layout, self.net, "0", "2"), 0

        def configure_model(self) -> None:
            if layout != "DDP" and not isinstance(next(self.net.parameters()), DTensor):
                shard(self.net, self.device_mesh["data_parallel"])

        def on_train_batch_end(self, *_: object) -> None:
            cell.weights.append(digest(self.net))
            cell.skipped.append(self.trainer.global_step == self.before)
            self.before = self.trainer.global_step

    trainer = trainer_with(
        devices=2,
        strategy="ddp" if layout == "DDP" else ModelParallelStrategy(2, 1),
        plugins=lightnings(lightning, precision),
        callbacks=[lightning.SkippedSteps()],
        gradient_clip_val=0.5,
    )
    trainer.fit(Module(), DataLoader(data(), batch_size=2))
    return cell


def in_fabric(precision: str, layout: str) -> Cell:
    from lightning.fabric.strategies import ModelParallelStrategy

    from distamp.integrations import fabric
    from tests.trainers.test_fabric import BY_NORM, train

    plugin = lightnings(fabric, precision)
    strategy = None
    if layout != "DDP":
        strategy = ModelParallelStrategy(lambda net, mesh: shard(net, mesh["data_parallel"]), 2, 1)
    run = train(made(layout, model(), "0", "2"), plugin, strategy, value=NAN, clip=BY_NORM)
    return Cell(run.weights, run.skipped, list(map(float, run.norms)))


def in_accelerate(precision: str, layout: str) -> Cell:
    from tests.trainers.test_accelerate import train

    run = train(
        net=made(layout, model(), "0", "2"),
        precision="no" if precision == "fp32" else precision,
        fsdp=None if layout == "DDP" else 2,
        smallest=smallest(layout) or 0,
        value=NAN,
        clip=0.5,
    )
    return Cell(run.steps, waited(run.skipped, run.rates), run.norms)


def in_transformers(precision: str, layout: str, by_trl: bool = False) -> Cell:
    from tests.trainers.test_transformers import net, train

    with tempfile.TemporaryDirectory() as folder:
        run = train(
            folder,
            value=NAN,
            mixin={"scaler_settings": SCALE.get(precision)},
            model=made(layout, net(), "q_proj", "v_proj"),
            by_trl=by_trl,
            smallest=smallest(layout),
            fp16=precision == "fp16",
            bf16=precision == "bf16",
            max_grad_norm=0.5,
        )
    return Cell(run.steps, waited(run.skipped, run.schedule), list(map(float, run.norms)))


def in_trl(precision: str, layout: str) -> Cell:
    return in_transformers(precision, layout, by_trl=True)


#: For each trainer its package and what runs it in a rank.
TRAINERS: dict[str, tuple[str, Callable[[str, str], Cell]]] = {
    "Lightning": ("lightning", in_lightning),
    "Fabric": ("lightning", in_fabric),
    "Accelerate": ("accelerate", in_accelerate),
    "Trainer": ("transformers", in_transformers),
    "TRL": ("trl", in_trl),
}


# -- judging ---------------------------------------------------------------------------------------


def run(trainer: str, precision: str, layout: str) -> Cell:
    """Run a cell on this rank."""
    quiet()
    torch.manual_seed(rank())
    return TRAINERS[trainer][1](precision, layout)


def faults_of(cells: list[Cell]) -> list[str]:
    """What is wrong with a cell, in words; nothing where it is right."""
    one, other = cells
    faults = []
    if one[:2] != other[:2]:
        faults.append("ranks differ")
    if not all(map(math.isfinite, one.weights)):
        faults.append("weights are NaN")
    moved = [before != after for before, after in itertools.pairwise(one.weights)]
    if moved != [step != FAULT for step in range(1, STEPS)]:
        faults.append(f"weights moved in {moved}")
    if one.skipped != [step == FAULT for step in range(STEPS)]:
        faults.append(f"skips are told as {one.skipped}")
    norms = [n for step, n in enumerate(one.norms) if step != FAULT]
    if norms != [n for step, n in enumerate(other.norms) if step != FAULT]:
        faults.append("norms differ between ranks")
    return faults


PAGE = """# Trainers, precisions, layouts

{date}, torch {torch}, Python {python}, two gloo ranks on {machine}; {versions}.

    python -m tests.trainers.cells --page docs/results/trainer_cells.md

In each cell rank 1 alone had a NaN in a gradient in one of six steps. A cell is right if both ranks
skipped that step and no other, have the same weights after each, and the trainer's own steps,
learning rates and skips say so.

{table}
"""


def table(pool: RankPool, trainers: list[str]) -> str:
    """Run every cell; return a table in Markdown."""
    # By its own name, by which ranks find it: not as __main__.
    here = importlib.import_module("tests.trainers.cells").run
    lines = [f"| | {' | '.join(f'{p}, {each}' for each in LAYOUTS for p in PRECISIONS)} |"]
    lines.append("|---" * (1 + len(PRECISIONS) * len(LAYOUTS)) + "|")
    for trainer in trainers:
        package, cells = TRAINERS[trainer][0], []
        for layout, precision in itertools.product(LAYOUTS, PRECISIONS):
            if importlib.util.find_spec(package) is None:
                cells.append("not installed")
                continue
            try:
                cells.append(
                    "; ".join(faults_of(pool.run(here, trainer, precision, layout))) or "right"
                )
            except Exception as error:
                lines_of = [each for each in str(error).splitlines() if "Error: " in each]
                cells.append(f"raises {(lines_of or [repr(error)])[-1]}")
            print(trainer, layout, precision, cells[-1], flush=True)
        lines.append(f"| {trainer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path)
    parser.add_argument("--trainers", nargs="+", default=list(TRAINERS), choices=TRAINERS)
    given = parser.parse_args()
    pool = RankPool(2, timeout=280)
    try:
        filled = table(pool, given.trainers)
    finally:
        pool.close()
    packages = dict.fromkeys(package for package, _ in TRAINERS.values())
    tried = [each for each in (*packages, "peft") if importlib.util.find_spec(each)]
    page = PAGE.format(
        date=datetime.date.today(),
        torch=torch.__version__,
        python=platform.python_version(),
        machine=platform.machine(),
        versions=", ".join(f"{each} {version(each)}" for each in tried),
        table=filled,
    )
    print(page)
    if given.page is not None:
        given.page.write_text(page)


if __name__ == "__main__":
    main()
