"""How a model is spread over the ranks: one mesh of copies, shards and tensor-parallel ranks."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

# Imported while a group of processes exists, as DDP and torch's optimizers do, it keeps that group
# for ever, and gloo's threads may then end the process with an abort.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint

from launch.config import Config, to_seconds
from launch.data import Data
from launch.model import GPT, find_blocks
from launch.program import UsageError, convert_to_usage_error, require

# What takes longest to compute again: products and attention.
_SLOW_OPS = [
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
    """Return this rank's device: the accelerator of its local rank, or the CPU.

    Raises:
        UsageError: If it is not there.
    """
    best = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    kind = best.type if config.device == "auto" else config.device
    here = dict.fromkeys(("auto", "cpu", best.type))
    require(kind in here, f"--device {kind}: here it must be {' or '.join(here)}")
    if kind == "cpu":
        return torch.device("cpu")
    ranks, count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    require(ranks <= count, f"--device {kind}: {ranks} ranks on this machine, which has {count}")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device.index)
    return device


@contextlib.contextmanager
def process_group(config: Config) -> Iterator[None]:
    """Join the ranks that torchrun started, and leave them at the end; one alone makes no group."""
    with contextlib.ExitStack() as stack:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group(timeout=timedelta(seconds=to_seconds(config.timeout)))
            stack.callback(dist.destroy_process_group)
        yield


@dataclass(frozen=True)
class Layout:
    """Who this rank is, and what it shares with whom.

    Attributes:
        rank: Among all.
        world: How many there are.
        replicate: Copies of the model.
        shard: Ranks that share one copy's weights.
        tp: Ranks that share each matrix.
        mesh: All ranks in these three dimensions; None where one is alone.
    """

    rank: int = 0
    world: int = 1
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, config: Config, device: torch.device) -> Self:
        """Lay out the ranks of the default group as the flags ask."""
        if not dist.is_initialized():
            return cls()
        shape = config.mesh_shape(dist.get_world_size())
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard", "tp"))
        return cls(dist.get_rank(), dist.get_world_size(), *shape, mesh)

    @property
    def data_world_size(self) -> int:
        """How many ranks read different examples."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """Which of them this one is."""
        return self.rank // self.tp

    @property
    def is_sharded(self) -> bool:
        """Whether a weight is cut over ranks."""
        return self.shard * self.tp > 1

    def sum(self, *values: float | Tensor) -> list[float]:
        """Add values over the ranks that read different examples, in float64."""
        packed = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if self.world > 1:
            dist.all_reduce(packed)
        return [value / self.tp for value in packed.tolist()]

    def run_on_first_rank(self, action: Callable[[], object]) -> None:
        """Do something on the first rank, while the others wait for it.

        Raises:
            UsageError: It was refused, or its file; on every rank.
        """
        refused: list[str | None] = [None]
        try:
            with convert_to_usage_error("cannot write", OSError):
                if self.rank == 0:
                    action()
        except UsageError as error:
            refused = [str(error)]
        if self.world > 1:
            dist.broadcast_object_list(refused)
        require(refused[0] is None, str(refused[0]))


def prepare_blocks(model: nn.Module, config: Config) -> None:
    """Checkpoint and compile the blocks; only their forward changes, so names stay.

    Raises:
        UsageError: The model has no blocks.
    """
    kind, blocks = config.activation_checkpointing, find_blocks(model)
    asked = f"--compile {config.compile} --activation-checkpointing {kind}"
    fault = f"--model {config.model} has no blocks (members of a ModuleList)"
    require(blocks or (kind == "none" and not config.compile), f"{asked}: {fault}")
    contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, _SLOW_OPS)
    kept: dict[str, Any] = {"context_fn": contexts} if kind == "selective" else {}
    again = functools.partial(checkpoint.checkpoint, use_reentrant=False, **kept)
    for block in blocks:
        if kind != "none":
            block.forward = functools.partial(again, block.forward)
        # Last, so that the compiler sees what is to be computed again.
        if config.compile:
            block.forward = torch.compile(block.forward)


def parallelize(model: nn.Module, config: Config, layout: Layout, device: torch.device) -> None:
    """Divide a model's weights over ``--tp`` and ``--shard``, in place; DDP comes later.

    Raises:
        UsageError: The model does not say how its layers can be divided.
    """
    if layout.mesh is None or not layout.is_sharded:
        return
    if layout.tp > 1:
        columns, rows = getattr(model, "tensor_parallel_plan", ((), ()))
        lacking = f"--model {config.model} has no tensor_parallel_plan that says"
        hint = "which layers to divide by columns and rows; leave --tp out, or take gpt"
        require(columns, f"--tp {layout.tp}: {lacking} {hint}")
        styles: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in columns}
        styles |= {f"blocks.*.{name}": RowwiseParallel() for name in rows}
        parallelize_module(model, layout.mesh["tp"], styles)
    # A hook averages over the copies itself; without one, torch does.
    copied = layout.replicate > 1 and config.comm_hook == "none"
    mesh = layout.mesh["replicate", "shard"] if copied else layout.mesh["shard"]
    level = config.level
    if level.casts_model and level.keep_batchnorm_fp32:
        for norm in [m for m in model.modules() if isinstance(m, _BATCH_NORMS) and m.affine]:
            fully_shard(norm, mesh=mesh)  # a group has one dtype
    outside = inside = MixedPrecisionPolicy()
    if level.master_weights:  # FSDP's fp32 shards are the masters
        outside = inside = MixedPrecisionPolicy(level.param, level.reduce)
    elif level.autocasts and (device.type != "cpu" or isinstance(model, GPT)):
        # The products see the same numbers, and half the bytes travel. On a CPU torch's norms take
        # no weights of another dtype than their input.
        inside = MixedPrecisionPolicy(level.compute, level.reduce, cast_forward_inputs=False)
    for block in find_blocks(model):
        if not isinstance(block, FSDPModule):
            fully_shard(block, mesh=mesh, mp_policy=inside)
    fully_shard(model, mesh=mesh, mp_policy=outside)


def wrap(model: nn.Module, layout: Layout, data: Data, device: torch.device) -> nn.Module:
    """Wrap what is not sharded in DDP, and return what is to be called.

    DDP lays its buckets out again after its first backward pass, and the order in which gradients
    are added depends on the layout. One pass is therefore thrown away here, so that the first step
    of a resumed run adds in the same order as the step that it repeats.

    Raises:
        UsageError: A parameter takes no part in what the model returns.
    """
    if layout.world == 1 or layout.is_sharded:
        return model
    ids = None if device.type == "cpu" else [device.index]
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    wrapped.eval()  # so that no statistics move, and no random numbers are drawn
    batch = data.first_batch(device)
    wrapped(*batch.inputs, **batch.kwargs).float().sum().backward()
    idle = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    fault = f"--model: {', '.join(idle)} take no part in what it returns, and DDP waits for them"
    require(not idle, f"{fault}; freeze them (requires_grad_(False)), or take --shard")
    wrapped.zero_grad(set_to_none=True)
    return wrapped
