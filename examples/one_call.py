"""`initialize`: the same loop at every level of precision, alone, under DDP and under FSDP2.

    python examples/one_call.py
    torchrun --nproc-per-node 2 examples/one_call.py

The level is one word: fp32 casts nothing, fp16 casts op by op, fp16-O2 has an fp16 model with fp32
masters, bf16 casts op by op and needs no loss scale. Cast a model before it is wrapped; FSDP2 casts
what it gathers by itself, so at fp16-O2 its fp32 shards are what the optimizer steps. Clip after
the last microbatch; on several ranks an overflow anywhere skips the step everywhere.
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from next_byte import NextByte, batches, device
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from distamp import cast_model, initialize

STEPS = 30


def wrap(model: nn.Module, layout: str, level: str) -> nn.Module:
    """Spread a model over the ranks."""
    if layout == "FSDP2":
        half = torch.float16 if level == "fp16-O2" else None
        return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=half))
    model = cast_model(model, level)
    return DistributedDataParallel(model) if layout == "DDP" else model


def train(level: str, microbatches: int = 1, layout: str = "alone") -> list[float]:
    """Train; return the losses of this rank's share of the batches."""
    torch.manual_seed(0)
    model = wrap(NextByte().to(device()), layout, level)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.3)
    amp = initialize(model, optimizer, level)
    rank, world = (dist.get_rank(), dist.get_world_size()) if layout != "alone" else (0, 1)
    losses = []
    for batch in batches(STEPS):
        contexts, following = (part.to(device()).chunk(world)[rank] for part in batch)
        amp.zero_grad()
        total = 0.0
        parts = zip(contexts.chunk(microbatches), following.chunk(microbatches), strict=True)
        for number, (context, target) in enumerate(parts, 1):
            with nullcontext() if number == microbatches else amp.no_sync():
                with amp.autocast():
                    logits = amp.model(context)
                loss = F.cross_entropy(logits.float(), target) / microbatches
                amp.backward(loss)
            total += loss.item()
        amp.clip_grad_norm_(1.0)
        if amp.step():  # a skipped step is none
            schedule.step()
        losses.append(total)
    return losses


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group()
    for layout in ("DDP", "FSDP2") if dist.is_initialized() else ("alone",):
        for level in ("fp32", "fp16", "fp16-O2", "bf16"):
            losses = train(level, 2, layout)
            print(f"{layout}, {level}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {STEPS} steps")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
