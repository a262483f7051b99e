"""FSDP2's gradients through a wire, by the hook points that torch documents.

They are a reduce-scatter of one's own (``set_custom_reduce_scatter``) and, after it, a hook between
replicas (``set_all_reduce_hook``). Imported when it is used: torch's FSDP takes a second to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.state import CommHookState, check_sharded

__all__ = ["WireReduceScatter", "attach", "check", "modules_of", "reduced_in"]

_ALL_REDUCED_BY_TORCH = "torch's HSDP all-reduces between replicas uncompressed"


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
            ValueError: The gradients are not wider than the wire, or ``op`` is neither SUM, AVG
                nor PREMUL_SUM.
            RuntimeError: An exchange failed on this rank, or did before.
        """
        check_sharded(self._state.wire, input_tensor.dtype)
        if torch_compat.torchs_replicas(self._param_group) > 1:
            self._state.account.fallbacks[_ALL_REDUCED_BY_TORCH] += 1
        self._reduce(input_tensor, group, _divisor(op, group.size()), output_tensor)

    def between_replicas(self, reduce_output: Tensor) -> None:
        """Average the reduced shard over the replicas: the hook of ``set_all_reduce_hook``."""
        assert self._replicas is not None
        # torch frees what it casts to the parameters' dtype while this stream still reads it.
        if reduce_output.device.type != "cpu":
            stream = torch.accelerator.current_stream(reduce_output.device)
            reduce_output.record_stream(stream)
        # As torch's HSDP: a factor of the user's own divides for all ranks, in the first sum.
        factor = torch_compat.gradient_divide_factor(self._param_group)
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


def modules_of(model: nn.Module) -> list[tuple[FSDPModule, Any]]:
    """Return the modules that ``fully_shard`` was applied to, each with its parameter group.

    Raises:
        ValueError: There is none, or one has several groups.
        RuntimeError: This torch has no ``set_custom_reduce_scatter``.
    """
    found = [each for each in model.modules() if isinstance(each, FSDPModule)]
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter: "
            "communication hooks for FSDP2 need torch 2.9 or newer"
        )
    groups: list[tuple[FSDPModule, Any]] = []
    for module in found:
        of_module = torch_compat.param_groups(module)
        if len(of_module) > 1:
            raise ValueError(
                f"{type(module).__name__} shards its parameters over {len(of_module)} meshes, for "
                "which torch takes no custom reduce-scatter: apply fully_shard with one mesh to "
                "each module"
            )
        groups += [(module, group) for group in of_module]
    return groups


def reduced_in(group: Any) -> torch.dtype:
    """Return the narrowest dtype in which gradients of a parameter group are reduced."""
    policy = group.mp_policy
    asked = policy.reduce_dtype or policy.param_dtype
    own = (each.sharded_param.dtype for each in group.fsdp_params)
    dtype: torch.dtype = asked or min(own, key=lambda dtype: dtype.itemsize)
    return dtype


def check(groups: Sequence[tuple[FSDPModule, Any]], replicas: ProcessGroup | None) -> None:
    """Refuse modules that have a hook, and replicas that hold other shards.

    Raises:
        ValueError: They are so.
    """
    for module, group in groups:
        name = type(module).__name__
        custom = torch_compat.custom_reduce_scatter(group)
        if custom is not None:
            raise ValueError(
                f"{name} has a custom reduce-scatter already ({custom}): register one hook only"
            )
        if replicas is None:
            continue
        if torch_compat.is_hsdp(group):
            raise ValueError(
                f"{name} is sharded over a two-dimensional mesh, whose replicas torch averages by "
                "itself: pass fully_shard the shard dimension alone, mesh['shard'], or leave out "
                "replicas"
            )
        # Gradients of replicas that hold another shard are those of other elements.
        shards = dist.get_process_group_ranks(group.mesh_info.shard_process_group)
        member = not torch_compat.is_non_member(replicas)
        ranks = dist.get_process_group_ranks(replicas) if member else []
        if set(shards) & set(ranks) != {dist.get_rank()}:
            raise ValueError(
                f"replicas holds ranks {ranks}, but {name} is sharded over ranks {shards}: "
                "replicas must be the ranks that hold the same shard as this one, and no other of "
                "these; of a mesh with dimensions 'replicate' and 'shard' give "
                "mesh['replicate'].get_group()"
            )


def attach(
    groups: Sequence[tuple[FSDPModule, Any]],
    state: CommHookState,
    replicas: ProcessGroup | None,
    *,
    compressed: bool,
) -> None:
    """Fill torch's hook points: through the wire of ``state``, or uncompressed."""
    modules = [module for module, _ in groups]
    for module, group in groups:
        comm = WireReduceScatter(state, group, modules, replicas)  # type: ignore[arg-type]
        if not compressed:
            if replicas is not None:
                # Of these torch knows nothing: without a hook they would differ.
                module.set_all_reduce_hook(partial(_average, group, replicas))
            continue
        module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]  # called, not inherited
        if replicas is not None:
            module.set_all_reduce_hook(comm.between_replicas)
        elif torch_compat.torchs_replicas(group) > 1 == group.mesh_info.shard_process_group.size():
            # HSDP with one shard: torch never calls a custom reduce-scatter.
            theirs = torch_compat.all_reduce_hook(group)
            module.set_all_reduce_hook(partial(_count_all_reduce, state, theirs))


def _refuse(failure: str, *_: Any) -> None:
    raise RuntimeError(failure)


def _count_all_reduce(
    state: CommHookState, theirs: Callable[[Tensor], None] | None, reduced: Tensor
) -> None:
    """Count what torch's HSDP all-reduced, then do as the user's own hook, if there was one."""
    state.account.fallbacks[_ALL_REDUCED_BY_TORCH] += 1
    if theirs is not None:
        theirs(reduced)


def _average(param_group: Any, replicas: ProcessGroup, reduce_output: Tensor) -> None:
    """Average over replicas as torch's HSDP does."""
    if torch_compat.gradient_divide_factor(param_group) is None:
        reduce_output.div_(replicas.size())
    dist.all_reduce(reduce_output, group=replicas)


def _divisor(op: Any, size: int) -> float:
    """What each rank's contribution is divided by under a reduce op of FSDP2."""
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.AVG:
        return float(size)
    if kind == dist.ReduceOp.SUM:
        return 1.0
    if kind == dist.ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()
        return 1.0 / float(factor)
    raise ValueError(f"reduce op {kind} cannot go through a wire: use SUM, AVG or PREMUL_SUM")
