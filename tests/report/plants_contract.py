"""Thirty-six planted violations of a declared precision, by which the contract tool is scored.

The plants were written before the tool existed. The first five copy the code of users who
reported the violation.

The docstring of each plant says which mistake the code makes and what `PrecisionContract.check`
must report: a key of the contract, the dtype, and sometimes a part of a module's name. A plant
runs on every rank and returns the arguments of `PrecisionContract.check`.
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

Training = tuple[Callable[[], Any], nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True)
class Violation:
    """A planted violation and its right answer.

    Args:
        name: The mistake in a few words.
        ranks: The number of ranks that train.
        contract: The arguments of the `PrecisionContract` that the plant violates.
        dtype: The dtype that the tool must report.
        build: A function that returns the arguments of `PrecisionContract.check`.
        place: A part of the module name that the tool must report.
        keys: The keys of the contract that the tool may report.
    """

    name: str
    ranks: int
    contract: dict[str, Any]
    dtype: str
    build: Callable[[], Any]
    place: str
    keys: tuple[str, ...]

    def is_found_by(self, violation: Any) -> bool:
        """Return whether a violation in a report has the right key, dtype and place."""
        if violation.key not in self.keys or self.dtype not in violation.found:
            return False
        return any(self.place in name for name in violation.where) or not self.place


PLANTS: list[Violation] = []


def plant(
    name: str,
    ranks: int,
    contract: dict[str, Any],
    dtype: str,
    place: str = "",
    keys: tuple[str, ...] = (),
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Return a decorator that adds a function to `PLANTS`.

    Without ``keys`` a violation of any key of ``contract`` is a right answer.
    """

    def add(build: Callable[[], Any]) -> Callable[[], Any]:
        right_keys = keys or tuple(contract)
        violation = Violation(name, ranks, contract, dtype, build, place, right_keys)
        PLANTS.append(violation)
        return build

    return add


PARAMETERS_FP32 = {"parameters": "fp32"}
COMPUTE_BF16 = {"compute": "bf16"}
STATE_FP32 = {"optimizer_state": "fp32"}
REDUCE_FP32 = {"grad_reduce": "fp32"}
REDUCE_BF16 = {"grad_reduce": "bf16"}
GATHER_BF16 = {"param_all_gather": "bf16"}
GATHER_FP32 = {"param_all_gather": "fp32"}
GATHER_FP8 = {"param_all_gather": "fp8"}
SEND_FP32 = {"activations": "fp32"}
SEND_BF16 = {"activations": "bf16"}
MASTERS_FP32 = {"master_weights": "fp32"}
NORMS_FP32 = {"norms": "fp32"}
COMPUTE_BF16_OR_FP32 = {"compute": ("bf16", "fp32")}


def make_net() -> Net:
    """Return a net without attention."""
    return Net(attends=False)


def train_in_bf16(model: nn.Module) -> Training:
    """Return the training of a model under autocast to bf16."""
    return trained(model, region=BF16)


def train_net_cast_to_bf16() -> Training:
    """Return the training of a net whose weights were cast to bf16, without autocast."""
    model = make_net()
    model.to(BF16)
    return trained(model)


def train_with_fsdp2(**policy: torch.dtype) -> Training:
    """Return the training of a net that FSDP2 shards over all ranks."""
    world = (dist.get_world_size(),)
    dp = mesh(world, ("dp",))
    model = sharded(make_net(), dp, **policy)
    return trained(model)


def train_with_fsdp1(**policy: torch.dtype) -> Training:
    """Return the training of a net that FSDP1 shards over all ranks."""
    net = make_net()
    cpu = torch.device("cpu")
    mixed_precision = MixedPrecision(**policy)
    model = FullyShardedDataParallel(net, mixed_precision=mixed_precision, device_id=cpu)
    return trained(model)


def make_tensor_parallel(net: Net, sequence: bool = False) -> nn.Module:
    """Return the net with feed-forward layers that two ranks share."""
    tp = mesh((2,), ("tp",))
    model: nn.Module = parallel(net, tp, sequence=sequence)
    return model


# Five mistakes that users reported.


@plant(
    "reduce_dtype does not reach tensor parallel",
    ranks=4,
    contract={**REDUCE_FP32, **SEND_FP32, **GATHER_BF16},
    dtype="bf16",
    place="blocks",
    keys=("activations", "grad_reduce"),
)
def sum_tensor_parallel_gradients_in_bf16() -> Training:
    """The reduce_dtype of FSDP2 does not apply to the all-reduce of tensor parallel.

    The tool must report a sum in bf16 over the tensor-parallel ranks of the blocks.
    """
    grid = mesh((2, 2), ("dp", "tp"))
    net = parallel(make_net(), grid["tp"])
    model = sharded(net, grid["dp"], param_dtype=BF16, reduce_dtype=FP32)
    return trained(model)


@plant("an fp8 all-gather that is bf16", ranks=2, contract=GATHER_FP8, dtype="bf16")
def gather_bf16_instead_of_fp8() -> Training:
    """FSDP2 gathers weights in the param_dtype bf16, though the user expects fp8."""
    return train_with_fsdp2(param_dtype=BF16, reduce_dtype=FP32)


@plant("an upcast that does nothing", ranks=1, contract=PARAMETERS_FP32, dtype="bf16")
def discard_upcast_of_parameters() -> Training:
    """The user casts each parameter to fp32 and discards the result: parameters stay bf16."""
    model = make_net()
    model.to(BF16)
    for param in model.parameters():
        param.data.to(FP32)
    return trained(model)


class CastNorm(nn.LayerNorm):
    """A layer norm that casts its weights to the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        bias = self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


@plant(
    "weights of norms in bf16",
    ranks=1,
    contract={**PARAMETERS_FP32, **COMPUTE_BF16},
    dtype="bf16",
    place="norm",
    keys=("parameters", "norms"),
)
def cast_weights_of_norms() -> Training:
    """A cast to bf16 includes the norms, whose weights should stay in fp32.

    No error shows it, because the norms cast their weights to the dtype of the input.
    """
    model = make_net()
    for block in model.blocks:
        block.norm2 = CastNorm(16, dtype=BF16)
    return train_in_bf16(model)


@plant("optimizer states in bf16", ranks=1, contract=STATE_FP32, dtype="bf16")
def make_optimizer_states_of_bf16_weights() -> Training:
    """AdamW makes states in bf16, because the weights are in bf16."""
    return train_net_cast_to_bf16()


# Gradients and weights that ranks send.


def average_in_bf16(state, bucket):  # DDP refuses annotations that are strings
    """Average a bucket in bf16, like torch's bf16_compress_hook, which needs NCCL."""
    buffer = bucket.buffer()
    world_size = dist.get_world_size()
    compressed = buffer.to(BF16).div_(world_size)
    future = dist.all_reduce(compressed, async_op=True).get_future()

    def decompress(reduced):
        (average,) = reduced.value()
        return buffer.copy_(average)

    return future.then(decompress)


@plant("DDP under a hook of bf16", ranks=2, contract=REDUCE_FP32, dtype="bf16")
def register_bf16_hook_of_ddp() -> Training:
    """A communication hook of DDP in Python sums gradients in bf16."""
    model = DistributedDataParallel(make_net())
    model.register_comm_hook(None, average_in_bf16)
    return trained(model)


@plant("DDP under fp16_compress_hook", ranks=2, contract=REDUCE_FP32, dtype="fp16")
def register_fp16_compress_hook() -> Training:
    """The fp16_compress_hook of torch sums gradients in fp16."""
    model = DistributedDataParallel(make_net())
    model.register_comm_hook(None, fp16_compress_hook)
    return trained(model)


@plant("DDP under a hook in C++", ranks=2, contract=REDUCE_FP32, dtype="fp16")
def register_builtin_fp16_hook() -> Training:
    """A communication hook of DDP in C++ sums gradients in fp16."""
    model = DistributedDataParallel(make_net())
    hook_type = dist.BuiltinCommHookType.FP16_COMPRESS
    model._register_builtin_comm_hook(hook_type)
    return trained(model)


@plant("DDP under an int8 hook", ranks=2, contract=REDUCE_FP32, dtype="int8")
def register_int8_hook_of_ddp() -> Training:
    """A hook of distamp sends the gradients of DDP in int8."""
    model = DistributedDataParallel(make_net())
    comm_hooks.register_comm_hook(model, "int8")
    return trained(model)


@plant("FSDP2 under a bf16 hook", ranks=2, contract=REDUCE_FP32, dtype="bf16")
def register_bf16_hook_of_fsdp2() -> Any:
    """A hook of distamp sends the gradients of FSDP2 in bf16.

    The hook sends from a thread, so the check takes the hook as an argument.
    """
    dp = mesh((2,), ("dp",))
    model = sharded(make_net(), dp)
    hook = comm_hooks.register_comm_hook(model, "bf16")
    return *trained(model), [hook]


@plant("FSDP1 reduces in bf16", ranks=2, contract=REDUCE_FP32, dtype="bf16")
def reduce_in_bf16_with_fsdp1() -> Training:
    """The reduce_dtype of FSDP1 is bf16, so gradients are summed in bf16."""
    return train_with_fsdp1(param_dtype=BF16, reduce_dtype=BF16)


@plant("FSDP1 gathers in fp32", ranks=2, contract=GATHER_BF16, dtype="fp32")
def gather_in_fp32_with_fsdp1() -> Training:
    """FSDP1 has no param_dtype, so it gathers weights in fp32."""
    return train_with_fsdp1(reduce_dtype=FP32)


@plant("FSDP2 reduces in bf16", ranks=2, contract=REDUCE_FP32, dtype="bf16")
def reduce_in_bf16_with_fsdp2() -> Training:
    """The reduce_dtype of FSDP2 is bf16, so gradients are summed in bf16."""
    return train_with_fsdp2(param_dtype=BF16, reduce_dtype=BF16)


@plant("FSDP2 gathers in fp32", ranks=2, contract=GATHER_BF16, dtype="fp32")
def gather_in_fp32_with_fsdp2() -> Training:
    """FSDP2 has no param_dtype, so it gathers weights in fp32."""
    return train_with_fsdp2(reduce_dtype=FP32)


@plant(
    "one block under another policy",
    ranks=2,
    contract={**GATHER_BF16, **REDUCE_FP32},
    dtype="fp32",
    place="1",
    keys=("param_all_gather",),
)
def shard_block_with_another_policy() -> Training:
    """FSDP2 gathers block 1 in fp32, because its policy is not the policy of the model."""
    dp = mesh((2,), ("dp",))
    model = make_net()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    fp32_policy = MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16)
    fully_shard(model.blocks[1], mesh=dp, mp_policy=fp32_policy)
    fully_shard(model.blocks[0], mesh=dp, mp_policy=policy)
    fully_shard(model, mesh=dp, mp_policy=policy)
    return trained(model)


@plant("HSDP reduces in bf16", ranks=4, contract=REDUCE_FP32, dtype="bf16")
def reduce_in_bf16_with_hsdp() -> Training:
    """The reduce_dtype of FSDP2 on a mesh with replicas is bf16."""
    grid = mesh((2, 2), ("replicate", "shard"))
    model = sharded(make_net(), grid, param_dtype=BF16, reduce_dtype=BF16)
    return trained(model)


@plant(
    "an average by hand in bf16",
    ranks=2,
    contract=REDUCE_FP32,
    dtype="bf16",
    keys=("grad_reduce", "activations"),
)
def average_gradients_in_user_code() -> Training:
    """The user's loop averages gradients in bf16 with calls of all_reduce."""
    model = make_net()
    world_size = dist.get_world_size()

    def average() -> None:
        for param in model.parameters():
            grad = param.grad.to(BF16)
            dist.all_reduce(grad)
            param.grad.copy_(grad / world_size)

    return trained(model, after=average)


@plant("ZeRO broadcasts bf16 weights", ranks=2, contract=GATHER_FP32, dtype="bf16")
def broadcast_bf16_weights_with_zero() -> Training:
    """ZeroRedundancyOptimizer broadcasts weights that were cast to bf16."""
    net = make_net()
    net.to(BF16)
    model = DistributedDataParallel(net)
    params = model.parameters()
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1e-3)
    return trained(model, optimizer)


@plant("OSS broadcasts in fp16", ranks=2, contract=GATHER_FP32, dtype="fp16")
def broadcast_fp16_weights_with_oss() -> Training:
    """The OSS optimizer of fairscale casts weights to fp16 for its broadcast."""
    from fairscale.optim import OSS

    model = make_net()
    params = model.parameters()
    optimizer = OSS(params, torch.optim.SGD, broadcast_fp16=True, lr=1e-3)
    return trained(model, optimizer)


@plant("tensor parallel sends fp32", ranks=2, contract=SEND_BF16, dtype="fp32", place="blocks")
def send_fp32_activations() -> Training:
    """Tensor-parallel blocks send activations in fp32, because no autocast region is open."""
    model = make_tensor_parallel(make_net())
    return trained(model)


@plant("tensor parallel sends bf16", ranks=2, contract=SEND_FP32, dtype="bf16", place="blocks")
def send_bf16_activations() -> Training:
    """Tensor-parallel blocks send activations in bf16, because their weights are in bf16."""
    net = make_net()
    net.to(BF16)
    model = make_tensor_parallel(net)
    return trained(model)


@plant("sequence parallel sends fp32", ranks=2, contract=SEND_BF16, dtype="fp32")
def send_fp32_activations_of_a_split_sequence() -> Training:
    """Sequence parallel sends activations in fp32, because no autocast region is open."""
    model = make_tensor_parallel(make_net(), sequence=True)
    return trained(model)


@plant("partial gradients that the optimizer adds up", ranks=2, contract=REDUCE_BF16, dtype="fp32")
def sum_partial_gradients_in_the_optimizer() -> Training:
    """Norms under sequence parallel have partial gradients, which the optimizer sums in fp32."""
    model = make_tensor_parallel(make_net(), sequence=True)
    return trained(model)


# Products, convolutions and norms.


class AutocastDisabled(nn.Module):
    """A wrapper that disables autocast for its module, as in many models."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float())


class UpcastAttention(AutocastDisabled):
    """Attention that casts its queries, keys and values to fp32."""

    def forward(self, x: Tensor) -> Tensor:
        projected = super().forward(x)
        query, key, value = projected.float().chunk(3, -1)
        with torch.autocast("cpu", enabled=False):
            return nn.functional.scaled_dot_product_attention(query, key, value)


class ProductWithFp32Backward(torch.autograd.Function):
    """A product in bf16 with a backward pass in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        bf16_weight = weight.to(BF16)
        return x.to(BF16) @ bf16_weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.float()
        rows = x.float().flatten(0, -2)
        grad_rows = grad.flatten(0, -2)
        weight_grad = grad_rows.t() @ rows
        return grad @ weight, weight_grad


class LinearWithFp32Backward(nn.Linear):
    """A linear layer with a backward pass in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return ProductWithFp32Backward.apply(x, self.weight)


def train_behind_linear_layer(module: nn.Module) -> Training:
    """Return the training of a linear layer and a module under autocast to bf16."""
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, module)
    inputs = torch.randn(2, 4, 16)
    return trained(model, region=BF16, inputs=inputs)


@plant(
    "a block that leaves the region",
    ranks=1,
    contract=COMPUTE_BF16,
    dtype="fp32",
    place="blocks.1",
)
def disable_autocast_in_a_block() -> Training:
    """Block 1 disables autocast, so its products are in fp32."""
    model = make_net()
    model.blocks[1] = AutocastDisabled(model.blocks[1])
    return train_in_bf16(model)


@plant("the region is of another device", ranks=1, contract=COMPUTE_BF16, dtype="fp32")
def open_no_region_for_the_device() -> Training:
    """No autocast region is open for the device of the model, so it computes in fp32."""
    model = make_net()
    return trained(model)


@plant("attention that upcasts", ranks=1, contract=COMPUTE_BF16, dtype="fp32", place="1")
def upcast_in_attention() -> Training:
    """Attention casts queries, keys and values to fp32 and computes in fp32."""
    attention = UpcastAttention(nn.Linear(16, 48))
    return train_behind_linear_layer(attention)


@plant("a backward pass in fp32", ranks=1, contract=COMPUTE_BF16, dtype="fp32", place="1")
def compute_backward_pass_in_fp32() -> Training:
    """A custom autograd function computes in bf16, and its gradients in fp32."""
    layer = LinearWithFp32Backward(16, 4)
    return train_behind_linear_layer(layer)


@plant("a convolution in fp32", ranks=1, contract=COMPUTE_BF16, dtype="fp32", place="0")
def compute_convolution_in_fp32() -> Training:
    """A convolution disables autocast and computes in fp32."""
    convolution = AutocastDisabled(nn.Conv2d(3, 4, 3))
    head = nn.Linear(4 * 36, 4)
    model = nn.Sequential(convolution, nn.Flatten(), head)
    images = torch.randn(2, 3, 8, 8)
    return trained(model, region=BF16, inputs=images)


@plant("norms compute in bf16", ranks=1, contract=NORMS_FP32, dtype="bf16", place="norm")
def compute_norms_in_bf16() -> Training:
    """The norms compute in bf16, because the whole model was cast to bf16."""
    return train_net_cast_to_bf16()


@plant("one rank computes in fp32", ranks=2, contract=COMPUTE_BF16_OR_FP32, dtype="fp32")
def open_region_on_one_rank() -> Training:
    """Only rank 0 opens an autocast region, so ranks compute in different dtypes.

    The contract allows both dtypes, but not on different ranks.
    """
    model = make_net()
    region = None
    if dist.get_rank() == 0:
        region = BF16
    return trained(model, region=region)


@plant("a compiled block in fp32", ranks=1, contract=COMPUTE_BF16, dtype="fp32", place="blocks")
def compile_block_without_region() -> Training:
    """A compiled block computes in fp32, because no autocast region is open."""
    model = make_net()
    model.blocks[0] = torch.compile(model.blocks[0], backend="aot_eager")
    return trained(model)


# Parameters and optimizer states.


class HalfStates(torch.optim.SGD):
    """SGD that stores its momentum in bf16."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            momentum_buffer = state.pop("momentum_buffer", None)
            if momentum_buffer is not None:
                state["rounded"] = momentum_buffer.to(BF16)


@plant("one layer loaded in bf16", ranks=1, contract=PARAMETERS_FP32, dtype="bf16", place="head")
def cast_head_to_bf16() -> Training:
    """The head of the model has weights in bf16."""
    model = make_net()
    model.head.to(BF16)
    return train_in_bf16(model)


@plant("an adapter in fp16", ranks=1, contract=PARAMETERS_FP32, dtype="fp16", place="adapter")
def add_adapter_in_fp16() -> Training:
    """An adapter with weights in fp16 was added to a block, and it does not run."""
    model = make_net()
    adapter = nn.Linear(16, 16)
    adapter.to(FP16)
    model.blocks[1].adapter = adapter
    return train_in_bf16(model)


@plant("bf16 weights without masters", ranks=1, contract=MASTERS_FP32, dtype="bf16")
def train_bf16_weights_without_masters() -> Training:
    """The optimizer updates weights in bf16 and has no masters in fp32."""
    return train_net_cast_to_bf16()


@plant("an optimizer's own bf16 states", ranks=1, contract=STATE_FP32, dtype="bf16")
def store_momentum_in_bf16() -> Training:
    """The optimizer stores its momentum in bf16, though the weights are in fp32."""
    model = make_net()
    params = model.parameters()
    optimizer = HalfStates(params, lr=1e-3, momentum=0.9)
    return trained(model, optimizer)


@plant("states of one group in bf16", ranks=1, contract=STATE_FP32, dtype="bf16", place="head")
def load_states_of_head_in_bf16() -> Training:
    """The checkpoint had states of one parameter group in bf16, to save space.

    The head is frozen, as in the first steps of many runs, so the optimizer does not update
    these states.
    """
    model = make_net()
    blocks = {"params": model.blocks.parameters()}
    head = {"params": model.head.parameters()}
    adamw = torch.optim.AdamW([blocks, head], lr=1e-3)
    step, _, optimizer = trained(model, adamw)
    step()
    for param in model.head.parameters():
        state = optimizer.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(BF16)
    model.head.requires_grad_(False)
    return step, model, optimizer
