"""DataParallel, DDP and FSDP with `initialize`: cast, wrap, optimizer, one call.

    python examples/one_call_ranks.py
    torchrun --nproc-per-node 2 examples/one_call_ranks.py

``cast_model`` does nothing at levels whose model stays fp32, so the order is the same at all of
them. FSDP casts what it gathers by itself: at O2 its fp32 shards are what the optimizer steps. On
several ranks an overflow anywhere skips the step everywhere.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from next_byte import NextByte, batches, device
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from distamp import DataParallel, cast_model, initialize

STEPS = 20


def wrap(model: nn.Module, strategy: str, opt_level: str) -> nn.Module:
    """Spread a model over devices or ranks."""
    if strategy == "FSDP2":
        half = torch.float16 if opt_level == "O2" else None
        return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=half))
    model = cast_model(model, opt_level)
    return DataParallel(model) if strategy == "DataParallel" else DistributedDataParallel(model)


def train(strategy: str, opt_level: str) -> list[float]:
    """Train with a model that is spread; return the losses of this rank's share."""
    torch.manual_seed(0)
    model = wrap(NextByte().to(device()), strategy, opt_level)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp = initialize(model, optimizer, opt_level)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for context, following in batches(STEPS):
        amp.zero_grad()
        with amp.autocast():
            logits = amp.model(context.chunk(ranks)[rank].to(device()))
        loss = F.cross_entropy(logits.float(), following.chunk(ranks)[rank].to(device()))
        amp.backward(loss)
        amp.clip_grad_norm_(1.0)
        amp.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group()
    for strategy in ("DDP", "FSDP2") if dist.is_initialized() else ("DataParallel",):
        for level in ("O1", "O2"):
            losses = train(strategy, level)
            print(f"{strategy}, {level}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {STEPS} steps")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
