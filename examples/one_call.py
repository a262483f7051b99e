"""`initialize`: the same loop at every precision level, on one process, under DDP and under FSDP2.

    python examples/one_call.py
    torchrun --nproc-per-node 2 examples/one_call.py

At level fp32 nothing is cast. At fp16, autocast casts op by op. At fp16-O2 the model is fp16 and
has fp32 master weights. At bf16, autocast casts op by op and there is no loss scale. Cast a model
before you wrap it. FSDP2 casts the weights that it gathers, so its fp32 shards are the master
weights at fp16-O2. Clip after the last microbatch. On several ranks, an overflow on any rank skips
the step on every rank.
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
    """Shard or copy a model over the ranks."""
    if layout == "FSDP2":
        param_dtype = torch.float16 if level == "fp16-O2" else None
        return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    model = cast_model(model, level)
    if layout == "DDP":
        return DistributedDataParallel(model)
    return model


def train(level: str, microbatches: int = 1, layout: str = "one process") -> list[float]:
    """Train on this rank's share of the batches, and return its losses."""
    torch.manual_seed(0)
    model = wrap(NextByte().to(device()), layout, level)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.3)
    amp = initialize(model, optimizer, level)
    rank, world_size = 0, 1
    if layout != "one process":
        rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = []
    for batch in batches(STEPS):
        contexts, next_bytes = (tensor.to(device()).chunk(world_size)[rank] for tensor in batch)
        amp.zero_grad()
        total = 0.0
        pairs = zip(contexts.chunk(microbatches), next_bytes.chunk(microbatches), strict=True)
        for number, (context, target) in enumerate(pairs, 1):
            is_last = number == microbatches
            with nullcontext() if is_last else amp.no_sync():
                with amp.autocast():
                    logits = amp.model(context)
                loss = F.cross_entropy(logits.float(), target) / microbatches
                amp.backward(loss)
            total += loss.item()
        amp.clip_grad_norm_(1.0)
        # The schedule does not advance on a skipped step.
        if amp.step():
            schedule.step()
        losses.append(total)
    return losses


def main() -> None:
    layouts = ["one process"]
    if "RANK" in os.environ:
        dist.init_process_group()
        layouts = ["DDP", "FSDP2"]
    for layout in layouts:
        for level in ("fp32", "fp16", "fp16-O2", "bf16"):
            losses = train(level, 2, layout)
            print(f"{layout}, {level}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {STEPS} steps")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
