"""Runs in Fabric, for ranks: to import this imports Lightning."""

from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as Theirs
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from distamp.integrations import fabric as integration
from tests.trainers.common import (
    FAULT,
    SCALE,
    STEPS,
    adamw,
    adapted,
    batches,
    digest,
    model,
    plant_inf,
    shard,
)

__all__ = ["plugin_of", "train"]


class Fsdp(FSDPStrategy):
    """Fabric refuses the class itself without a GPU, and no subclass."""


def plugin_of(package: Any, precision: str, **settings: Any) -> Any:
    """The plugin for a precision, of Fabric or of Lightning's Trainer."""
    name = {"fp16": "16-mixed", "bf16": "bf16-mixed"}.get(precision)
    settings = settings if precision == "fp16" else {}
    return package.MixedPrecision(name, "cpu", **settings) if name else package.Precision()


def train(
    ours: bool = True,
    devices: int = 2,
    precision: str = "fp16",
    layout: str = "DDP",
    fault: int | None = FAULT,
    value: float = float("inf"),
    clip: float | None = None,
    clip_val: float | None = None,
    clips: int = 1,
    fused: bool = False,
    **step: Any,
) -> Any:
    """What a loop as Fabric's documentation writes it leaves, and what it saw in each step."""
    plugin: Any = Theirs("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))
    if ours:
        plugin = plugin_of(integration, precision, init_scale=SCALE)
    strategy: Any = "ddp" if devices > 1 else "auto"
    if layout == "FSDP1":
        strategy, plugin = Fsdp(), integration.FSDPPrecision("16-mixed", init_scale=SCALE)
    elif layout != "DDP":
        strategy = ModelParallelStrategy(lambda net, mesh: shard(net, mesh["data_parallel"]), 2, 1)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, plugins=plugin)
    fabric.launch()
    run = SimpleNamespace(weights=[], norms=[], skipped=[], rates=[], dtypes=set())
    net = adapted(layout, model(), "0", "2")
    first = next(each for each in net.modules() if isinstance(each, nn.Linear))
    first.register_forward_hook(lambda module, inputs, out: run.dtypes.add(out.dtype))
    if layout == "FSDP1":  # Fabric does not tell it to be on the CPU.
        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    wrapped = fabric.setup_module(net)
    optimizer = adamw(wrapped, fused=fused)
    stepper = fabric.setup_optimizers(optimizer)
    limit = {"max_norm": clip, "error_if_nonfinite": False} if clip else {"clip_val": clip_val}
    for number, (inputs, targets) in zip(range(STEPS), batches(), strict=False):
        stepper.zero_grad()
        fabric.backward((wrapped(inputs).float() - targets).square().mean())
        plant_inf(net.parameters(), number, fault, value)
        for _ in range(clips if any(limit.values()) else 0):
            norm = fabric.clip_gradients(wrapped, stepper, **limit)
            run.norms += [float(norm)] if clip else []
        stepper.step(**step)
        run.weights.append(digest(wrapped))
        stepped = getattr(plugin.scaler, "step_was_taken", lambda optimizer: None)
        run.skipped.append(stepped(optimizer) is False)
    run.scale = plugin.scaler.get_scale()
    return run
