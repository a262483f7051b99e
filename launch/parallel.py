"""The ranks of a run as a mesh of replicas, shards and tensor-parallel ranks."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

# DDP and torch's optimizers import this. If the first import happens while a process group exists,
# the group is never destroyed, and gloo's threads may abort the process at its end.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from launch.config import Config, to_seconds
from launch.data import Data
from launch.model import GPT, find_blocks
from launch.program import UsageError, convert_to_usage_error, require

# Matrix products and attention take longest to recompute.
_EXPENSIVE_OPS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def pick_device(config: Config) -> torch.device:
    """Return the device of this rank: the accelerator with its local rank, or the CPU.

    Raises:
        UsageError: There is no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = "cpu" if accelerator is None else accelerator.type
    device_type = available if config.device == "auto" else config.device
    choices = dict.fromkeys(("auto", "cpu", available))
    listed = " or ".join(choices)
    require(device_type in choices, f"--device {device_type}: here it must be {listed}")
    if device_type == "cpu":
        return torch.device("cpu")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device_count = torch.accelerator.device_count()
    require(
        local_ranks <= device_count,
        f"--device {device_type}: {local_ranks} ranks on this machine, which has {device_count}",
    )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device_type, local_rank)


@contextlib.contextmanager
def process_group(config: Config) -> Iterator[None]:
    """Make the process group of torchrun's ranks, and destroy it at the end.

    A single process gets no group.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    dist.init_process_group(timeout=timedelta(seconds=to_seconds(config.timeout)))
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Layout:
    """The rank of this process, and the ranks with which it shares the model and the data.

    Attributes:
        rank: The rank among all ranks.
        world_size: Number of all ranks.
        replicate: Number of copies of the model.
        shard: Number of ranks that share the weights of a copy.
        tp: Number of ranks that share each weight matrix.
        mesh: All ranks in these three dimensions, or None for a single process.
    """

    rank: int = 0
    world_size: int = 1
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    mesh: DeviceMesh | None = None

    @classmethod
    def from_config(cls, config: Config, device: torch.device) -> Self:
        """Arrange the ranks of the default process group according to the flags."""
        if not dist.is_initialized():
            return cls()
        world_size = dist.get_world_size()
        shape = config.mesh_shape(world_size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard", "tp"))
        return cls(dist.get_rank(), world_size, *shape, mesh)

    @property
    def data_world_size(self) -> int:
        """Number of ranks that read different examples."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """The rank among the ranks that read different examples."""
        return self.rank // self.tp

    @property
    def is_sharded(self) -> bool:
        """True if ranks hold parts of weights."""
        return self.shard * self.tp > 1

    def all_reduce_sum(self, *values: float | Tensor) -> list[float]:
        """Add values over the ranks that read different examples, in float64.

        Collective: every rank must call this.
        """
        packed = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(packed)
        # Every tensor-parallel rank has contributed the same values.
        packed /= self.tp
        return [float(value) for value in packed]

    def run_on_first_rank(self, action: Callable[[], object]) -> None:
        """Run an action on the first rank, and raise its `UsageError` on every rank.

        Collective: every rank must call this.

        Raises:
            UsageError: The action failed, or could not write a file.
        """
        message: list[str | None] = [None]
        if self.rank == 0:
            try:
                with convert_to_usage_error("cannot write", OSError):
                    action()
            except UsageError as error:
                message = [str(error)]
        if self.world_size > 1:
            dist.broadcast_object_list(message)
        if message[0] is not None:
            raise UsageError(message[0])


def prepare_blocks(model: nn.Module, config: Config) -> None:
    """Apply activation checkpointing and torch.compile to the forward of each block.

    The modules stay the same, so the names of their weights do not change.

    Raises:
        UsageError: The model has no blocks.
    """
    kind = config.activation_checkpointing
    if kind == "none" and not config.compile:
        return
    blocks = find_blocks(model)
    require(
        blocks,
        f"--compile {config.compile} --activation-checkpointing {kind}: --model {config.model} "
        "has no blocks (members of a ModuleList)",
    )
    recompute: Callable[..., Any] = functools.partial(checkpoint, use_reentrant=False)
    if kind == "selective":
        make_contexts = functools.partial(create_selective_checkpoint_contexts, _EXPENSIVE_OPS)
        recompute = functools.partial(recompute, context_fn=make_contexts)
    for block in blocks:
        if kind != "none":
            block.forward = functools.partial(recompute, block.forward)
        # The compiler comes last, so that it compiles the recomputation too.
        if config.compile:
            block.forward = torch.compile(block.forward)


def shard_model(model: nn.Module, config: Config, layout: Layout, device: torch.device) -> None:
    """Divide the weights of a model over ``--tp`` and ``--shard`` in place.

    Raises:
        UsageError: The model has no plan for tensor parallelism.
    """
    if layout.mesh is None or not layout.is_sharded:
        return
    if layout.tp > 1:
        _apply_tensor_parallel(model, config, layout.mesh["tp"])
    mesh = layout.mesh["shard"]
    # A communication hook averages over the replicas; without a hook, FSDP2 does.
    if layout.replicate > 1 and config.comm_hook == "none":
        mesh = layout.mesh["replicate", "shard"]
    level = config.level
    if level.casts_model and level.keep_batchnorm_fp32:
        # All parameters of an FSDP2 group have the same dtype.
        for module in list(model.modules()):
            if isinstance(module, _BATCH_NORMS) and module.affine:
                fully_shard(module, mesh=mesh)
    root_policy = MixedPrecisionPolicy()
    block_policy = MixedPrecisionPolicy()
    if level.master_weights:
        # The fp32 shards of FSDP2 are the master weights.
        root_policy = MixedPrecisionPolicy(level.param, level.reduce)
        block_policy = root_policy
    elif level.autocasts and (device.type != "cpu" or isinstance(model, GPT)):
        # Autocast would cast the gathered weights of a block anyway, so FSDP2 sends half the bytes.
        # On a CPU the norms of torch accept no weights of another dtype than their input.
        block_policy = MixedPrecisionPolicy(level.compute, level.reduce, cast_forward_inputs=False)
    for block in find_blocks(model):
        if not isinstance(block, FSDPModule):
            fully_shard(block, mesh=mesh, mp_policy=block_policy)
    fully_shard(model, mesh=mesh, mp_policy=root_policy)


def _apply_tensor_parallel(model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    plan: Any = getattr(model, "tensor_parallel_plan", None)
    require(
        plan,
        f"--tp {config.tp}: --model {config.model} has no tensor_parallel_plan that names the "
        "layers to divide by columns and by rows. Leave --tp out, or train gpt.",
    )
    columns, rows = plan
    styles: dict[str, Any] = {}
    for name in columns:
        styles[f"blocks.*.{name}"] = ColwiseParallel()
    for name in rows:
        styles[f"blocks.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, styles)


def wrap_in_ddp(model: nn.Module, layout: Layout, data: Data, device: torch.device) -> nn.Module:
    """Wrap a model in DDP unless it is sharded or alone, and return the module to call.

    DDP rebuilds its buckets after its first backward pass, and the order in which gradients are
    added depends on the buckets. One pass is therefore run here and thrown away, so that the first
    step of a resumed run adds in the same order as the step that it repeats.

    Raises:
        UsageError: The output of the model does not depend on some parameter.
    """
    if layout.world_size == 1 or layout.is_sharded:
        return model
    device_ids = None if device.type == "cpu" else [device.index]
    wrapped = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    # In evaluation mode the pass moves no statistics and draws no random numbers.
    wrapped.eval()
    batch = data.first_batch(device)
    outputs = wrapped(*batch.inputs, **batch.kwargs)
    outputs.float().sum().backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    listed = ", ".join(unused)
    require(
        not unused,
        f"--model: {listed} take no part in what it returns, and DDP waits for their gradients. "
        "Freeze them with requires_grad_(False), or train with --shard.",
    )
    wrapped.zero_grad(set_to_none=True)
    return wrapped
