"""Training in Accelerate, for ranks, because this module imports Accelerate."""

from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader

from distamp.integrations.accelerate import prepare
from tests.trainers.common import (
    FAULT,
    SCALE,
    STEPS,
    adamw,
    adapted,
    data,
    digest,
    fresh_accelerate,
    model,
    plant_inf,
    quiet,
)

__all__ = ["make_accelerator", "make_fsdp_plugin", "train"]


def make_accelerator(
    with_distamp: bool,
    precision: str = "fp16",
    accumulation_steps: int = 1,
    layout: str = "DDP",
) -> Accelerator:
    """Return an Accelerator on the CPU; without distamp, fp16 has torch's scaler as on a GPU."""
    quiet()
    fresh_accelerate()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="no" if precision == "fp32" else precision,
        gradient_accumulation_steps=accumulation_steps,
        fsdp_plugin=None if layout == "DDP" else make_fsdp_plugin(layout),
    )
    if precision == "fp16" and not with_distamp:
        # Accelerate makes a scaler on a GPU only.
        scaler_class = ShardedGradScaler if layout == "FSDP1" else torch.amp.GradScaler
        accelerator.scaler = scaler_class("cpu", init_scale=SCALE)
        accelerator.native_amp = True
    return accelerator


def make_fsdp_plugin(layout: str) -> FullyShardedDataParallelPlugin:
    """Return the plugin that makes Accelerate shard, on a CPU too."""
    # Accelerate gives FSDP to ranks that have accelerators, and to no others.
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return FullyShardedDataParallelPlugin(
        fsdp_version=1 if layout == "FSDP1" else 2,
        auto_wrap_policy="size_based_wrap",
        # Adapters of peft have no forward, by which they could be sharded by themselves.
        min_num_params=10**9 if layout.startswith("LoRA") else 10,
        cpu_ram_efficient_loading=False,
        sync_module_states=False,
    )


def _wrap_in_fsdp1(net: nn.Module) -> nn.Module:
    """Return the model in FSDP1: Accelerate's wrapping needs a device index, which a CPU lacks."""
    precision = MixedPrecision(
        param_dtype=torch.float16,
        reduce_dtype=torch.float16,
        buffer_dtype=torch.float16,
    )
    return FullyShardedDataParallel(
        net,
        device_id=torch.device("cpu"),
        mixed_precision=precision,
        use_orig_params=True,
    )


def train(
    with_distamp: bool = True,
    precision: str = "fp16",
    layout: str = "DDP",
    fault: int | None = FAULT,
    value: float = float("inf"),
    clip: float | None = None,
    accumulation_steps: int = 1,
    comm_hook: str | None = None,
    load: str | None = None,
    save: str | None = None,
    fused: bool = False,
    is_late: bool = False,
    **settings: Any,
) -> SimpleNamespace:
    """Train by a loop from Accelerate's documentation; return the observations of each step.

    Args:
        with_distamp: Use distamp's scaler; otherwise torch's.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        layout: ``"DDP"``, ``"FSDP1"``, ``"FSDP2"`` or ``"LoRA on FSDP2"``.
        fault: The step in which rank 1 alone overflows.
        value: The gradient of rank 1 in that step.
        clip: The norm to which gradients are clipped.
        accumulation_steps: Backward passes for each step.
        comm_hook: The format of gradients on the wire.
        load: The folder of a checkpoint to continue from.
        save: A folder for a checkpoint.
        fused: Use the fused kernel of AdamW.
        is_late: Call distamp's ``prepare`` after the method of the Accelerator.
        settings: Settings of distamp's scaler.
    """
    replaces_scaler = with_distamp and not is_late
    accelerator = make_accelerator(replaces_scaler, precision, accumulation_steps, layout)
    if precision == "fp16":
        settings.setdefault("init_scale", SCALE)
    net = adapted(layout, model(), "0", "2")
    if layout == "FSDP1":
        net = _wrap_in_fsdp1(net)
    optimizer: Any = adamw(net, fused=fused)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1))
    loader = DataLoader(data(), batch_size=2)
    if with_distamp and not is_late:
        prepare(accelerator, comm_hook=comm_hook, **settings)
    net, loader, schedule, optimizer = accelerator.prepare(net, loader, schedule, optimizer)
    if with_distamp and is_late:
        prepare(accelerator, net, comm_hook=comm_hook, **settings)
    if load is not None:
        accelerator.load_state(load)

    run = SimpleNamespace(weights=[], rates=[], skipped=[], norms=[], logged=None)
    backward_passes = range(STEPS * accumulation_steps)
    for _, (inputs, targets) in zip(backward_passes, loader, strict=False):
        with accelerator.accumulate(net):
            outputs = net(inputs).float()
            accelerator.backward((outputs - targets).square().mean())
            if accelerator.sync_gradients:
                step = len(run.rates)
                plant_inf(net.parameters(), step, fault, value)
                if clip is not None:
                    norm = accelerator.clip_grad_norm_(net.parameters(), clip)
                    run.norms.append(float(norm))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            run.weights.append(digest(net))
            run.rates.append(optimizer.param_groups[0]["lr"])
            run.skipped.append(accelerator.optimizer_step_was_skipped)

    if save is not None:
        accelerator.save_state(save)
    scaler_state = accelerator.scaler.state_dict() if accelerator.scaler else {}
    run.scale = scaler_state.get("scale")
    run.growth = scaler_state.get("_growth_tracker")
    return run
