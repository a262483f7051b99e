"""Runs by Accelerate, for ranks: to import this imports Accelerate."""

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

__all__ = ["accelerator_with", "fsdp_plugin", "train"]


def accelerator_with(
    ours: bool, precision: str = "fp16", parts: int = 1, layout: str = "DDP"
) -> Accelerator:
    """An Accelerator on the CPU; with torch's scaler where it is not to be ours."""
    quiet()
    fresh_accelerate()
    made = Accelerator(
        cpu=True,
        mixed_precision="no" if precision == "fp32" else precision,
        gradient_accumulation_steps=parts,
        fsdp_plugin=None if layout == "DDP" else fsdp_plugin(layout),
    )
    if not ours and precision == "fp16":  # as on an accelerator
        kind = ShardedGradScaler if layout == "FSDP1" else torch.amp.GradScaler
        made.scaler, made.native_amp = kind("cpu", init_scale=SCALE), True
    return made


def fsdp_plugin(layout: str) -> FullyShardedDataParallelPlugin:
    """What makes Accelerate shard, on a CPU too."""
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


def flat(net: nn.Module) -> nn.Module:
    """The model in FSDP1: Accelerate's own wrapping asks for an index that the CPU has not."""
    half, cpu = torch.float16, torch.device("cpu")
    precision = MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)
    return FullyShardedDataParallel(
        net, device_id=cpu, mixed_precision=precision, use_orig_params=True
    )


def train(
    ours: bool = True,
    precision: str = "fp16",
    layout: str = "DDP",
    fault: int | None = FAULT,
    value: float = float("inf"),
    clip: float | None = None,
    parts: int = 1,
    comm_hook: str | None = None,
    load: str | None = None,
    save: str | None = None,
    fused: bool = False,
    is_late: bool = False,
    **settings: Any,
) -> Any:
    """A loop as Accelerate's documentation writes it; ours may come after ``prepare``."""
    accelerator = accelerator_with(ours and not is_late, precision, parts, layout)
    settings = ({"init_scale": SCALE} if precision == "fp16" else {}) | settings
    run = SimpleNamespace(weights=[], rates=[], skipped=[], norms=[], told=None)
    net = adapted(layout, model(), "0", "2")
    net = flat(net) if layout == "FSDP1" else net
    optimizer: Any = adamw(net, fused=fused)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    if ours and not is_late:
        prepare(accelerator, comm_hook=comm_hook, **settings)
    net, loader, schedule, optimizer = accelerator.prepare(
        net, DataLoader(data(), batch_size=2), schedule, optimizer
    )
    if ours and is_late:
        prepare(accelerator, net, comm_hook=comm_hook, **settings)
    if load is not None:
        accelerator.load_state(load)
    for _, (inputs, targets) in zip(range(STEPS * parts), loader, strict=False):
        with accelerator.accumulate(net):
            accelerator.backward((net(inputs).float() - targets).square().mean())
            if accelerator.sync_gradients:
                plant_inf(net.parameters(), len(run.rates), fault, value)
                if clip:
                    run.norms.append(float(accelerator.clip_grad_norm_(net.parameters(), clip)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            run.weights.append(digest(net))
            run.rates.append(optimizer.param_groups[0]["lr"])
            run.skipped.append(accelerator.optimizer_step_was_skipped)
    if save is not None:
        accelerator.save_state(save)
    state = accelerator.scaler.state_dict() if accelerator.scaler else {}
    run.scale, run.growth = state.get("scale"), state.get("_growth_tracker")
    return run
