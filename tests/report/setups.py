"""Clean set-ups for a contract: each level in the layouts that docs/levels.md has it in."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp import Breaches
from tests.ranks import mesh

__all__ = ["BF16", "CLEAN", "FP16", "FP32", "Net", "clean", "parallel", "sharded", "trained"]

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


def _wrapped(net: Net, level: str, layout: str) -> nn.Module:
    """The model in its layout, cast before where the level's order is so."""
    half = BF16 if "bf16" in level else FP16
    if layout == "FSDP1":
        return FullyShardedDataParallel(
            net,
            device_id=torch.device("cpu"),
            mixed_precision=MixedPrecision(
                param_dtype=half, reduce_dtype=half if level.endswith("O2") else FP32
            ),
            auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Block),
        )
    if layout in ("FSDP2", "HSDP"):
        across = mesh((2,), ("dp",)) if layout == "FSDP2" else mesh((2, 1), ("replicate", "shard"))
        if level == "O0":
            return sharded(net, across)
        if level.endswith("O2"):
            for block in net.blocks:
                fully_shard(block, mesh=across, mp_policy=MixedPrecisionPolicy(param_dtype=half))
            policy = MixedPrecisionPolicy(param_dtype=half, output_dtype=FP32)
            return fully_shard(net, mesh=across, mp_policy=policy)
        return sharded(net, across, param_dtype=half, reduce_dtype=FP32, cast_forward_inputs=False)
    if layout == "TP":
        return parallel(net, mesh((2,), ("tp",)))
    if layout == "FSDP2 x TP":
        both = mesh((1, 2), ("dp", "tp"))
        net = parallel(net, both["tp"])
        return sharded(
            net, both["dp"], param_dtype=half, reduce_dtype=FP32, cast_forward_inputs=False
        )
    net = distamp.cast_model(net, level)
    return DistributedDataParallel(net) if layout in ("DDP", "ZeRO") else net


CLEAN = [
    *[(level, "plain", None) for level in ("O0", "O1", "O2", "O3", "bf16", "bf16-O2", "bf16-O3")],
    *[(level, "DDP", None) for level in ("O1", "O3", "bf16", "bf16-O2")],
    *[("bf16", "DDP", "fp16"), ("bf16", "DDP", "int8"), ("O1", "FSDP2", "bf16")],
    *[(level, "FSDP1", None) for level in ("bf16", "O2")],
    *[(level, "FSDP2", None) for level in ("O0", "bf16", "bf16-O2")],
    *[("bf16", layout, None) for layout in ("HSDP", "TP", "FSDP2 x TP", "ZeRO")],
    *[("O0", "TP", None), ("O1", "OSS", None)],
]


def clean(level: str, layout: str, hook: str | None) -> Breaches:
    """What the level's own contract says of a step."""
    net = Net(batch_norm=layout in ("plain", "DDP"))
    model = _wrapped(net, level, layout)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    if layout == "ZeRO":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    if layout == "OSS":
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import oss

        optimizer = oss.OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
        model = ShardedDataParallel(model, optimizer)
    settings: dict[str, Any] = {"loss_scale": 1.0} if level in ("O1", "O2") else {}
    amp = distamp.initialize(model, optimizer, level, comm_hook=hook, **settings)
    tokens = torch.randint(32, (2, 8))

    def step() -> None:
        amp.zero_grad()
        with amp.autocast():
            out = amp.model(tokens)
        amp.backward(out.float().square().mean())
        if layout != "FSDP2 x TP":  # what is not in the plan is whole in both halves
            amp.clip_grad_norm_(1.0)
        amp.step()

    return amp.check(step)
