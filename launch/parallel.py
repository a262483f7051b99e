"""How a model is spread over the ranks: one mesh of copies, shards and tensor-parallel ranks."""

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from launch.config import Config, UsageError
from launch.model import GPT


def pick_device(config: Config) -> torch.device:
    """Return this rank's device: the accelerator of its local rank, or the CPU.

    Raises:
        UsageError: If it is not there.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = "cpu" if accelerator is None else accelerator.type
    name = found if config.device == "auto" else config.device
    if name == "cpu":
        return torch.device("cpu")
    if name != found:
        here = " or ".join(dict.fromkeys(["auto", "cpu", found]))
        raise UsageError(f"--device {name}: it must be {here} on this machine")
    ranks, count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    if ranks > count:
        raise UsageError(f"--device {name}: {ranks} ranks on this machine, which has {count}")
    device = torch.device(name, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device.index)
    return device


@contextmanager
def join(config: Config) -> Iterator[None]:
    """Join the ranks that torchrun started, and leave them at the end; one alone makes no group."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or dist.is_initialized():
        if world > 1:
            dist.barrier()  # as making a group does: each rank has looked at the run's folder
        yield
        return
    # DDP and torch's optimizers import torch._dynamo on the way. Imported while a group exists it
    # keeps that group for ever, and gloo's threads may then end the process with an abort.
    importlib.import_module("torch._dynamo")
    timeout = timedelta(seconds=config.timeout)
    store = next(iter(rendezvous("env://", rank, world, timeout=timeout)))[0]
    # torchrun's store outlives a group of processes, and so do the addresses they left there.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        store=PrefixStore(f"attempt {attempt} of {world}", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


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

    rank: int
    world: int
    replicate: int
    shard: int
    tp: int
    mesh: DeviceMesh | None

    @classmethod
    def of(cls, config: Config, device: torch.device) -> Self:
        """Lay out the ranks of the default group as the flags ask."""
        alone = not dist.is_initialized()
        rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        shape, names = config.layout(world), ("replicate", "shard", "tp")
        mesh = None if world == 1 else init_device_mesh(device.type, shape, mesh_dim_names=names)
        return cls(rank, world, *shape, mesh)

    def __str__(self) -> str:
        """Say it for people."""
        kinds = {"copies": self.replicate, "shards": self.shard, "tensor-parallel": self.tp}
        several = [f"{count} {name}" for name, count in kinds.items() if count > 1]
        return " x ".join(several) or "one process"

    @property
    def data_world(self) -> int:
        """How many ranks read different examples."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """Which of them this one is."""
        return self.rank // self.tp

    @property
    def replicas(self) -> ProcessGroup | None:
        """The ranks that have the same shard, where both exchanges go through a hook."""
        several = self.mesh is not None and self.replicate > 1 and self.shard > 1
        return self.mesh["replicate"].get_group() if several and self.mesh is not None else None

    def sum(self, *values: float | Tensor) -> list[float]:
        """Add values over the ranks that read different examples, in float64."""
        packed = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if self.world > 1:
            dist.all_reduce(packed)
        return [value / self.tp for value in packed.tolist()]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return what is gathered, compiled or checkpointed as one: members of the ModuleLists."""
    found: list[nn.Module] = []
    for child in model.children():
        found += [*child] if isinstance(child, nn.ModuleList) else blocks_of(child)
    return found


def prepare_blocks(model: nn.Module, config: Config) -> None:
    """Checkpoint and compile the blocks; only their forward changes, so names stay.

    Raises:
        UsageError: The model has no blocks.
    """
    if not config.compile and config.checkpoint_blocks == "none":
        return
    blocks: list[Any] = [*blocks_of(model)]
    if not blocks:
        raise UsageError(f"--model {config.model}: it has no blocks (members of a ModuleList)")
    for block in blocks:
        if config.checkpoint_blocks != "none":
            selective = config.checkpoint_blocks == "selective"
            block.forward = _checkpointed(block.forward, selective)
        if config.compile:  # last, so that the compiler sees what is to be computed again
            block.forward = torch.compile(block.forward)


def _checkpointed(forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    extra: dict[str, Any] = {}
    if selective:
        extra["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    return functools.partial(checkpoint, forward, use_reentrant=False, **extra)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what takes longest to compute again: products and attention."""
    kept = "mm" in op.name() or "attention" in op.name()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def parallelize(model: nn.Module, config: Config, layout: Layout, device: torch.device) -> None:
    """Divide a model's weights over ``--tp`` and ``--shard``, in place; DDP comes later.

    Raises:
        UsageError: The model does not say how its layers can be divided.
    """
    if layout.mesh is None or layout.shard * layout.tp == 1:
        return
    if layout.tp > 1:
        plan = getattr(model, "tensor_parallel_plan", None)
        if plan is None:
            raise UsageError(
                f"--tp {layout.tp}: --model {config.model} has no tensor_parallel_plan that says"
                " which layers to divide by columns and rows; leave --tp out, or take gpt"
            )
        columns, rows = plan
        styles: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in columns}
        styles |= {f"blocks.*.{name}": RowwiseParallel() for name in rows}
        parallelize_module(model, layout.mesh["tp"], styles)
    # A hook averages over the copies itself; without one, torch does.
    copied = layout.replicate > 1 and config.hook is None
    mesh = layout.mesh["replicate", "shard"] if copied else layout.mesh["shard"]
    level = config.level
    if level.casts_model and level.keep_batchnorm_fp32:
        for norm in [m for m in model.modules() if isinstance(m, _BatchNorm) and m.affine]:
            fully_shard(norm, mesh=mesh)  # a group has one dtype
    whole = inside = MixedPrecisionPolicy()
    if level.master_weights:  # FSDP's fp32 shards are the masters
        whole = inside = MixedPrecisionPolicy(level.param, level.reduce)
    elif level.autocasts and (device.type != "cpu" or isinstance(model, GPT)):
        # The products see the same numbers, and half the bytes travel. On a CPU torch's norms take
        # no weights of another dtype than their input.
        inside = MixedPrecisionPolicy(level.compute, level.reduce, cast_forward_inputs=False)
    for block in blocks_of(model):
        if not isinstance(block, FSDPModule):
            fully_shard(block, mesh=mesh, mp_policy=inside)
    fully_shard(model, mesh=mesh, mp_policy=whole)


def cut_over(parameter: Tensor) -> DeviceMesh | None:
    """Return the ranks over which a weight is cut; the other ranks have copies of its parts."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def settle(model: nn.Module, layout: Layout, sample: Tensor, device: torch.device) -> nn.Module:
    """Wrap what is not sharded in DDP, and return what is to be called.

    DDP lays its buckets out again after its first backward pass, and the order in which gradients
    are added depends on the layout. One pass is therefore thrown away here, so that the first step
    of a resumed run adds in the same order as the step that it repeats.

    Raises:
        UsageError: A parameter takes no part in what the model returns.
    """
    if layout.world == 1 or layout.shard * layout.tp > 1:
        return model
    ids = None if device.type == "cpu" else [device.index]
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng([] if ids is None else ids, device_type=device.type):
        # Twice: a batch norm has no statistics of one example.
        wrapped(torch.stack([sample] * 2).to(device)).float().sum().backward()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise UsageError(
                f"--model: {name} takes no part in what it returns, and DDP waits for its gradient;"
                " freeze it (requires_grad_(False)), or take --shard"
            )
    wrapped.zero_grad(set_to_none=True)
    return wrapped
