"""A model with attention and norms, its layouts, and a step that trains it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812

__all__ = ["BF16", "FP16", "FP32", "Net", "parallel", "sharded", "trained"]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Block(nn.Module):
    """Attention, where it is asked for, and a feed-forward layer, behind norms of two kinds."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        if attends:
            self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm2, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x) if hasattr(self, "qkv") else x
        return x + self.down(torch.relu(self.up(self.norm2(x))))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (2, -1)).transpose(-3, -2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(-3, -2).flatten(-2))


class Net(nn.Module):
    """Two blocks, an embedding and a head; with a batch norm where it is asked for."""

    def __init__(self, batch_norm: bool = False, attends: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([Block(attends), Block(attends)])
        self.bn = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.bn(x.transpose(-2, -1)).transpose(-2, -1))


def sharded(net: Any, mesh: Any, **policy: torch.dtype) -> nn.Module:
    """FSDP2 by block."""
    settings = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**policy)}
    for block in net.blocks:
        fully_shard(block, **settings)
    return fully_shard(net, **settings)


def parallel(net: Any, mesh: Any, sequence: bool = False) -> Any:
    """Tensor parallel feed-forward layers; with norms and what is between split by position."""
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        split = Shard(1)
        plan = {"norm2": SequenceParallel(), "up": ColwiseParallel(input_layouts=split)}
        plan["down"] = RowwiseParallel(output_layouts=split)
        ends: dict[str, Any] = {"head": ColwiseParallel(input_layouts=split)}
        ends["tok"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=split)
        parallelize_module(net, mesh, ends)
    for block in net.blocks:
        parallelize_module(block, mesh, plan)
    return net


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    region: torch.dtype | None = None,
    inputs: Tensor | None = None,
    after: Callable[[], None] = lambda: None,
) -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
    """A step of a model: forward in a region, backward, ``after``; the model; its optimizer."""
    torch.manual_seed(0)
    given = torch.randint(32, (2, 8)) if inputs is None else inputs
    stepper = optimizer or torch.optim.AdamW(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", region or BF16, enabled=region is not None):
            out = model(given)
        out.float().square().mean().backward()
        after()
        stepper.step()
        stepper.zero_grad()

    return step, model, stepper
