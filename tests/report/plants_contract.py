"""Thirty-six violations of a declared precision, planted as people make them; for a score.

Written before the tool that is scored had been seen, and put into one table since. The first five
are made as the code did of which people complained. A plant says what is declared, and what a right
answer names: one of ``keys``, the dtype that is found, and a part of the place. ``build()`` makes
the arguments of `PrecisionContract.check` on this rank.
"""

from __future__ import annotations

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
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from tests.ranks import mesh
from tests.report.setups import BF16, FP16, FP32, Net, parallel, sharded, trained

__all__ = ["PLANTS", "Violation"]

Made = tuple[Callable[[], Any], nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True)
class Violation:
    """One planted violation, and what a right answer names.

    Args:
        keys: Words of the contract, any of which is right; None for those that were declared.
    """

    name: str
    ranks: int
    declared: dict[str, Any]
    found: str
    build: Callable[[], Any]
    where: str = ""
    keys: tuple[str, ...] | None = None


def _net() -> Net:
    return Net(attends=False)


def _changed(change: Callable[[Net], Any], region: torch.dtype | None = None) -> Made:
    model = _net()
    change(model)
    return trained(model, region=region)


def _half() -> Made:
    """Loaded or cast in bf16, with nothing else."""
    return trained(_net().to(BF16))


def _fsdp2(**policy: torch.dtype) -> Made:
    return trained(sharded(_net(), mesh((dist.get_world_size(),), ("dp",)), **policy))


def _fsdp1(**policy: torch.dtype) -> Made:
    cpu, mixed = torch.device("cpu"), MixedPrecision(**policy)
    return trained(FullyShardedDataParallel(_net(), mixed_precision=mixed, device_id=cpu))


# -- two of the five of which people complained ----------------------------------------------------


def _reduce_dtype_is_not_tensor_parallels() -> Made:
    """A policy with reduce_dtype fp32 does not reach the all-reduce of tensor parallel."""
    grid = mesh((2, 2), ("dp", "tp"))
    net = parallel(_net(), grid["tp"])
    return trained(sharded(net, grid["dp"], param_dtype=BF16, reduce_dtype=FP32))


class CastNorm(nn.LayerNorm):
    """A norm that takes weights of any dtype."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def _weights_of_norms() -> Made:
    """The whole model cast, where norms were to stay; they cast their weights in use."""
    model = _net()
    for block in model.blocks:
        block.norm2 = CastNorm(16, dtype=BF16)
    return trained(model, region=BF16)


# -- gradients between ranks -----------------------------------------------------------------------


def _sums_in_bf16(state, bucket):  # annotations as text, which DDP refuses
    """What torch's bf16_compress_hook does, which DDP refuses where there is no NCCL."""
    buffer = bucket.buffer()
    small = buffer.to(BF16).div_(dist.get_world_size())
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def _ddp(register: Callable[[DistributedDataParallel], Any]) -> Made:
    model = DistributedDataParallel(_net())
    register(model)
    return trained(model)


def _a_hook_of_fsdp2() -> Any:
    """It sends by threads of its own, so the contract is given it."""
    model = sharded(_net(), mesh((2,), ("dp",)))
    hook = comm_hooks.register_comm_hook(model, "bf16")
    return *trained(model), [hook]


def _one_block_of_another_policy() -> Made:
    dp, model = mesh((2,), ("dp",)), _net()
    other = MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16)
    fully_shard(model.blocks[1], mesh=dp, mp_policy=other)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    fully_shard(model.blocks[0], mesh=dp, mp_policy=policy)
    return trained(fully_shard(model, mesh=dp, mp_policy=policy))


def _by_hand() -> Made:
    model = _net()

    def average() -> None:
        for parameter in model.parameters():
            half = parameter.grad.to(BF16)
            dist.all_reduce(half)
            parameter.grad.copy_(half / dist.get_world_size())

    return trained(model, after=average)


def _zero_of_bf16_weights() -> Made:
    model = DistributedDataParallel(_net().to(BF16))
    return trained(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1e-3))


def _oss_broadcasts_fp16() -> Made:
    from fairscale.optim import OSS

    model = _net()
    return trained(model, OSS(model.parameters(), torch.optim.SGD, broadcast_fp16=True, lr=1e-3))


# -- what computes ---------------------------------------------------------------------------------


class Disabled(nn.Module):
    """A module that leaves the region for itself, as much model code does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float())


class Attention(Disabled):
    """Attention that upcasts its queries, keys and values by hand."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.float() for each in super().forward(x).chunk(3, -1))
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


def _behind_a_layer(module: nn.Module) -> Made:
    return trained(
        nn.Sequential(nn.Linear(16, 16), module), region=BF16, inputs=torch.randn(2, 4, 16)
    )


def _a_convolution() -> Made:
    model = nn.Sequential(Disabled(nn.Conv2d(3, 4, 3)), nn.Flatten(), nn.Linear(4 * 36, 4))
    return trained(model, region=BF16, inputs=torch.randn(2, 3, 8, 8))


# -- what is held ----------------------------------------------------------------------------------


class HalfStates(torch.optim.SGD):
    """An optimizer that keeps what it remembers in bf16."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            if (buffer := state.pop("momentum_buffer", None)) is not None:
                state["rounded"] = buffer.to(BF16)


def _an_optimizers_own_bf16() -> Made:
    model = _net()
    return trained(model, HalfStates(model.parameters(), lr=1e-3, momentum=0.9))


def _states_of_one_group() -> Made:
    """Loaded from a checkpoint in which one group's states had been cast to save space."""
    model = _net()
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters()}]
    step, _, optimizer = trained(model, torch.optim.AdamW(groups, lr=1e-3))
    step()
    for parameter in model.head.parameters():
        state = optimizer.state[parameter]
        state |= {name: state[name].to(BF16) for name in ("exp_avg", "exp_avg_sq")}
    # As much code does in the first steps: the head is not trained, its states lie there.
    model.head.requires_grad_(False)
    return step, model, optimizer


REDUCE, GATHER, COMPUTE = {"grad_reduce": "fp32"}, {"param_all_gather": "bf16"}, {"compute": "bf16"}
PARAMETERS, STATE = {"parameters": "fp32"}, {"optimizer_state": "fp32"}
SENDS_BF16, SENDS_FP32 = {"activations": "fp32"}, {"activations": "bf16"}
PLANTS: tuple[Violation, ...] = (
    Violation(
        "reduce_dtype does not reach tensor parallel",
        4,
        {"grad_reduce": "fp32", "activations": "fp32", "param_all_gather": "bf16"},
        "bf16",
        _reduce_dtype_is_not_tensor_parallels,
        "blocks",
        ("activations", "grad_reduce"),
    ),
    Violation(
        "an fp8 all-gather that is bf16",
        2,
        {"param_all_gather": "fp8"},
        "bf16",
        lambda: _fsdp2(param_dtype=BF16, reduce_dtype=FP32),
    ),
    Violation(
        "an upcast that does nothing",
        1,
        PARAMETERS,
        "bf16",
        lambda: _changed(lambda net: [p.data.to(FP32) for p in net.to(BF16).parameters()]),
    ),
    Violation(
        "weights of norms in bf16",
        1,
        {**PARAMETERS, **COMPUTE},
        "bf16",
        _weights_of_norms,
        "norm",
        ("parameters", "norms"),
    ),
    Violation("optimizer states in bf16", 1, STATE, "bf16", _half),
    Violation(
        "DDP under a hook of bf16",
        2,
        REDUCE,
        "bf16",
        lambda: _ddp(lambda model: model.register_comm_hook(None, _sums_in_bf16)),
    ),
    Violation(
        "DDP under fp16_compress_hook",
        2,
        REDUCE,
        "fp16",
        lambda: _ddp(lambda model: model.register_comm_hook(None, fp16_compress_hook)),
    ),
    Violation(
        "DDP under a hook in C++",
        2,
        REDUCE,
        "fp16",
        lambda: _ddp(
            lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        ),
    ),
    Violation(
        "DDP under an int8 hook",
        2,
        REDUCE,
        "int8",
        lambda: _ddp(lambda model: comm_hooks.register_comm_hook(model, "int8")),
    ),
    Violation("FSDP2 under a bf16 hook", 2, REDUCE, "bf16", _a_hook_of_fsdp2),
    Violation(
        "FSDP1 reduces in bf16",
        2,
        REDUCE,
        "bf16",
        lambda: _fsdp1(param_dtype=BF16, reduce_dtype=BF16),
    ),
    Violation("FSDP1 gathers in fp32", 2, GATHER, "fp32", lambda: _fsdp1(reduce_dtype=FP32)),
    Violation(
        "FSDP2 reduces in bf16",
        2,
        REDUCE,
        "bf16",
        lambda: _fsdp2(param_dtype=BF16, reduce_dtype=BF16),
    ),
    Violation("FSDP2 gathers in fp32", 2, GATHER, "fp32", lambda: _fsdp2(reduce_dtype=FP32)),
    Violation(
        "one block under another policy",
        2,
        {**GATHER, **REDUCE},
        "fp32",
        _one_block_of_another_policy,
        "1",
        ("param_all_gather",),
    ),
    Violation(
        "HSDP reduces in bf16",
        4,
        REDUCE,
        "bf16",
        lambda: trained(
            sharded(
                _net(),
                mesh((2, 2), ("replicate", "shard")),
                param_dtype=BF16,
                reduce_dtype=BF16,
            )
        ),
    ),
    Violation(
        "an average by hand in bf16",
        2,
        REDUCE,
        "bf16",
        _by_hand,
        keys=("grad_reduce", "activations"),
    ),
    Violation(
        "ZeRO broadcasts bf16 weights",
        2,
        {"param_all_gather": "fp32"},
        "bf16",
        _zero_of_bf16_weights,
    ),
    Violation(
        "OSS broadcasts in fp16", 2, {"param_all_gather": "fp32"}, "fp16", _oss_broadcasts_fp16
    ),
    Violation(
        "tensor parallel sends fp32",
        2,
        SENDS_FP32,
        "fp32",
        lambda: trained(parallel(_net(), mesh((2,), ("tp",)))),
        "blocks",
    ),
    Violation(
        "tensor parallel sends bf16",
        2,
        SENDS_BF16,
        "bf16",
        lambda: trained(parallel(_net().to(BF16), mesh((2,), ("tp",)))),
        "blocks",
    ),
    Violation(
        "sequence parallel sends fp32",
        2,
        SENDS_FP32,
        "fp32",
        lambda: trained(parallel(_net(), mesh((2,), ("tp",)), sequence=True)),
    ),
    Violation(
        "partial gradients that the optimizer adds up",
        2,
        {"grad_reduce": "bf16"},
        "fp32",
        lambda: trained(parallel(_net(), mesh((2,), ("tp",)), sequence=True)),
    ),
    Violation(
        "a block that leaves the region",
        1,
        COMPUTE,
        "fp32",
        lambda: _changed(
            lambda net: net.blocks.register_module("1", Disabled(net.blocks[1])), BF16
        ),
        "blocks.1",
    ),
    Violation("the region is of another device", 1, COMPUTE, "fp32", lambda: trained(_net())),
    Violation(
        "attention that upcasts",
        1,
        COMPUTE,
        "fp32",
        lambda: _behind_a_layer(Attention(nn.Linear(16, 48))),
        "1",
    ),
    Violation(
        "a backward pass in fp32", 1, COMPUTE, "fp32", lambda: _behind_a_layer(Wide(16, 4)), "1"
    ),
    Violation("a convolution in fp32", 1, COMPUTE, "fp32", _a_convolution, "0"),
    Violation("norms compute in bf16", 1, {"norms": "fp32"}, "bf16", _half, "norm"),
    Violation(
        "one rank computes in fp32",
        2,
        {"compute": ("bf16", "fp32")},
        "fp32",
        lambda: trained(_net(), region=BF16 if dist.get_rank() == 0 else None),
    ),
    Violation(
        "a compiled block in fp32",
        1,
        COMPUTE,
        "fp32",
        lambda: _changed(
            lambda net: net.blocks.register_module(
                "0", torch.compile(net.blocks[0], backend="aot_eager")
            )
        ),
        "blocks",
    ),
    Violation(
        "one layer loaded in bf16",
        1,
        PARAMETERS,
        "bf16",
        lambda: _changed(lambda net: net.head.to(BF16), BF16),
        "head",
    ),
    Violation(
        "an adapter in fp16",
        1,
        PARAMETERS,
        "fp16",
        lambda: _changed(
            lambda net: net.blocks[1].register_module("adapter", nn.Linear(16, 16).to(FP16)), BF16
        ),
        "adapter",
    ),
    Violation("bf16 weights without masters", 1, {"master_weights": "fp32"}, "bf16", _half),
    Violation("an optimizer's own bf16 states", 1, STATE, "bf16", _an_optimizers_own_bf16),
    Violation("states of one group in bf16", 1, STATE, "bf16", _states_of_one_group, "head"),
)
