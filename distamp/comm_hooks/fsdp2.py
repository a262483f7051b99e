"""FSDP2's gradients and weights, and ``replicate``'s gradients, through a wire.

By the hook points that torch documents: an all-gather and a reduce-scatter of one's own
(``set_custom_all_gather``, ``set_custom_reduce_scatter``) and, after the latter, a hook between
replicas (``set_all_reduce_hook``). Where torch would average replicas itself, it is told that there
are shards alone. Imported when it is used: torch's FSDP takes a second to import.
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

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.exchange import Exchange
from distamp.comm_hooks.formats import COMM_FORMATS, CommFormat
from distamp.comm_hooks.plans import Plan
from distamp.comm_hooks.state import NO_FEWER, UNEVEN, CommHook
from distamp.comm_hooks.wrapped import Tables, Wrapped
from distamp.fsdp_params import sharded_params

__all__ = ["WireAllGather", "WireReduceScatter", "wrapped"]


class _Comm:
    """What FSDP2 asks each of its collectives for: memory."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for FSDP2 to collect in."""
        return torch.empty(*size, dtype=dtype, device=device)


class WireReduceScatter(_Comm):
    """FSDP2's reduce-scatter, and the all-reduce between replicas, of one parameter group.

    Stands where torch's ``DefaultReduceScatter`` stood. Each gradient is divided as ``op`` says, in
    fp32, rounded once, and added up in fp32.

    Args:
        state: That of the whole model.
        param_group: torch's own object for the group, read for its divide factor and shards.
        modules: All FSDP2 modules of the model; after a failure their forward passes raise.
        replicas: The ranks that hold the same shard, where this is to average between them.
    """

    # What survives a call: of an accumulation, shards that are not averaged over replicas yet.
    def __init__(
        self,
        state: CommHook,
        param_group: Any,
        modules: Sequence[nn.Module],
        replicas: ProcessGroup | None,
    ) -> None:
        self._state, self._param_group = state, param_group
        self._modules, self._replicas = modules, replicas
        self._partial: Tensor | None = None

    def prepare(self, shards: ProcessGroup | None) -> None:
        """Make tensors for a checkpoint to be loaded into."""
        device, dtype = self._param_group.device, _reduced_in(self._param_group)
        for group, kind in ((shards, "shards"), (self._replicas, "buckets")):
            if group is not None and group.size() > 1:
                numels, parameters = _of(self._param_group)
                self._state.planned(kind, group, device, dtype, numels, parameters)

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
            RuntimeError: An exchange failed on this rank, or did before.
        """
        # Not a separate one of the same ranks, which is torch's for another stream.
        shards = torch_compat.mesh_groups(self._param_group)[0] or group
        self._reduce(input_tensor, shards, _divisor(op, group.size()), output_tensor)

    def between_replicas(self, reduce_output: Tensor) -> None:
        """Average the reduced shard over the replicas: the hook of ``set_all_reduce_hook``."""
        assert self._replicas is not None
        # torch frees what it casts to the parameters' dtype while this stream still reads it.
        if reduce_output.device.type != "cpu":
            stream = torch.accelerator.current_stream(reduce_output.device)
            reduce_output.record_stream(stream)
        if self._partial is not None:
            reduce_output.add_(self._partial)
            self._partial = None
        if not self._param_group.all_reduce_grads:
            # Of all but the last of an accumulation, as torch's HSDP does.
            self._partial = reduce_output.clone()
            reduce_output.zero_()
            return
        # As torch's HSDP: a factor of the user's own divides for all ranks, in the first sum.
        factor = self._param_group.gradient_divide_factor
        divisor = 1.0 if factor is not None else float(self._replicas.size())
        self._reduce(reduce_output, self._replicas, divisor)

    def _reduce(
        self, values: Tensor, group: ProcessGroup, divisor: float, out: Tensor | None = None
    ) -> None:
        """Exchange; where that fails, let no further forward pass begin.

        After a backward pass that raised, FSDP2 keeps its parameters gathered and reduces no
        gradients: the optimizer would find none, and training would go on without an effect.
        """
        try:
            self._state.reduce(values, group, divisor, out, *_of(self._param_group)).wait()
        except Exception as error:
            refuse = partial(_refuse, str(error))
            for module in self._modules:
                module.register_forward_pre_hook(refuse, prepend=True)
            raise


class WireAllGather(_Comm):
    """FSDP2's all-gather of weights through a wire format, of one parameter group.

    Stands where torch's ``DefaultAllGather`` stood. All ranks, this one too, compute with what was
    sent; the shard that the optimizer steps stays as it is, so nothing is to be fed back.

    Args:
        state: That of the whole model.
        param_group: torch's own object for the group: what it gathers of each parameter.
        wire: The format.
    """

    def __init__(self, state: CommHook, param_group: Any, wire: CommFormat) -> None:
        self._state, self._param_group, self._wire = state, param_group, wire

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather, as ``torch.distributed.all_gather_single`` would; done when it returns."""
        planned = self._planned(input_tensor, group)
        if isinstance(planned, str):
            self._state.counts.fallbacks[f"weights gathered as they are: {planned}"] += 1
            return torch_compat.all_gather_as_torch(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        exchange, plan = planned
        return exchange.gather(output_tensor, input_tensor, self._wire, plan)

    def _planned(self, values: Tensor, group: ProcessGroup) -> tuple[Exchange, Plan] | str:
        """Return what carries weights, and where they go; or why they should go as they are."""
        if group is not torch_compat.mesh_groups(self._param_group)[0]:
            return "after a forward pass, other parts than the shards"
        numels = [each.padded_sharded_param_size.numel() for each in self._param_group.fsdp_params]
        # Of several dtypes torch gathers bytes.
        if not values.is_floating_point() or sum(numels) != values.numel():
            return "of several dtypes in one module"
        exchange = self._state.exchange(group, values.device)
        if exchange is None:
            return UNEVEN
        plan = exchange.plan("weights", self._wire, numels, values.itemsize)
        return NO_FEWER if plan is None else (exchange, plan)


def _of(param_group: Any) -> tuple[list[int], list[Tensor]]:
    """Return how much a shard has of what is trained of a parameter group, and what that is."""
    trained = [each for each in param_group.fsdp_params if each.sharded_param.requires_grad]
    numels = [each.padded_sharded_param_size.numel() for each in trained]
    return numels, [each.sharded_param for each in trained]


def wrapped(model: nn.Module, replicas: ProcessGroup | None, gathers: bool) -> Wrapped:
    """Return the adapter of a model with modules to which ``fully_shard`` was applied."""
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    pairs = [(each, group) for each in modules for group in torch_compat.param_groups(each)]
    meshes = [torch_compat.mesh_groups(group) for _, group in pairs]
    shards = list(dict.fromkeys(each for each, _ in meshes if each is not None))
    by_torch = [each for _, each in meshes if each is not None]
    averaged = list(dict.fromkeys(by_torch if replicas is None else [replicas]))
    numels = Counter[torch.dtype]()
    for _, group in pairs:
        numel = sum(each.sharded_param.numel() for each in group.fsdp_params)
        numels[_reduced_in(group)] += numel
    ((dtype, _),) = numels.most_common(1)
    return Wrapped(
        shards=shards,
        replicas=averaged,
        formats=list(COMM_FORMATS),
        dtype=dtype,
        devices=[pairs[0][1].device],
        what=f"{sum(numels.values())} elements",
        attach=partial(_attach, model, pairs, replicas),
        refused=next(filter(None, (_refusal(*each, replicas, gathers) for each in pairs)), None),
    )


def _reduced_in(group: Any) -> torch.dtype:
    """Return the dtype in which gradients of a parameter group are reduced."""
    first: Any = next(iter(_of(group)[1]), None)
    own = torch.float32 if first is None else first.grad_dtype or first.dtype
    return torch_compat.policy_of(group.modules[0], own)[1]


def _refusal(
    module: FSDPModule, group: Any, replicas: ProcessGroup | None, gathers: bool
) -> str | None:
    """Return why a module takes no hook, or has replicas that hold other shards."""
    name, (shards, by_torch) = type(module).__name__, torch_compat.mesh_groups(group)
    count = len(torch_compat.param_groups(module))
    if count > 1:
        return (
            f"{name} has {count} groups of parameters, because its shard_placement_fn returns "
            "several meshes, and torch takes no hook for such a module: apply fully_shard to a "
            "module for each mesh"
        )
    by_hook = replicas is not None or by_torch is not None
    custom = torch_compat.custom_collective(group, gathers, by_hook)
    if custom is not None:
        return f"{name} has {custom} already: register one hook only"
    if replicas is None:
        return None
    if by_torch is not None:
        return f"{name} has replicas by its two-dimensional mesh: leave out replicas"
    # Gradients of replicas that hold another shard are those of other elements.
    held, ranks = map(dist.get_process_group_ranks, (shards, replicas))
    if set(held) & set(ranks) == {dist.get_rank()}:
        return None
    return (
        f"replicas holds ranks {ranks}, but {name} is sharded over ranks {held}: replicas must "
        "be the ranks that hold the same shard as this one, and no other of these; of a mesh with "
        "dimensions 'replicate' and 'shard' give mesh['replicate'].get_group()"
    )


def _attach(
    model: nn.Module,
    pairs: Sequence[tuple[FSDPModule, Any]],
    replicas: ProcessGroup | None,
    state: CommHook,
    gather: CommFormat | None,
    tables: Tables,
) -> None:
    """Fill torch's hook points: through the wire of ``state``, or as torch would."""
    named = dict(model.named_parameters())
    # A forward pass before this call leaves parameters gathered, and buckets are of shards.
    state.name_parameters(zip(named, sharded_params(named.values()), strict=True))
    modules = [module for module, _ in pairs]
    for module, group in pairs:
        shards, by_torch = torch_compat.mesh_groups(group)
        between = by_torch if replicas is None else replicas
        comm = WireReduceScatter(state, group, modules, between)  # type: ignore[arg-type]
        # What stays on a host is not rounded.
        inside = (
            shards is not None
            and between is not None
            and tables[shards].on_one
            and not tables[between].on_one
        )
        if state.format.encodes:
            if by_torch is not None:
                torch_compat.replicas_to_hook(group)
            if not inside:
                module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]  # called, not inherited
            comm.prepare(None if inside else shards)
        if between is not None and (state.format.encodes or by_torch is None):
            # Of these torch knows nothing: without a hook they would differ.
            module.set_all_reduce_hook(comm.between_replicas)
        if gather is not None and shards is not None and not inside:
            module.set_custom_all_gather(WireAllGather(state, group, gather))  # type: ignore[arg-type]


def _refuse(failure: str, *_: Any) -> None:
    raise RuntimeError(failure)


def _divisor(op: Any, size: int) -> float:
    """What each rank's contribution is divided by under AVG, SUM or PREMUL_SUM, as FSDP2 asks."""
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.PREMUL_SUM:
        return 1.0 / float(op.__getstate__()[1])
    return float(size) if kind == dist.ReduceOp.AVG else 1.0
