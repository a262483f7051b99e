"""Training in Lightning's Trainer, for ranks, because this module imports Lightning."""

import copy
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision as TorchMixedPrecision
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
from tests.trainers.in_fabric import make_plugin

__all__ = ["CopyModule", "Net", "TorchMixedPrecision", "train"]


class Net(pl.LightningModule):
    """Trains by automatic optimization; rank 1 overflows in one step.

    Args:
        options: The options of ``train`` that the module reads.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.layout = options.get("layout", "DDP")
        self.net = adapted(self.layout, model(), "0", "2")
        self.backward_passes = 0
        self.run = SimpleNamespace(rates=[], global_steps=[0], skipped=[], weights=[], norms=[])

    def configure_model(self) -> None:
        is_sharded = isinstance(next(self.net.parameters()), DTensor)
        if self.layout != "DDP" and not is_sharded:
            shard(self.net, self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx == self.options.get("raises_at"):
            raise ZeroDivisionError(list(vars(self)))
        if batch_idx == self.options.get("no_loss_at"):
            return None
        return self.compute_loss(batch)

    def compute_loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        outputs = self.net(inputs).float()
        return (outputs - targets).square().mean()

    def on_after_backward(self) -> None:
        fault = self.options.get("fault", FAULT)
        value = self.options.get("value", float("inf"))
        plant_inf(self.parameters(), self.backward_passes, fault, value)
        self.backward_passes += 1

    def on_train_batch_end(self, *_: object) -> None:
        optimizer = self.trainer.optimizers[0]
        global_step = self.trainer.global_step
        self.run.rates.append(optimizer.param_groups[0]["lr"])
        self.run.skipped.append(global_step == self.run.global_steps[-1])
        self.run.global_steps.append(global_step)
        self.run.weights.append(digest(self.net))

    def configure_optimizers(self) -> Any:
        optimizer_class = getattr(torch.optim, self.options.get("optimizer", "AdamW"))
        settings = self.options.get("settings", {})
        optimizer = optimizer_class(self.parameters(), lr=0.01, **settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1))
        interval = self.options.get("interval", "step")
        return [optimizer], [{"scheduler": schedule, "interval": interval}]


class ManualNet(Net):
    """Steps two optimizers by manual optimization: backward pass, then both steps, as GANs do."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.compute_loss(batch))
        clip_algorithm = self.options.get("clip_algorithm")
        for optimizer in optimizers:
            if clip_algorithm is not None:
                self.clip_gradients(optimizer, 0.01, clip_algorithm)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first_linear, _, last_linear = self.net
        return [
            torch.optim.SGD(first_linear.parameters(), lr=0.01),
            torch.optim.SGD(last_linear.parameters(), lr=0.01),
        ]


class FSDP1Net(Net):
    """Wraps itself in FSDP1, because Lightning does not pass the device of a CPU."""

    def configure_model(self) -> None:
        if isinstance(self.net, FullyShardedDataParallel):
            return
        cpu = torch.device("cpu")
        first_linear, activation, last_linear = self.net
        layers = nn.Sequential(
            FullyShardedDataParallel(first_linear, device_id=cpu),
            activation,
            FullyShardedDataParallel(last_linear, device_id=cpu),
        )
        self.net = FullyShardedDataParallel(layers, device_id=cpu)


MODULES: dict[str, type[Net]] = {"Net": Net, "ManualNet": ManualNet, "FSDP1Net": FSDP1Net}


class CPUFSDPStrategy(FSDPStrategy):
    """FSDP1 on a CPU: Lightning refuses the class of its own without a GPU, but no subclass."""


class CopyModule(pl.Callback):
    """Copies the module in each step, as averages of weights do.

    Attributes:
        module: The module of the last step.
        hooks_are_bound_to_copy: For each step, whether the copy's hook belongs to the copy.
    """

    def __init__(self) -> None:
        self.hooks_are_bound_to_copy: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: object) -> None:
        self.module = pl_module
        module_copy = copy.deepcopy(pl_module)
        is_bound = module_copy.lr_scheduler_step.__self__ is module_copy
        self.hooks_are_bound_to_copy.append(is_bound)


def _make_strategy(module_class: type[Net], devices: int, layout: str) -> Any:
    if module_class is FSDP1Net:
        return CPUFSDPStrategy(process_group_backend="gloo")
    if layout != "DDP":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return "ddp" if devices > 1 else "auto"


def _make_plugin_for(
    module_class: type[Net], precision: str, with_distamp: bool, init_scale: float
) -> Any:
    if not with_distamp:
        torch_scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        return TorchMixedPrecision("16-mixed", "cpu", torch_scaler)
    if module_class is FSDP1Net:
        return integration.FSDPPrecision("16-mixed", init_scale=init_scale)
    return make_plugin(integration, precision, init_scale=init_scale)


# A Trainer on the CPU, of STEPS batches, that writes nothing.
TRAINER = {
    "accelerator": "cpu",
    "limit_train_batches": STEPS,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
    "max_epochs": 1,
}


def train(
    with_distamp: bool = True,
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
    """Train for an epoch, or continue for another; return the observations of each step.

    Args:
        with_distamp: Use distamp's plugin; otherwise Lightning's plugin with torch's scaler.
        devices: Ranks.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        module: A name in ``MODULES``.
        comm_hook: The format of gradients on the wire.
        callbacks: More callbacks of the Trainer.
        load: The folder of a checkpoint to continue from.
        save: A folder for a checkpoint.
        clip: The norm to which gradients are clipped.
        init_scale: The first loss scale of distamp's scaler.
        trainer: More arguments of the Trainer.
        options: Options of the module, such as the step ``fault`` in which rank 1 overflows.
    """
    module_class = MODULES[module]
    plugin = _make_plugin_for(module_class, precision, with_distamp, init_scale)
    strategy = _make_strategy(module_class, devices, options.get("layout", "DDP"))
    all_callbacks = list(callbacks)
    if comm_hook is not None:
        all_callbacks.append(integration.CommHook(comm_hook))
    if with_distamp:
        all_callbacks.append(integration.SkippedSteps())
    trainer_arguments = {**TRAINER, "gradient_clip_val": clip}
    checkpoint = None
    if load is not None:
        trainer_arguments["max_epochs"] = 2
        checkpoint = f"{load}/last.ckpt"
    trainer_arguments.update(trainer or {})

    net = module_class(options)
    runner = pl.Trainer(
        devices=devices,
        strategy=strategy,
        plugins=plugin,
        callbacks=all_callbacks,
        **trainer_arguments,
    )
    loader = DataLoader(data(), batch_size=2)
    runner.fit(net, loader, ckpt_path=checkpoint, weights_only=False)
    if save is not None:
        runner.save_checkpoint(f"{save}/last.ckpt")

    run = net.run
    scaler_state = plugin.scaler.state_dict() if plugin.scaler else {}
    run.scale = scaler_state.get("scale")
    run.growth = scaler_state.get("_growth_tracker")
    metrics = runner.progress_bar_metrics
    run.logged = [metrics.get(name) for name in ("loss_scale", "skipped_steps")]
    return run
