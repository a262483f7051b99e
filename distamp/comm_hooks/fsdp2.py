"""FSDP2's gradients through a wire, by the hook points that torch documents.

They are a reduce-scatter of one's own (``set_custom_reduce_scatter``) and, after it, a hook between
replicas (``set_all_reduce_hook``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from distamp.comm_hooks.auto import as_it_is, choose_for_shards
from distamp.comm_hooks.choice import AUTO, Choice
from distamp.comm_hooks.fsdp_state import ShardedHookState, check_format, check_width
from distamp.comm_hooks.wire import WireFormat, wire_format
from distamp.comm_hooks.wire_reduce import News, agree, all_reduce, reduce_scatter

__all__ = ["WireReduceScatter", "register_fsdp2"]


class WireReduceScatter:
    """FSDP2's reduce-scatter, and the all-reduce between replicas, of one parameter group.

    Stands where torch's ``DefaultReduceScatter`` stood. Each gradient is divided as ``op`` says,
    in fp32, rounded once, and added up in fp32.

    Args:
        state: That of the whole model.
        param_group: torch's own object for the group, read for its parameters and divide factor.
        replicas: The ranks that hold the same shard, where each replica is a one-dimensional FSDP
            and this hook is to average between them.

    Attributes:
        iteration: The last one, as the state counts them, in which gradients were reduced.
        nonfinite: 0-d bool, the same on all ranks of the group (and its replicas): whether a
            gradient reduced in that iteration held inf or NaN on any of them, or was so large
            (1e34) that sums may; None before, and always under torch's own HSDP, whose all-reduce
            between replicas carries no such news.
    """

    def __init__(
        self, state: ShardedHookState, param_group: Any, replicas: ProcessGroup | None = None
    ) -> None:
        self.iteration = -1
        self.nonfinite: Tensor | None = None
        self._state = state
        self._param_group = param_group
        self._replicas = replicas
        self._native_hsdp = bool(getattr(param_group, "_is_hsdp", False))
        self._news: News | None = None

    def parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters whose gradients come through here."""
        return [each.sharded_param for each in self._param_group.fsdp_params]

    def agreeing(self) -> list[int]:
        """Return the ranks, of the default group, that know the same of these gradients."""
        if self._native_hsdp:
            return []
        ranks: list[int] = self._param_group.mesh_info.mesh.mesh.flatten().tolist()
        if self._replicas is None:
            return ranks
        # A replica's news reach the same shards of the others: everyone, where that is the world.
        whole = len(ranks) * self._replicas.size() == dist.get_world_size()
        return list(range(dist.get_world_size())) if whole else []

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
            ValueError: the gradients are not wider than the wire, or ``op`` is neither SUM, AVG
                nor PREMUL_SUM.
        """
        state = self._state
        check_width(state.wire, input_tensor.dtype, "MixedPrecisionPolicy(reduce_dtype=...)")
        replicas = 1 if self._replicas is None else self._replicas.size()
        news = reduce_scatter(
            state.wire,
            input_tensor,
            output_tensor,
            group,
            divisor=_divisor(op, group.size()),
            account=state.account,
            terms=group.size() * replicas,
            words=state.words(input_tensor.device),
        )
        if self._native_hsdp:
            state.account.fallbacks["torch's HSDP all-reduces between replicas uncompressed"] += 1
        elif self._replicas is None:
            self._keep(news)
        else:
            self._news = news

    def between_replicas(self, reduce_output: Tensor) -> None:
        """Average the reduced shard over the replicas: the hook of ``set_all_reduce_hook``."""
        assert self._replicas is not None
        # As torch's HSDP: a factor of the user's own divides for all ranks, in the first sum.
        factor = self._param_group.gradient_divide_factor
        news = all_reduce(
            self._state.wire,
            reduce_output,
            self._replicas,
            divisor=1.0 if factor is not None else float(self._replicas.size()),
            account=self._state.account,
            before=self._news,
            words=self._state.words(reduce_output.device),
        )
        self._news = None
        self._keep(news)

    def _keep(self, news: News) -> None:
        if self.iteration != self._state.book.iteration:
            self.iteration, self.nonfinite = self._state.book.iteration, None
        flag = news.nonfinite
        self.nonfinite = flag if self.nonfinite is None else self.nonfinite | flag
        self._state.book.apart.append(news.apart)
        if flag.device.type == "cpu":
            self._state.account.nonfinite += bool(flag)


def register_fsdp2(
    model: nn.Module, wire: WireFormat | None, *, replicas: ProcessGroup | None = None
) -> ShardedHookState:
    """Send the gradients of every FSDP2 module of ``model`` through ``wire``.

    Args:
        model: ``fully_shard`` was applied to it, or to modules within it.
        wire: The format on the way; None to choose one by time, or none.
        replicas: For replicas of a one-dimensional FSDP2: the ranks that hold the same shard.
            Unlike with a two-dimensional mesh, whose all-reduce torch does by itself, gradients
            go through ``wire`` between them too.

    Returns:
        The state of all its hooks.

    Raises:
        ValueError: no FSDP2 module, a hook or a custom reduce-scatter is there already, a format
            that needs error feedback, gradients reduced in a dtype that is not wider than the
            wire, or ``replicas`` with a two-dimensional mesh.
        LockstepError: a rank holds another format or model; on all ranks.
        RuntimeError: this torch has no ``set_custom_reduce_scatter``.
    """
    if wire is not None:
        check_format(wire)
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} holds no FSDP2 module: apply "
            "torch.distributed.fsdp.fully_shard first"
        )
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter: "
            "communication hooks for FSDP2 need torch 2.9 or newer"
        )
    groups = [_param_groups(module) for module in modules]
    for module, of_module in zip(modules, groups, strict=True):
        _check_groups(module, of_module, wire, replicas)
    every = [group for of_module in groups for group in of_module]
    _agree(AUTO if wire is None else wire.name, every, replicas)
    choice = _choose(every, replicas) if wire is None else None
    if choice is not None:
        wire = wire_format(choice.wire) if choice.compressed else None
    state = ShardedHookState(wire or as_it_is(_reduced_in(every[0])), choice)
    for module, of_module in zip(modules, groups, strict=True):
        for param_group in of_module:
            _hook(module, param_group, state, replicas, compressed=wire is not None)
    return state


def _hook(
    module: FSDPModule,
    param_group: Any,
    state: ShardedHookState,
    replicas: ProcessGroup | None,
    *,
    compressed: bool,
) -> None:
    """Fill torch's hook points of one module."""
    if compressed:
        comm = WireReduceScatter(state, param_group, replicas)
        module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]  # called, not inherited
        if replicas is not None:
            module.set_all_reduce_hook(comm.between_replicas)
        state.groups.append(comm)
    elif replicas is not None:
        # Of these torch knows nothing: without a hook they would part.
        module.set_all_reduce_hook(partial(_average, param_group, replicas))


def _average(param_group: Any, replicas: ProcessGroup, reduce_output: Tensor) -> None:
    """Average over replicas as torch's HSDP does."""
    if param_group.gradient_divide_factor is None:
        reduce_output.div_(replicas.size())
    dist.all_reduce(reduce_output, group=replicas)


def _choose(groups: Sequence[Any], replicas: ProcessGroup | None) -> Choice:
    """Choose for the module with the most parameters."""
    largest = max(groups, key=_numel)
    dtype = min(map(_reduced_in, groups), key=lambda dtype: dtype.itemsize)
    shards = largest.mesh_info.shard_process_group
    mesh = largest.fsdp_params[0].sharded_param.device_mesh
    others = [group for group in mesh.get_all_groups() if group is not shards]
    return choose_for_shards(_numel(largest), dtype, largest.device, shards, replicas, others)


def _numel(group: Any) -> int:
    return sum(each.sharded_param.numel() for each in group.fsdp_params)


def _reduced_in(group: Any) -> torch.dtype:
    """Return the narrowest dtype in which gradients of a parameter group are reduced."""
    policy = group.mp_policy
    asked = policy.reduce_dtype or policy.param_dtype
    own = (each.sharded_param.dtype for each in group.fsdp_params)
    dtype: torch.dtype = asked or min(own, key=lambda dtype: dtype.itemsize)
    return dtype


def _param_groups(module: FSDPModule) -> list[Any]:
    """Return torch's parameter groups of one module: none, one, or one for each mesh."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _check_groups(
    module: FSDPModule, groups: list[Any], wire: WireFormat | None, replicas: ProcessGroup | None
) -> None:
    name = type(module).__name__
    if len(groups) > 1:
        raise ValueError(
            f"{name} shards its parameters over {len(groups)} meshes, for which torch takes no "
            "custom reduce-scatter: apply fully_shard with one mesh to each module"
        )
    for group in groups:
        if not type(group._reduce_scatter_comm).__name__.startswith("Default"):
            raise ValueError(
                f"{name} has a custom reduce-scatter already "
                f"({type(group._reduce_scatter_comm).__name__}): register one hook only"
            )
        if wire is not None:
            check_width(wire, _reduced_in(group), "MixedPrecisionPolicy(reduce_dtype=...)")
        if replicas is not None and getattr(group, "_is_hsdp", False):
            raise ValueError(
                f"{name} is sharded over a two-dimensional mesh, whose replicas torch averages by "
                "itself: pass fully_shard the shard dimension alone, mesh['shard'], or leave out "
                "replicas"
            )


def _agree(name: str, groups: list[Any], replicas: ProcessGroup | None) -> None:
    """Compare format and model among the ranks that will exchange."""
    numels: dict[ProcessGroup, int] = {}
    for group in groups:
        for ranks in (group.mesh_info.shard_process_group, replicas):
            if ranks is not None:
                numels[ranks] = numels.get(ranks, 0) + _numel(group)
    for ranks, numel in numels.items():
        agree(name, numel, ranks, groups[0].device)


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
