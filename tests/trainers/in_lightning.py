"""Runs in Lightning's Trainer, for ranks: to import this imports Lightning."""

import copy
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision as Theirs
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from distamp.integrations.lightning import CommHook, FSDPPrecision, MixedPrecision, SkippedSteps
from tests.trainers.common import FAULT, data, digest, model, plant_inf, quiet

__all__ = ["Net", "Theirs", "Watch", "fit", "trainer_with"]

SCALE = 2.0**10


class Net(pl.LightningModule):
    """Trains by automatic optimization; rank 1 overflows in one step."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.net = model()
        self.options = options
        self.backwards = 0
        self.run = SimpleNamespace(rates=[], global_steps=[], losses=[])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx == self.options.get("raises_at"):
            raise ZeroDivisionError(list(vars(self)))
        if batch_idx == self.options.get("no_loss_at"):
            return None
        loss = (self.net(batch[0]).float() - batch[1]).square().mean()
        self.run.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        fault, value = self.options.get("fault", FAULT), self.options.get("value", float("inf"))
        plant_inf(self.parameters(), self.backwards, fault, value)
        self.backwards += 1

    def on_train_batch_end(self, *_: object) -> None:
        self.run.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.run.global_steps.append(self.trainer.global_step)

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
            if self.options.get("clip"):
                self.clip_gradients(each, 0.01, self.options["clip"])
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


def strategy_of(kind: type[Net], devices: int) -> Any:
    if devices == 1:
        return "auto"
    if kind is Flat:
        return Fsdp(process_group_backend="gloo")
    return "ddp"


def trainer_with(**options: Any) -> pl.Trainer:
    """A Trainer on the CPU, of six batches, that writes nothing."""
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    silent |= {"enable_model_summary": False, "log_every_n_steps": 1}
    return pl.Trainer(
        accelerator="cpu", **silent, **{"max_epochs": 1, "limit_train_batches": 6} | options
    )


def fit(
    ours: bool = True,
    devices: int = 2,
    module: str = "Net",
    wire: str | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    checkpoint: str | None = None,
    save: str | None = None,
    init_scale: float = SCALE,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> SimpleNamespace:
    """Train in the Trainer, and tell what that left on this rank."""
    quiet()
    kind = globals()[module]
    plugin: Any = Theirs("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))
    if ours and kind is Flat:
        plugin = FSDPPrecision("16-mixed", init_scale=init_scale)
    elif ours:
        plugin = MixedPrecision("16-mixed", "cpu", init_scale=init_scale)
    hooks = [CommHook(wire)] if wire else []
    net = kind(options)
    runner = trainer_with(
        devices=devices,
        strategy=strategy_of(kind, devices),
        plugins=plugin,
        callbacks=[*callbacks, *hooks, *([SkippedSteps()] if ours else [])],
        **(trainer or {}),
    )
    runner.fit(net, DataLoader(data(), batch_size=2), ckpt_path=checkpoint, weights_only=False)
    if save is not None:
        runner.save_checkpoint(save)
    run = net.run
    run.weights, run.scale = digest(net), plugin.scaler.get_scale()
    run.logged = {name: float(value) for name, value in runner.progress_bar_metrics.items()}
    run.hook = [str(hook.state.stats()) for hook in hooks]
    return run
