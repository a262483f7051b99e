"""Thirty-four breaches of a declared precision, planted as people make them; for a score.

Written before the tool that is scored had been seen. The first five are made as the code did of
which people complained. A plant says what is declared, and what a right answer names: one of
``keys``, the dtype that is found, and a part of the place. ``build()`` makes model, optimizer and
step on this rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
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
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import mesh

__all__ = ["PLANTS", "Breach"]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Made = tuple[nn.Module, torch.optim.Optimizer, Callable[[], Any]]
WIDTH = 16


@dataclass(frozen=True)
class Breach:
    """One planted breach, and what a right answer names."""

    name: str
    ranks: int
    declared: dict[str, Any]
    build: Callable[[], Made]
    keys: tuple[str, ...]
    found: str
    where: str = ""


class Block(nn.Module):
    """A norm and two linear layers, beside a skip connection."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class CastNorm(nn.LayerNorm):
    """A norm that takes weights of any dtype."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    region: torch.dtype | None = None,
    device_type: str = "cpu",
    dtype: torch.dtype = FP32,
    shape: tuple[int, ...] = (2, 4, WIDTH),
    after: Callable[[], None] = lambda: None,
) -> Made:
    """Return a model with an optimizer and one step: forward, backward, ``after``, step."""
    chosen = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        chosen.zero_grad()
        x = torch.randn(shape).to(dtype)
        with torch.autocast(device_type, region or BF16, enabled=region is not None):
            out = model(x)
        loss = out.float().square().mean()
        loss.backward()
        after()
        chosen.step()
        return loss.detach()

    return model, chosen, step


def _dp() -> Any:
    return mesh((dist.get_world_size(),), ("dp",))


def _tp() -> Any:
    return mesh((dist.get_world_size(),), ("tp",))


TP_PLAN: dict[str, Any] = {
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
}


def _sharded(policy: MixedPrecisionPolicy, model: nn.Module | None = None) -> nn.Module:
    model = Net() if model is None else model
    for block in model.blocks:
        fully_shard(block, mesh=_dp(), mp_policy=policy)
    return fully_shard(model, mesh=_dp(), mp_policy=policy)


# -- the five of which people complained -----------------------------------------------------------


def _reduce_dtype_is_not_tensor_parallels() -> Made:
    """A policy with reduce_dtype fp32 does not reach the all-reduce of tensor parallel."""
    grid = mesh((2, 2), ("dp", "tp"))
    model = parallelize_module(Net(), grid["tp"], TP_PLAN)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for block in model.blocks:
        fully_shard(block, mesh=grid["dp"], mp_policy=policy)
    return _trained(fully_shard(model, mesh=grid["dp"], mp_policy=policy))


def _gather_is_not_fp8() -> Made:
    """Told to gather in fp8, it gathers what the policy says."""
    return _trained(_sharded(MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)))


def _upcast_that_does_nothing() -> Made:
    """A loop over parameters that casts copies, and leaves the model as it was loaded."""
    model = Net().to(BF16)
    for parameter in model.parameters():
        parameter.data.to(FP32)
    return _trained(model, dtype=BF16)


def _weights_of_norms() -> Made:
    """The whole model cast, where norms were to stay; they cast their weights in use."""
    model = Net()
    for block in model.blocks:
        block.norm = CastNorm(WIDTH)
    model.to(BF16)
    for block in model.blocks:
        block.up.float()
        block.down.float()
    model.head.float()
    return _trained(model, region=BF16)


def _states_in_bf16() -> Made:
    """An optimizer over bf16 weights makes its states like them."""
    return _trained(Net().to(BF16), dtype=BF16)


# -- gradients between ranks -----------------------------------------------------------------------


def _sums_in_bf16(state, bucket):  # annotations as text, which DDP refuses
    """What torch's bf16_compress_hook does, which DDP refuses where there is no NCCL."""
    buffer = bucket.buffer()
    small = buffer.to(BF16).div_(dist.get_world_size())
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def _ddp_hook(hook: Any) -> Callable[[], Made]:
    def build() -> Made:
        model = DistributedDataParallel(Net())
        model.register_comm_hook(None, hook)
        return _trained(model)

    return build


def _ddp_builtin_hook() -> Made:
    model = DistributedDataParallel(Net())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return _trained(model)


def _our_int8_hook() -> Made:
    from distamp import comm_hooks

    model = DistributedDataParallel(Net())
    comm_hooks.register(model, "int8")
    return _trained(model)


def _fsdp1(policy: MixedPrecision) -> Callable[[], Made]:
    def build() -> Made:
        model = FullyShardedDataParallel(
            Net(), mixed_precision=policy, device_id=torch.device("cpu")
        )
        return _trained(model)

    return build


def _fsdp2(policy: MixedPrecisionPolicy) -> Callable[[], Made]:
    return lambda: _trained(_sharded(policy))


def _one_block_of_another_policy() -> Made:
    model = Net()
    fully_shard(
        model.blocks[1],
        mesh=_dp(),
        mp_policy=MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16),
    )
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=True)
    fully_shard(model.blocks[0], mesh=_dp(), mp_policy=policy)
    return _trained(fully_shard(model, mesh=_dp(), mp_policy=policy))


def _hybrid() -> Made:
    grid = mesh((2, 2), ("replicate", "shard"))
    model, policy = Net(), MixedPrecisionPolicy(param_dtype=BF16)
    for block in model.blocks:
        fully_shard(block, mesh=grid, mp_policy=policy)
    return _trained(fully_shard(model, mesh=grid, mp_policy=policy))


def _by_hand() -> Made:
    model = Net()

    def average() -> None:
        for parameter in model.parameters():
            half = parameter.grad.to(BF16)
            dist.all_reduce(half)
            parameter.grad.copy_(half / dist.get_world_size())

    return _trained(model, after=average)


def _zero_of_bf16_weights() -> Made:
    model = DistributedDataParallel(Net().to(BF16))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1e-3)
    return _trained(model, optimizer, dtype=BF16)


def _oss_broadcasts_fp16() -> Made:
    from fairscale.optim import OSS

    model = Net()
    optimizer = OSS(model.parameters(), torch.optim.SGD, broadcast_fp16=True, lr=1e-3)
    return _trained(model, optimizer)


# -- tensor and sequence parallel ------------------------------------------------------------------


def _tensor_parallel_in_fp32() -> Made:
    """The region names another device, so what tensor parallel sends is fp32."""
    return _trained(parallelize_module(Net(), _tp(), TP_PLAN))


def _tensor_parallel_in_bf16() -> Made:
    return _trained(parallelize_module(Net().to(BF16), _tp(), TP_PLAN), dtype=BF16)


def _sequence_parallel_in_fp32() -> Made:
    block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, 4))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Replicate()),
    }
    return _trained(parallelize_module(block, _tp(), plan))


# -- what computes ---------------------------------------------------------------------------------


class Disabled(nn.Module):
    """A module that leaves the region for itself, as much model code does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float())


class Attention(nn.Module):
    """Attention that upcasts its queries, keys and values by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            q, k, v = self.qkv(x.float()).chunk(3, -1)
        q, k, v = (each.float() for each in (q, k, v))
        with torch.autocast("cpu", enabled=False):
            return nn.functional.scaled_dot_product_attention(q, k, v)


class WideBackward(torch.autograd.Function):
    """A product in bf16 whose gradients are made in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.to(BF16) @ weight.to(BF16).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.float()
        return grad @ weight, grad.flatten(0, -2).t() @ x.float().flatten(0, -2)


class Wide(nn.Linear):
    """Linear by `WideBackward`."""

    def forward(self, x: Tensor) -> Tensor:
        return WideBackward.apply(x, self.weight)


def _a_block_leaves_the_region() -> Made:
    model = Net()
    model.blocks[1] = Disabled(model.blocks[1])
    return _trained(model, region=BF16)


def _region_of_another_device() -> Made:
    return _trained(Net())


def _attention_by_hand() -> Made:
    return _trained(nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention()), region=BF16)


def _wide_backward() -> Made:
    return _trained(nn.Sequential(nn.Linear(WIDTH, WIDTH), Wide(WIDTH, 4)), region=BF16)


def _a_convolution() -> Made:
    inner = nn.Conv2d(3, 4, 3)
    model = nn.Sequential(Disabled(inner), nn.Flatten(), nn.Linear(4 * 36, 4))
    return _trained(model, region=BF16, shape=(2, 3, 8, 8))


def _norms_in_bf16() -> Made:
    return _trained(Net().to(BF16), dtype=BF16)


def _one_rank_in_fp32() -> Made:
    model = Net()
    return _trained(model, region=BF16 if dist.get_rank() == 0 else None)


def _compiled_in_fp32() -> Made:
    model = Net()
    model.blocks[0] = torch.compile(model.blocks[0], backend="aot_eager")
    return _trained(model)


# -- what is held ----------------------------------------------------------------------------------


def _one_layer_in_bf16() -> Made:
    model = Net()
    model.head.to(BF16)
    return _trained(model, region=BF16)


def _adapter_in_fp16() -> Made:
    model = Net()
    model.blocks[1].adapter = nn.Linear(WIDTH, WIDTH).to(FP16)
    return _trained(model, region=BF16)


def _no_masters() -> Made:
    return _trained(Net().to(BF16), dtype=BF16)


class HalfStates(torch.optim.SGD):
    """An optimizer that keeps what it remembers in bf16."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            if (buffer := state.get("momentum_buffer")) is not None:
                state["rounded"] = buffer.to(BF16)
                state.pop("momentum_buffer")


def _an_optimizers_own_bf16() -> Made:
    model = Net()
    return _trained(model, HalfStates(model.parameters(), lr=1e-3, momentum=0.9))


def _states_of_one_group() -> Made:
    """Loaded from a checkpoint in which one group's states had been cast to save space."""
    model = Net()
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    made = _trained(model, optimizer)
    made[2]()
    for parameter in model.head.parameters():
        state = optimizer.state[parameter]
        state["exp_avg"] = state["exp_avg"].to(BF16)
        state["exp_avg_sq"] = state["exp_avg_sq"].to(BF16)
    frozen = copy.copy(made[2])

    def step() -> Any:
        # As much code does in the first steps: the head is not trained, its states lie there.
        for parameter in model.head.parameters():
            parameter.requires_grad_(False)
        return frozen()

    return model, optimizer, step


_POLICY = MixedPrecisionPolicy
_REDUCES = ("reduce",)

PLANTS: tuple[Breach, ...] = (
    Breach(
        "reduce_dtype does not reach tensor parallel",
        4,
        {"reduce": "fp32", "activations": "fp32", "gather": "bf16"},
        _reduce_dtype_is_not_tensor_parallels,
        ("activations", "reduce"),
        "bf16",
        "blocks",
    ),
    Breach(
        "an fp8 all-gather that is bf16",
        2,
        {"gather": "fp8"},
        _gather_is_not_fp8,
        ("gather",),
        "bf16",
    ),
    Breach(
        "an upcast that does nothing",
        1,
        {"parameters": "fp32"},
        _upcast_that_does_nothing,
        ("parameters",),
        "bf16",
    ),
    Breach(
        "weights of norms in bf16",
        1,
        {"parameters": "fp32", "compute": "bf16"},
        _weights_of_norms,
        ("parameters", "norms"),
        "bf16",
        "norm",
    ),
    Breach(
        "optimizer states in bf16",
        1,
        {"optimizer_state": "fp32"},
        _states_in_bf16,
        ("optimizer_state",),
        "bf16",
    ),
    Breach(
        "DDP under a hook of bf16",
        2,
        {"reduce": "fp32"},
        _ddp_hook(_sums_in_bf16),
        _REDUCES,
        "bf16",
    ),
    Breach(
        "DDP under fp16_compress_hook",
        2,
        {"reduce": "fp32"},
        _ddp_hook(fp16_compress_hook),
        _REDUCES,
        "fp16",
    ),
    Breach("DDP under a hook in C++", 2, {"reduce": "fp32"}, _ddp_builtin_hook, _REDUCES, "fp16"),
    Breach("DDP under an int8 hook", 2, {"reduce": "fp32"}, _our_int8_hook, _REDUCES, "int8"),
    Breach(
        "FSDP1 reduces in bf16",
        2,
        {"reduce": "fp32"},
        _fsdp1(MixedPrecision(param_dtype=BF16, reduce_dtype=BF16)),
        _REDUCES,
        "bf16",
    ),
    Breach(
        "FSDP1 gathers in fp32",
        2,
        {"gather": "bf16"},
        _fsdp1(MixedPrecision(reduce_dtype=FP32)),
        ("gather",),
        "fp32",
    ),
    Breach(
        "FSDP2 without reduce_dtype",
        2,
        {"reduce": "fp32"},
        _fsdp2(_POLICY(param_dtype=BF16)),
        _REDUCES,
        "bf16",
    ),
    Breach(
        "FSDP2 gathers in fp32",
        2,
        {"gather": "bf16"},
        _fsdp2(_POLICY(reduce_dtype=FP32)),
        ("gather",),
        "fp32",
    ),
    Breach(
        "one block under another policy",
        2,
        {"gather": "bf16", "reduce": "fp32"},
        _one_block_of_another_policy,
        ("gather",),
        "fp32",
        "1",
    ),
    Breach("HSDP reduces in bf16", 4, {"reduce": "fp32"}, _hybrid, _REDUCES, "bf16"),
    Breach(
        "an average by hand in bf16",
        2,
        {"reduce": "fp32"},
        _by_hand,
        ("reduce", "activations"),
        "bf16",
    ),
    Breach(
        "ZeRO broadcasts bf16 weights",
        2,
        {"gather": "fp32"},
        _zero_of_bf16_weights,
        ("gather",),
        "bf16",
    ),
    Breach(
        "OSS broadcasts in fp16", 2, {"gather": "fp32"}, _oss_broadcasts_fp16, ("gather",), "fp16"
    ),
    Breach(
        "tensor parallel sends fp32",
        2,
        {"activations": "bf16"},
        _tensor_parallel_in_fp32,
        ("activations",),
        "fp32",
        "blocks",
    ),
    Breach(
        "tensor parallel sends bf16",
        2,
        {"activations": "fp32"},
        _tensor_parallel_in_bf16,
        ("activations",),
        "bf16",
        "blocks",
    ),
    Breach(
        "sequence parallel sends fp32",
        2,
        {"activations": "bf16"},
        _sequence_parallel_in_fp32,
        ("activations",),
        "fp32",
    ),
    Breach(
        "a block that leaves the region",
        1,
        {"compute": "bf16"},
        _a_block_leaves_the_region,
        ("compute",),
        "fp32",
        "blocks.1",
    ),
    Breach(
        "the region is of another device",
        1,
        {"compute": "bf16"},
        _region_of_another_device,
        ("compute",),
        "fp32",
    ),
    Breach(
        "attention that upcasts",
        1,
        {"compute": "bf16"},
        _attention_by_hand,
        ("compute",),
        "fp32",
        "1",
    ),
    Breach(
        "a backward pass in fp32", 1, {"compute": "bf16"}, _wide_backward, ("compute",), "fp32", "1"
    ),
    Breach(
        "a convolution in fp32", 1, {"compute": "bf16"}, _a_convolution, ("compute",), "fp32", "0"
    ),
    Breach(
        "norms compute in bf16", 1, {"norms": "fp32"}, _norms_in_bf16, ("norms",), "bf16", "norm"
    ),
    Breach(
        "one rank computes in fp32",
        2,
        {"compute": ("bf16", "fp32")},
        _one_rank_in_fp32,
        ("compute", "ranks"),
        "fp32",
    ),
    Breach(
        "a compiled block in fp32",
        1,
        {"compute": "bf16"},
        _compiled_in_fp32,
        ("compute",),
        "fp32",
        "blocks.0",
    ),
    Breach(
        "one layer loaded in bf16",
        1,
        {"parameters": "fp32"},
        _one_layer_in_bf16,
        ("parameters",),
        "bf16",
        "head",
    ),
    Breach(
        "an adapter in fp16",
        1,
        {"parameters": "fp32"},
        _adapter_in_fp16,
        ("parameters",),
        "fp16",
        "adapter",
    ),
    Breach(
        "bf16 weights without masters", 1, {"masters": "fp32"}, _no_masters, ("masters",), "bf16"
    ),
    Breach(
        "an optimizer's own bf16 states",
        1,
        {"optimizer_state": "fp32"},
        _an_optimizers_own_bf16,
        ("optimizer_state",),
        "bf16",
    ),
    Breach(
        "states of one group in bf16",
        1,
        {"optimizer_state": "fp32"},
        _states_of_one_group,
        ("optimizer_state",),
        "bf16",
        "head",
    ),
)
