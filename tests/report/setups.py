"""A model with attention and norms, its layouts and its training step."""

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
    """Optional attention behind a layer norm, and a feed-forward layer behind an RMS norm."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        if attends:
            self.norm = nn.LayerNorm(16)
            self.qkv = nn.Linear(16, 48)
            self.out = nn.Linear(16, 16)
        self.norm2 = nn.RMSNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "qkv"):
            x = self.attention(x)
        hidden = torch.relu(self.up(self.norm2(x)))
        return x + self.down(hidden)

    def attention(self, x: Tensor) -> Tensor:
        projected = self.qkv(self.norm(x))
        heads = projected.unflatten(-1, (2, -1)).transpose(-3, -2)
        query, key, value = heads.chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        merged = mixed.transpose(-3, -2).flatten(-2)
        return x + self.out(merged)


class Net(nn.Module):
    """An embedding, two blocks, an optional batch norm and a head."""

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
        normalized = self.bn(x.transpose(-2, -1))
        return self.head(normalized.transpose(-2, -1))


def sharded(net: Any, mesh: Any, **policy: torch.dtype) -> nn.Module:
    """Shard each block and the net with FSDP2; return the net."""
    settings = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**policy)}
    for block in net.blocks:
        fully_shard(block, **settings)
    return fully_shard(net, **settings)


def parallel(net: Any, mesh: Any, sequence: bool = False) -> Any:
    """Make the feed-forward layers tensor parallel; return the net.

    With ``sequence`` the norms and the activations between blocks are split by position.
    """
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        split = Shard(1)
        plan["norm2"] = SequenceParallel()
        plan["up"] = ColwiseParallel(input_layouts=split)
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
    """Return a training step, the model and its optimizer.

    Args:
        model: The model that the step trains.
        optimizer: AdamW if None.
        region: The dtype of the autocast region, or None for no region.
        inputs: Random tokens if None.
        after: A function that the step calls after its backward pass.
    """
    torch.manual_seed(0)
    batch = inputs
    if batch is None:
        batch = torch.randint(32, (2, 8))
    stepper = optimizer or torch.optim.AdamW(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", region or BF16, enabled=region is not None):
            out = model(batch)
        out.float().square().mean().backward()
        after()
        stepper.step()
        stepper.zero_grad()

    return step, model, stepper
