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
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.ranks import RankPool
from tests.trainers.common import (
    FAULT,
    data,
    digest,
    fresh_accelerate,
    model,
    plant_inf,
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
ROWS = data(2 * 2 * STEPS).tensors


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


def plant(net: nn.Module, step: int) -> None:
    plant_inf([p for p in net.parameters() if p.requires_grad], step, value=float("nan"))


def made(layout: str) -> nn.Module:
    """Two linear layers, with adapters of peft over them where the layout asks for that."""
    return with_adapters(model(), "0", "2") if layout.startswith("LoRA") else model()


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)


def shard(net: nn.Module, mesh: Any) -> nn.Module:
    for module in [m for m in net.modules() if type(m) is nn.Linear]:
        fully_shard(module, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.float() - targets * 0.1).square().mean()


# -- trainers --------------------------------------------------------------------------------------


def in_lightning(precision: str, layout: str) -> Cell:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    from distamp.integrations.lightning import MixedPrecision, Precision, SkippedSteps

    cell = Cell([], [], [])

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.before, self.backwards = made(layout), 0, 0

        def configure_model(self) -> None:
            if layout != "DDP" and not isinstance(next(self.net.parameters()), DTensor):
                shard(self.net, self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net(batch[0]), batch[1])

        def on_after_backward(self) -> None:
            plant(self.net, self.backwards)
            self.backwards += 1

        def on_train_batch_end(self, *_: object) -> None:
            cell.weights.append(digest(self.net))
            cell.skipped.append(self.trainer.global_step == self.before)
            self.before = self.trainer.global_step

        def configure_optimizers(self) -> Any:
            return adamw(self)

    name = {"fp16": "16-mixed", "bf16": "bf16-mixed"}.get(precision)
    settings = SCALE.get(precision, {})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp" if layout == "DDP" else ModelParallelStrategy(2, 1),
        plugins=Precision() if name is None else MixedPrecision(name, "cpu", **settings),
        callbacks=[SkippedSteps()],
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )
    rows = torch.utils.data.TensorDataset(*ROWS)
    trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=2))
    return cell


def in_fabric(precision: str, layout: str) -> Cell:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from distamp.integrations.fabric import MixedPrecision, Precision

    name = {"fp16": "16-mixed", "bf16": "bf16-mixed"}.get(precision)
    settings = SCALE.get(precision, {})
    plugin = Precision() if name is None else MixedPrecision(name, "cpu", **settings)
    sharded = ModelParallelStrategy(lambda net, mesh: shard(net, mesh["data_parallel"]), 2, 1)
    strategy = "ddp" if layout == "DDP" else sharded
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugin)
    fabric.launch()
    net = fabric.setup_module(made(layout))
    optimizer = adamw(net)
    stepper = fabric.setup_optimizers(optimizer)
    cell = Cell([], [], [])
    for step, (inputs, targets) in enumerate(my_batches()):
        stepper.zero_grad()
        fabric.backward(loss_of(net(inputs), targets))
        plant(net, step)
        norm = fabric.clip_gradients(net, stepper, max_norm=0.5, error_if_nonfinite=False)
        stepper.step()
        cell.norms.append(float(norm))
        cell.weights.append(digest(net))
        cell.skipped.append(not plugin.scaler.stepped(optimizer))
    return cell


def my_batches() -> list[tuple[Tensor, Tensor]]:
    inputs, targets = (each[2 * rank() :].split(2)[::2] for each in ROWS)
    return list(zip(inputs, targets, strict=True))


def smallest(layout: str) -> int:
    """From how many parameters on a module is sharded by itself: peft's have no forward."""
    return 10**9 if layout.startswith("LoRA") else 10


def sharding_of_accelerate(layout: str) -> Any:
    """Let Accelerate begin anew; return what makes it shard, where it is to."""
    from tests.trainers.test_accelerate import fsdp_plugin

    fresh_accelerate()
    return None if layout == "DDP" else fsdp_plugin(2, smallest(layout))


def in_accelerate(precision: str, layout: str) -> Cell:
    plugin = sharding_of_accelerate(layout)
    from accelerate import Accelerator

    from distamp.integrations.accelerate import prepare

    word = "no" if precision == "fp32" else precision
    accelerator = Accelerator(cpu=True, mixed_precision=word, fsdp_plugin=plugin)
    prepare(accelerator, **SCALE.get(precision, {}))
    net = made(layout)
    optimizer = adamw(net)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    cell, moved = Cell([], [], []), 0
    for step, (inputs, targets) in enumerate(my_batches()):
        optimizer.zero_grad()
        accelerator.backward(loss_of(net(inputs), targets))
        plant(net, step)
        norm = accelerator.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        cell.norms.append(float(norm))
        cell.weights.append(digest(net))
        stayed = schedule.scheduler.last_epoch == moved
        moved = schedule.scheduler.last_epoch
        cell.skipped.append(accelerator.optimizer_step_was_skipped and stayed)
    return cell


def in_transformers(precision: str, layout: str, package: str = "transformers") -> Cell:
    sharding_of_accelerate(layout)
    import transformers

    from distamp.integrations.transformers import DistTrainerMixin
    from tests.trainers import test_transformers as hugging_face

    cell = Cell([], [], [])
    kind: Any = transformers.Trainer
    arguments: Any = transformers.TrainingArguments
    rows: Any = [
        {"input_ids": ids, "labels": ids}
        for ids in hugging_face.tokenizer()(hugging_face.texts(48))["input_ids"]
    ]
    more: dict[str, Any] = {}
    if package == "trl":
        import trl
        from datasets import Dataset

        kind, arguments = trl.SFTTrainer, trl.SFTConfig
        rows = Dataset.from_dict({"text": hugging_face.texts(48)})
        more["processing_class"] = hugging_face.tokenizer()

    class Trainer(DistTrainerMixin, kind):
        steps, moved = 0, 0

        def training_step(self, net: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(net, *args, **kwargs)
            plant(net, self.steps)
            self.steps += 1
            return loss

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log(logs, *args, **kwargs)
            if "loss" in logs:
                taken = self.lr_scheduler.last_epoch
                cell.skipped.append(
                    taken == self.moved and self.accelerator.optimizer_step_was_skipped
                )
                self.moved = taken
                cell.norms.append(float(logs["grad_norm"]))
                cell.weights.append(digest(self.model))

    net = hugging_face.net()
    if layout.startswith("LoRA"):
        net = with_adapters(net, "q_proj", "v_proj")
    with tempfile.TemporaryDirectory() as folder:
        sharding = {}
        if layout != "DDP":
            config = {"version": 2, "cpu_ram_efficient_loading": False}
            config["min_num_params"] = smallest(layout)
            sharding = {"fsdp": True, "fsdp_config": config}
        args = arguments(
            folder,
            fp16=precision == "fp16",
            bf16=precision == "bf16",
            use_cpu=True,
            max_steps=STEPS,
            max_grad_norm=0.5,
            learning_rate=0.01,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            **sharding,
        )
        more["scaler_settings"] = SCALE.get(precision)
        Trainer(model=net, args=args, train_dataset=rows, **more).train()
    return cell


def in_trl(precision: str, layout: str) -> Cell:
    return in_transformers(precision, layout, "trl")


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
