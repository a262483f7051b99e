"""Training in Lightning Fabric, for ranks, because this module imports Lightning."""

from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as TorchMixedPrecision
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
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

__all__ = ["make_plugin", "train"]

# Lightning's names of precisions; a name that is missing here is full precision.
LIGHTNING_PRECISIONS = {"fp16": "16-mixed", "bf16": "bf16-mixed"}


class CPUFSDPStrategy(FSDPStrategy):
    """FSDP1 on a CPU: Fabric refuses the class of its own without a GPU, but no subclass."""


def make_plugin(package: Any, precision: str, **scaler_settings: Any) -> Any:
    """Return distamp's plugin for a precision.

    Args:
        package: ``distamp.integrations.fabric`` or ``distamp.integrations.lightning``.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        scaler_settings: Settings of the loss scale, which only fp16 has.
    """
    lightning_precision = LIGHTNING_PRECISIONS.get(precision)
    if lightning_precision is None:
        return package.Precision()
    if precision == "fp16":
        return package.MixedPrecision(lightning_precision, "cpu", **scaler_settings)
    return package.MixedPrecision(lightning_precision, "cpu")


def _make_plugin_for(layout: str, precision: str, with_distamp: bool) -> Any:
    if layout == "FSDP1":
        return integration.FSDPPrecision("16-mixed", init_scale=SCALE)
    if with_distamp:
        return make_plugin(integration, precision, init_scale=SCALE)
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    return TorchMixedPrecision("16-mixed", "cpu", torch_scaler)


def _make_strategy(layout: str, devices: int) -> Any:
    if layout == "FSDP1":
        return CPUFSDPStrategy()
    if layout == "DDP":
        return "ddp" if devices > 1 else "auto"
    return ModelParallelStrategy(
        lambda net, mesh: shard(net, mesh["data_parallel"]),
        data_parallel_size=2,
        tensor_parallel_size=1,
    )


def _make_model(layout: str) -> nn.Module:
    net = adapted(layout, model(), "0", "2")
    if layout == "FSDP1":
        # Fabric does not pass the device to FSDP1 on a CPU.
        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    return net


def train(
    with_distamp: bool = True,
    devices: int = 2,
    precision: str = "fp16",
    layout: str = "DDP",
    fault: int | None = FAULT,
    value: float = float("inf"),
    clip: float | None = None,
    clip_val: float | None = None,
    clips: int = 1,
    fused: bool = False,
    **step_arguments: Any,
) -> SimpleNamespace:
    """Train by a loop from Fabric's documentation; return the observations of each step.

    Args:
        with_distamp: Use distamp's plugin; otherwise Lightning's plugin with torch's scaler.
        devices: Ranks.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        layout: ``"DDP"``, ``"FSDP1"``, ``"FSDP2"`` or ``"LoRA on FSDP2"``.
        fault: The step in which rank 1 alone overflows.
        value: The gradient of rank 1 in that step.
        clip: The norm to which gradients are clipped.
        clip_val: The value to which gradients are clipped.
        clips: Calls of the clipping function in each step.
        fused: Use the fused kernel of AdamW.
        step_arguments: Arguments of ``optimizer.step``.
    """
    plugin = _make_plugin_for(layout, precision, with_distamp)
    strategy = _make_strategy(layout, devices)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, plugins=plugin)
    fabric.launch()
    run = SimpleNamespace(weights=[], norms=[], skipped=[], rates=[], dtypes=set())

    def record_dtype(module: nn.Module, inputs: object, output: Tensor) -> None:
        run.dtypes.add(output.dtype)

    net = _make_model(layout)
    first_linear = next(module for module in net.modules() if isinstance(module, nn.Linear))
    first_linear.register_forward_hook(record_dtype)
    wrapped = fabric.setup_module(net)
    optimizer = adamw(wrapped, fused=fused)
    fabric_optimizer = fabric.setup_optimizers(optimizer)
    clip_arguments: dict[str, Any] = {}
    if clip is not None:
        clip_arguments = {"max_norm": clip, "error_if_nonfinite": False}
    elif clip_val is not None:
        clip_arguments = {"clip_val": clip_val}

    for step, (inputs, targets) in zip(range(STEPS), batches(), strict=False):
        fabric_optimizer.zero_grad()
        outputs = wrapped(inputs).float()
        fabric.backward((outputs - targets).square().mean())
        plant_inf(net.parameters(), step, fault, value)
        if clip_arguments:
            for _ in range(clips):
                norm = fabric.clip_gradients(wrapped, fabric_optimizer, **clip_arguments)
                if clip is not None:
                    run.norms.append(float(norm))
        fabric_optimizer.step(**step_arguments)
        run.weights.append(digest(wrapped))
        # torch's scaler has no such method.
        step_was_taken = getattr(plugin.scaler, "step_was_taken", None)
        is_skipped = step_was_taken is not None and step_was_taken(optimizer) is False
        run.skipped.append(is_skipped)
    run.scale = plugin.scaler.get_scale()
    return run
