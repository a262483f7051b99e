"""Runs in Lightning's Trainer, for ranks: to import this imports Lightning."""

import copy
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision as Theirs
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from distamp.integrations import lightning as integration
from tests.trainers.common import (
    FAULT,
    SCALE,
    STEPS,
    adapted,
    data,
    digest,
    model,
    plant_inf,
    shard,
)
from tests.trainers.in_fabric import plugin_of

__all__ = ["Net", "Theirs", "Watch", "train"]


class Net(pl.LightningModule):
    """Trains by automatic optimization; rank 1 overflows in one step."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.layout = options.get("layout", "DDP")
        self.net = adapted(self.layout, model(), "0", "2")
        self.options, self.backwards = options, 0
        self.run = SimpleNamespace(rates=[], global_steps=[0], skipped=[], weights=[], norms=[])

    def configure_model(self) -> None:
        if self.layout != "DDP" and not isinstance(next(self.net.parameters()), DTensor):
            shard(self.net, self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx == self.options.get("raises_at"):
            raise ZeroDivisionError(list(vars(self)))
        if batch_idx == self.options.get("no_loss_at"):
            return None
        return (self.net(batch[0]).float() - batch[1]).square().mean()

    def on_after_backward(self) -> None:
        fault, value = self.options.get("fault", FAULT), self.options.get("value", float("inf"))
        plant_inf(self.parameters(), self.backwards, fault, value)
        self.backwards += 1

    def on_train_batch_end(self, *_: object) -> None:
        self.run.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.run.skipped.append(self.trainer.global_step == self.run.global_steps[-1])
        self.run.global_steps.append(self.trainer.global_step)
        self.run.weights.append(digest(self.net))

    def configure_optimizers(self) -> Any:
        kind = getattr(torch.optim, self.options.get("optimizer", "AdamW"))
        optimizer = kind(self.parameters(), lr=0.01, **self.options.get("settings", {}))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
        interval = self.options.get("interval", "step")
        return [optimizer], [{"scheduler": schedule, "interval": interval}]


class Manual(Net):
    """Two optimizers by hand: both backward passes, then both steps, as GANs do."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for each in optimizers:
            each.zero_grad()
        self.manual_backward((self.net(batch[0]).float() - batch[1]).square().mean())
        for each in optimizers:
            if self.options.get("by"):
                self.clip_gradients(each, 0.01, self.options["by"])
            each.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in self.net[::2]]


class Flat(Net):
    """Wrapped in FSDP1 by itself, as Lightning does not tell it to be on the CPU."""

    def configure_model(self) -> None:
        if not isinstance(self.net, FullyShardedDataParallel):
            cpu = torch.device("cpu")
            first, last = (FullyShardedDataParallel(p, device_id=cpu) for p in self.net[::2])
            parts = nn.Sequential(first, self.net[1], last)
            self.net = FullyShardedDataParallel(parts, device_id=cpu)


class Fsdp(FSDPStrategy):
    """Lightning refuses the class itself without a GPU, and no subclass."""


class Watch(pl.Callback):
    """Keeps the module; copies it in each step, as averages of weights by hand do."""

    def __init__(self) -> None:
        self.own: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: object) -> None:
        self.module, copied = pl_module, copy.deepcopy(pl_module)
        self.own.append(copied.lr_scheduler_step.__self__ is copied)


def strategy_of(kind: type[Net], devices: int, layout: str) -> Any:
    if kind is Flat:
        return Fsdp(process_group_backend="gloo")
    if layout != "DDP":
        return ModelParallelStrategy(2, 1)
    return "ddp" if devices > 1 else "auto"


# A Trainer on the CPU, of STEPS batches, that writes nothing.
TRAINER = {
    "accelerator": "cpu",
    "limit_train_batches": STEPS,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


def train(
    ours: bool = True,
    devices: int = 2,
    precision: str = "fp16",
    module: str = "Net",
    comm_hook: str | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    load: str | None = None,
    save: str | None = None,
    clip: float | None = None,
    init_scale: float = SCALE,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> SimpleNamespace:
    """Train for an epoch, or go on for another; tell what that left on this rank."""
    kind = globals()[module]
    plugin: Any = Theirs("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))
    if ours and kind is Flat:
        plugin = integration.FSDPPrecision("16-mixed", init_scale=init_scale)
    elif ours:
        plugin = plugin_of(integration, precision, init_scale=init_scale)
    given = TRAINER | {"gradient_clip_val": clip, "max_epochs": 2 if load else 1}
    hooks = [integration.CommHook(comm_hook)] if comm_hook else []
    net = kind(options)
    runner = pl.Trainer(
        devices=devices,
        strategy=strategy_of(kind, devices, options.get("layout", "DDP")),
        plugins=plugin,
        callbacks=[*callbacks, *hooks, *([integration.SkippedSteps()] if ours else [])],
        **(given | (trainer or {})),
    )
    path = load and f"{load}/last.ckpt"
    runner.fit(net, DataLoader(data(), batch_size=2), ckpt_path=path, weights_only=False)
    if save is not None:
        runner.save_checkpoint(f"{save}/last.ckpt")
    run = net.run
    state = plugin.scaler.state_dict() if plugin.scaler else {}
    run.scale, run.growth = state.get("scale"), state.get("_growth_tracker")
    logged = runner.progress_bar_metrics
    run.told = [logged.get(name) for name in ("loss_scale", "skipped_steps")]
    return run
