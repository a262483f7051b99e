"""FSDP2's gradients, and ``replicate``'s, through a wire, by the hook points that torch documents.

They are a reduce-scatter of one's own (``set_custom_reduce_scatter``) and, after it, a hook between
replicas (``set_all_reduce_hook``). Imported when it is used: torch's FSDP takes a second to import.
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
from distamp.comm_hooks.state import CommHookState, fits
from distamp.comm_hooks.wrapped import Wrapped

__all__ = ["WireReduceScatter", "wrapped"]

_ALL_REDUCED_BY_TORCH = "module that torch's HSDP all-reduces between replicas uncompressed"


class WireReduceScatter:
    """FSDP2's reduce-scatter, and the all-reduce between replicas, of one parameter group.

    Stands where torch's ``DefaultReduceScatter`` stood. Each gradient is divided as ``op`` says, in
    fp32, rounded once, and added up in fp32.

    Args:
        state: That of the whole model.
        param_group: torch's own object for the group, read for its divide factor.
        modules: All FSDP2 modules of the model; after a failure their forward passes raise.
        replicas: The ranks that hold the same shard, where each replica is a one-dimensional FSDP
            and this hook is to average between them.
    """

    def __init__(
        self,
        state: CommHookState,
        param_group: Any,
        modules: Sequence[nn.Module],
        replicas: ProcessGroup | None = None,
    ) -> None:
        self._state = state
        self._param_group = param_group
        self._modules = modules
        self._replicas = replicas

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for FSDP2 to collect its gradients in."""
        return torch.empty(*size, dtype=dtype, device=device)

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
        self._reduce(input_tensor, group, _divisor(op, group.size()), output_tensor)

    def between_replicas(self, reduce_output: Tensor) -> None:
        """Average the reduced shard over the replicas: the hook of ``set_all_reduce_hook``."""
        assert self._replicas is not None
        # torch frees what it casts to the parameters' dtype while this stream still reads it.
        if reduce_output.device.type != "cpu":
            stream = torch.accelerator.current_stream(reduce_output.device)
            reduce_output.record_stream(stream)
        # As torch's HSDP: a factor of the user's own divides for all ranks, in the first sum.
        factor = self._param_group.gradient_divide_factor
        size = float(self._replicas.size())
        self._reduce(reduce_output, self._replicas, 1.0 if factor is not None else size)

    def _reduce(
        self, values: Tensor, group: ProcessGroup, divisor: float, out: Tensor | None = None
    ) -> None:
        """Exchange; where that fails, let no further forward pass begin.

        After a backward pass that raised, FSDP2 keeps its parameters gathered and reduces no
        gradients: the optimizer would find none, and training would go on without an effect.
        """
        try:
            self._state.reduce(values, group, divisor, out)
        except Exception as error:
            refuse = partial(_refuse, str(error))
            for module in self._modules:
                module.register_forward_pre_hook(refuse, prepend=True)
            raise


def wrapped(model: nn.Module, replicas: ProcessGroup | None) -> Wrapped:
    """Return a model with modules to which ``fully_shard`` was applied as `register` takes it."""
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    pairs = [(each, group) for each in modules for group in torch_compat.param_groups(each)]
    groups = [group for _, group in pairs]
    params = [[each.sharded_param for each in group.fsdp_params] for group in groups]
    numels = [sum(each.numel() for each in some) for some in params]
    meshes = [mesh for group in groups for mesh in torch_compat.mesh_groups(group)]
    shards = list(dict.fromkeys(filter(None, map(torch_compat.shards_of, groups))))
    if not shards:
        # Of `replicate`, whose mesh has replicas alone.
        replicas = meshes[0]
    dtypes: Counter[torch.dtype] = Counter()
    for group, some in zip(groups, params, strict=True):
        dtypes[_reduced_in(group)] += sum(each.numel() for each in some)
    size = next(group.size() for group in (*shards, replicas) if group is not None)
    return Wrapped(
        groups=list(dict.fromkeys([*meshes, *([] if replicas is None else [replicas])])),
        shards=shards,
        replicas=replicas,
        feedback=False,
        dtypes=[dtype for dtype, _ in dtypes.most_common()],
        devices=[groups[0].device],
        numel=-(-max(numels) // size) * size,
        what=f"{sum(numels)} elements",
        refused=next(filter(None, (_refusal(*each, replicas) for each in pairs)), None),
        attach=partial(_attach, pairs, replicas),
    )


def _reduced_in(group: Any) -> torch.dtype:
    """Return the dtype in which gradients of a parameter group are reduced."""
    policy = group.mp_policy
    trained = [each.sharded_param for each in group.fsdp_params if each.sharded_param.requires_grad]
    own = trained[0].dtype if trained else torch.float32
    found: torch.dtype = policy.reduce_dtype or policy.param_dtype or own
    return found


def _refusal(module: FSDPModule, group: Any, replicas: ProcessGroup | None) -> str | None:
    """Return why a module takes no hook, or has replicas that hold other shards."""
    name = type(module).__name__
    if len(torch_compat.param_groups(module)) > 1:
        return (
            f"{name} shards its parameters over several meshes, for which torch takes no custom "
            "reduce-scatter: apply fully_shard with one mesh to each module"
        )
    custom = torch_compat.custom_reduce_scatter(group)
    if custom is not None:
        return f"{name} has a custom reduce-scatter already ({custom}): register one hook only"
    if replicas is None or torch_compat.shards_of(group) is None:
        return None
    if torch_compat.is_hsdp(group):
        return (
            f"{name} is sharded over a two-dimensional mesh, whose replicas torch averages by "
            "itself: pass fully_shard the shard dimension alone, mesh['shard'], or leave out "
            "replicas"
        )
    # Gradients of replicas that hold another shard are those of other elements.
    shards, ranks = map(
        dist.get_process_group_ranks, (group.mesh_info.shard_process_group, replicas)
    )
    if set(shards) & set(ranks) == {dist.get_rank()}:
        return None
    return (
        f"replicas holds ranks {ranks}, but {name} is sharded over ranks {shards}: replicas must "
        "be the ranks that hold the same shard as this one, and no other of these; of a mesh with "
        "dimensions 'replicate' and 'shard' give mesh['replicate'].get_group()"
    )


def _attach(
    pairs: Sequence[tuple[FSDPModule, Any]],
    replicas: ProcessGroup | None,
    state: CommHookState,
    compressed: bool,
) -> None:
    """Fill torch's hook points: through the wire of ``state``, or uncompressed."""
    modules = [module for module, _ in pairs]
    for module, group in pairs:
        replicate, dtype = torch_compat.shards_of(group) is None, _reduced_in(group)
        through = compressed and fits(state.wire, dtype)
        comm = WireReduceScatter(state, group, modules, replicas)  # type: ignore[arg-type]
        if through:
            module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]  # called, not inherited
            if replicate:
                torch_compat.replicas_to_hook(group)
            elif torch_compat.is_hsdp(group):
                state.counts.fallbacks[_ALL_REDUCED_BY_TORCH] += 1
        elif compressed:
            state.counts.fallbacks[f"module whose {dtype} gradients go as they are"] += 1
        if replicas is not None and (through or not replicate):
            # Of these torch knows nothing: without a hook they would differ.
            plain = partial(_average, group, replicas)
            module.set_all_reduce_hook(comm.between_replicas if through else plain)


def _refuse(failure: str, *_: Any) -> None:
    raise RuntimeError(failure)


def _average(param_group: Any, replicas: ProcessGroup, reduce_output: Tensor) -> None:
    """Average over replicas as torch's HSDP does."""
    if param_group.gradient_divide_factor is None:
        reduce_output.div_(replicas.size())
    dist.all_reduce(reduce_output, group=replicas)


def _divisor(op: Any, size: int) -> float:
    """What each rank's contribution is divided by under AVG, SUM or PREMUL_SUM, as FSDP2 asks."""
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.PREMUL_SUM:
        return 1.0 / float(op.__getstate__()[1])
    return float(size) if kind == dist.ReduceOp.AVG else 1.0
