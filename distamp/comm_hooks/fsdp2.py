"""Hooks for FSDP2: gradients, weights, and the replicas of ``replicate`` and HSDP.

They use torch's public hook points: ``set_custom_all_gather``, ``set_custom_reduce_scatter`` and
``set_all_reduce_hook``, which runs after the reduce-scatter. If torch would average replicas
itself, the unit is set to have shards alone. `registration` imports this file when it needs
it, because torch's FSDP takes a second to import.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from distamp.comm_hooks import torch_private
from distamp.comm_hooks.adapter import ModelAdapter, TopologyByGroup
from distamp.comm_hooks.formats import CommFormat
from distamp.comm_hooks.hook import CommHook, Compression
from distamp.fsdp_params import sharded_params
from distamp.fsdp_unit import FSDPUnit

__all__ = ["CompressedAllGather", "CompressedReduceScatter", "fsdp2_adapter"]


class _Allocator:
    """Memory for the results of a collective of FSDP2."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for FSDP2 to collect in."""
        return torch.empty(*size, dtype=dtype, device=device)


class CompressedReduceScatter(_Allocator):
    """The reduce-scatter of one FSDP2 unit, and the average between its replicas.

    It replaces torch's ``DefaultReduceScatter``. Each gradient is divided as ``op`` demands, in
    fp32, rounded once, and added up in fp32.

    Args:
        hook: The hook of the model.
        unit: The unit.
        modules: All FSDP2 modules of the model. After a failure their forward passes raise.
        replicate_group: The ranks that hold the same shard, or None if there are none.
    """

    # Private attributes that survive a call:
    # _partial_reduce_output: the shard of an accumulation that is not averaged over replicas yet.

    def __init__(
        self,
        hook: CommHook,
        unit: FSDPUnit,
        modules: Sequence[nn.Module],
        replicate_group: ProcessGroup | None,
    ) -> None:
        self._hook = hook
        self._unit = unit
        self._modules = modules
        self._replicate_group = replicate_group
        self._partial_reduce_output: Tensor | None = None

    def allocate_residuals(self, shard_group: ProcessGroup | None) -> None:
        """Make the residuals, so that a checkpoint can be loaded into them.

        Args:
            shard_group: The ranks over which gradients are reduce-scattered in the hook's format.
        """
        numels, params = self._unit.trainable_shards()
        empty = torch.empty(0, dtype=self._unit.grad_reduce_dtype, device=self._unit.device)
        for group, usage in ((shard_group, "shards"), (self._replicate_group, "buckets")):
            if group is not None and group.size() > 1:
                self._hook.prepare(usage, group, empty, sum(numels), numels, params)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter, as ``torch.distributed.reduce_scatter_single`` would.

        Raises:
            RuntimeError: A message has failed on this rank, now or before.
        """
        # torch may pass a group of the same ranks that belongs to another stream.
        shard_group = self._unit.shard_group or group
        divisor = _mean_divisor(op, group.size())
        numels, params = self._unit.trainable_shards()
        try:
            self._hook.reduce_scatter(
                output_tensor, input_tensor, shard_group, divisor, numels, params
            )
        except Exception as error:
            self._refuse_forward(error)
            raise

    def average_replicas(self, reduce_output: Tensor) -> None:
        """Average the reduced shard over the replicas: the hook of ``set_all_reduce_hook``."""
        assert self._replicate_group is not None
        # torch frees the tensor after a cast to the parameters' dtype, while this stream still
        # reads it.
        if reduce_output.device.type != "cpu":
            stream = torch.accelerator.current_stream(reduce_output.device)
            reduce_output.record_stream(stream)
        if self._partial_reduce_output is not None:
            reduce_output.add_(self._partial_reduce_output)
            self._partial_reduce_output = None
        if not self._unit.averages_replicas_now:
            # torch's HSDP likewise averages in the last pass of an accumulation alone.
            self._partial_reduce_output = reduce_output.clone()
            reduce_output.zero_()
            return
        # As in torch's HSDP, a factor of the user divides for all ranks, in the first sum.
        divisor = 1.0
        if self._unit.divide_factor is None:
            divisor = float(self._replicate_group.size())
        numels, params = self._unit.trainable_shards()
        try:
            self._hook.all_reduce(
                reduce_output, self._replicate_group, divisor, numels, params
            ).wait()
        except Exception as error:
            self._refuse_forward(error)
            raise

    def _refuse_forward(self, error: Exception) -> None:
        """Let no further forward pass begin after a failure.

        After a backward pass that raised, FSDP2 keeps its parameters gathered and reduces no
        gradients: the optimizer would find none, and training would go on without an effect.
        """
        for module in self._modules:
            module.register_forward_pre_hook(partial(_raise_failure, str(error)), prepend=True)


class CompressedAllGather(_Allocator):
    """The all-gather of the weights of one FSDP2 unit in a format.

    It replaces torch's ``DefaultAllGather``. All ranks, this rank included, compute with the
    decoded weights. The shard that the optimizer steps stays exact, so there is no error feedback.

    Args:
        hook: The hook of the model.
        unit: The unit.
        format: The format.
    """

    def __init__(self, hook: CommHook, unit: FSDPUnit, format: CommFormat) -> None:
        self._hook = hook
        self._unit = unit
        self._format = format

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather, as ``torch.distributed.all_gather_single`` would, and return when it is done."""
        compression = self._prepare(input_tensor, group)
        if isinstance(compression, str):
            self._hook.counts.fallbacks[f"weights gathered uncompressed: {compression}"] += 1
            return torch_private.all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        compression.collectives.all_gather(output_tensor, input_tensor, compression.layout)
        return None

    def _prepare(self, values: Tensor, group: ProcessGroup) -> Compression | str:
        """Return the means to send weights in blocks, or the reason to send them uncompressed."""
        if group is not self._unit.shard_group:
            return "after a forward pass, other parts than the shards"
        numels = self._unit.shard_numels
        # torch gathers parameters of several dtypes as bytes.
        if not values.is_floating_point() or sum(numels) != values.numel():
            return "of several dtypes in one module"
        return self._hook.compression_for("weights", self._format, group, values, numels)


def fsdp2_adapter(
    model: nn.Module, replicate_group: ProcessGroup | None, gathers_params: bool
) -> ModelAdapter:
    """Return the adapter of a model with modules to which ``fully_shard`` was applied.

    Args:
        model: The model.
        replicate_group: The ranks of ``replicas=``, or None.
        gathers_params: Whether the hook gathers weights, too.
    """
    units = [FSDPUnit(module) for module in model.modules() if isinstance(module, FSDPModule)]
    refusal = None
    numels = Counter[torch.dtype]()
    shard_groups: list[ProcessGroup] = []
    replicate_groups: list[ProcessGroup] = []
    units = [unit for unit in units if unit.param_groups]
    for unit in units:
        refusal = refusal or _unsupported_reason(unit, replicate_group, gathers_params)
        numels[unit.grad_reduce_dtype] += unit.numel
        _add_new(shard_groups, unit.shard_group)
        _add_new(replicate_groups, unit.replicate_group)
    if replicate_group is not None:
        replicate_groups = [replicate_group]
    ((dtype, _),) = numels.most_common(1)
    return ModelAdapter(
        shard_groups=shard_groups,
        replicate_groups=replicate_groups,
        dtype=dtype,
        devices=[units[0].device],
        description=f"{sum(numels.values())} elements",
        install=partial(_install, model, units, replicate_group),
        refusal=refusal,
    )


def _add_new(groups: list[ProcessGroup], group: ProcessGroup | None) -> None:
    if group is not None and group not in groups:
        groups.append(group)


def _unsupported_reason(
    unit: FSDPUnit, replicate_group: ProcessGroup | None, gathers_params: bool
) -> str | None:
    """Return the reason for which a unit takes no hook, or not with these replicas."""
    name = type(unit.module).__name__
    count = len(unit.param_groups)
    if count > 1:
        return (
            f"{name} has {count} groups of parameters, because its shard_placement_fn returns "
            "several meshes, and torch takes no hook for such a module: apply fully_shard to a "
            "module for each mesh"
        )
    has_replicas = replicate_group is not None or unit.replicate_group is not None
    installed = unit.installed_hook(gathers_params, has_replicas)
    if installed is not None:
        return f"{name} has {installed} already: register one hook only"
    if replicate_group is None:
        return None
    if unit.replicate_group is not None:
        return f"{name} has replicas by its two-dimensional mesh: leave out replicas"
    assert unit.shard_group is not None
    shard_ranks = dist.get_process_group_ranks(unit.shard_group)
    replicate_ranks = dist.get_process_group_ranks(replicate_group)
    # The gradients of replicas that hold another shard are those of other elements.
    if set(shard_ranks) & set(replicate_ranks) == {dist.get_rank()}:
        return None
    return (
        f"replicas holds ranks {replicate_ranks}, but {name} is sharded over ranks "
        f"{shard_ranks}: replicas must be the ranks that hold the same shard as this one, and no "
        "other of these; of a mesh with dimensions 'replicate' and 'shard' give "
        "mesh['replicate'].get_group()"
    )


def _install(
    model: nn.Module,
    units: Sequence[FSDPUnit],
    replicas: ProcessGroup | None,
    hook: CommHook,
    param_format: CommFormat | None,
    topologies: TopologyByGroup,
) -> None:
    """Fill torch's hook points of all units."""
    named_params = dict(model.named_parameters())
    # A forward pass before this call leaves parameters gathered, and residuals belong to shards.
    shards = sharded_params(named_params.values())
    hook.name_parameters(zip(named_params, shards, strict=True))
    modules = [unit.module for unit in units]
    for unit in units:
        shard_group = unit.shard_group
        torch_replicas = unit.replicate_group
        replicate_group = torch_replicas if replicas is None else replicas
        comm = CompressedReduceScatter(hook, unit, modules, replicate_group)
        compresses_shards = shard_group is not None
        if shard_group is not None and replicate_group is not None:
            # If only replicas leave a host, nothing that stays on the host is rounded.
            shards_stay = topologies[shard_group].is_single_host
            replicas_stay = topologies[replicate_group].is_single_host
            compresses_shards = replicas_stay or not shards_stay
        if hook.format.is_compressed:
            if torch_replicas is not None:
                unit.leave_replicas_to_hook()
            if compresses_shards or shard_group is None:
                unit.install(reduce_scatter=comm)
            comm.allocate_residuals(shard_group if compresses_shards else None)
        if replicate_group is not None and (hook.format.is_compressed or torch_replicas is None):
            # torch does not know the replicas of ``replicas=``. Without a hook they would diverge.
            unit.install(all_reduce_hook=comm.average_replicas)
        if param_format is not None and compresses_shards:
            unit.install(all_gather=CompressedAllGather(hook, unit, param_format))


def _raise_failure(failure: str, *_: Any) -> None:
    raise RuntimeError(failure)


def _mean_divisor(op: Any, size: int) -> float:
    """Return the divisor of each rank's gradients under AVG, SUM or PREMUL_SUM."""
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.PREMUL_SUM:
        return 1.0 / float(op.__getstate__()[1])
    return float(size) if kind == dist.ReduceOp.AVG else 1.0
