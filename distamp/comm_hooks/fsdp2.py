"""FSDP2's gradients through a wire, by the hook points that torch documents.

They are a reduce-scatter of one's own (``set_custom_reduce_scatter``) and, after it, a hook between
replicas (``set_all_reduce_hook``). Imported when it is used: torch's FSDP takes a second to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from distamp.comm_hooks import torch_compat
from distamp.comm_hooks.agreement import agree
from distamp.comm_hooks.arriving import used_here
from distamp.comm_hooks.auto import as_it_is, choose_for_shards
from distamp.comm_hooks.choice import AUTO, Choice
from distamp.comm_hooks.engine import Engine
from distamp.comm_hooks.headers import ReduceResult
from distamp.comm_hooks.layout import Layout
from distamp.comm_hooks.shards import check_format, check_width
from distamp.comm_hooks.state import CommHookState
from distamp.comm_hooks.wire import WireFormat, wire_format

__all__ = ["WireReduceScatter", "register_fsdp2"]

_ALL_REDUCED_BY_TORCH = "torch's HSDP all-reduces between replicas uncompressed"


class WireReduceScatter:
    """FSDP2's reduce-scatter, and the all-reduce between replicas, of one parameter group.

    Stands where torch's ``DefaultReduceScatter`` stood. Each gradient is divided as ``op`` says,
    in fp32, rounded once, and added up in fp32.

    Args:
        state: That of the whole model.
        param_group: torch's own object for the group, read for its parameters and divide factor.
        index: Its number, the same on all ranks.
        replicas: The ranks that hold the same shard, where each replica is a one-dimensional FSDP
            and this hook is to average between them.
        modules: All FSDP2 modules of the model; after a failure their forward passes raise.

    Attributes:
        iteration: The last one, as the state counts them, in which gradients were reduced.
        nonfinite: 0-d bool, the same on all ranks of the group (and its replicas): whether a
            gradient reduced in that iteration had inf or NaN on any of them, or was so large
            (1e34) that sums may; None before, and always under torch's own HSDP, whose all-reduce
            between replicas says nothing.
    """

    def __init__(
        self,
        state: CommHookState,
        param_group: Any,
        index: int,
        replicas: ProcessGroup | None = None,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        self.iteration = -1
        self.nonfinite: Tensor | None = None
        self._state = state
        self._param_group = param_group
        self._index = index
        self._replicas = replicas
        self._modules = modules
        self._native_hsdp = torch_compat.torchs_replicas(param_group) > 1
        self._of_shards: ReduceResult | None = None
        self._layouts: dict[tuple[str, int, torch.dtype], Layout] = {}
        self._step = 0

    def parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters whose gradients come through here."""
        return [parameter for parameter, _ in torch_compat.sharded_sizes(self._param_group)]

    def agreeing(self) -> list[int]:
        """Return the ranks, of the default group, that know the same of these gradients."""
        if self._native_hsdp:
            return []
        ranks: list[int] = self._param_group.mesh_info.mesh.mesh.flatten().tolist()
        if self._replicas is None:
            return ranks
        # A replica hears of the same shards of the others: everyone, where that is the world.
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
            LockstepError: ranks exchange different gradients.
            RuntimeError: an exchange failed, on whichever rank.
        """
        state = self._state
        check_width(state.wire, input_tensor.dtype, "MixedPrecisionPolicy(reduce_dtype=...)")
        replicas = 1 if self._replicas is None else self._replicas.size()
        self._step += 1
        result = self._exchange(
            input_tensor,
            group,
            lambda engine: self._layout(engine, "shards", input_tensor, output_tensor.numel()),
            step=self._step,
            out=output_tensor,
            divisor=_divisor(op, group.size()),
            terms=group.size() * replicas,
        )
        if self._native_hsdp:
            state.fell_back(_ALL_REDUCED_BY_TORCH)
        elif self._replicas is None:
            self._keep(result)
        else:
            self._of_shards = result

    def between_replicas(self, reduce_output: Tensor) -> None:
        """Average the reduced shard over the replicas: the hook of ``set_all_reduce_hook``."""
        assert self._replicas is not None
        # torch frees what it casts to the parameters' dtype while this stream still reads it.
        used_here(reduce_output)
        before, self._of_shards = self._of_shards, None
        for each in before or ():
            used_here(each)
        # As torch's HSDP: a factor of the user's own divides for all ranks, in the first sum.
        factor = torch_compat.gradient_divide_factor(self._param_group)
        result = self._exchange(
            reduce_output,
            self._replicas,
            lambda engine: self._layout(engine, "replicas", reduce_output, reduce_output.numel()),
            step=self._step,
            divisor=1.0 if factor is not None else float(self._replicas.size()),
            terms=self._replicas.size(),
            before=before,
        )
        self._keep(result)

    def _exchange(self, *args: Any, **kwargs: Any) -> ReduceResult:
        """Exchange; where that fails, let no further forward pass begin.

        After a backward pass that raised, FSDP2 keeps its parameters gathered and reduces no
        gradients: the optimizer would find none, and training would go on without an effect.
        """
        try:
            return self._state.exchange(*args, **kwargs)
        except Exception as error:
            refuse = partial(_refuse, str(error))
            for module in self._modules:
                module.register_forward_pre_hook(refuse, prepend=True)
            raise

    def _layout(self, engine: Engine, between: str, values: Tensor, part: int) -> Layout:
        key = (between, values.numel(), values.dtype)
        if key not in self._layouts:
            numels = [numel for _, numel in torch_compat.sharded_sizes(self._param_group)]
            edges: list[int] = []
            if sum(numels) == part:
                ends = list(accumulate(numels))
                edges = [row + end for row in range(0, values.numel(), part) for end in ends]
            else:
                self._state.fell_back("group whose parameters did not all have a gradient")
            self._layouts[key] = engine.layout(
                f"the gradients of FSDP2 module {self._index} between {between}",
                self._index,
                values.numel(),
                values.dtype,
                edges,
                shards=between == "shards",
            )
        return self._layouts[key]

    def _keep(self, result: ReduceResult) -> None:
        buckets = self._state.buckets
        if self.iteration != buckets.iteration:
            self.iteration, self.nonfinite = buckets.iteration, None
        flag = result.nonfinite
        self.nonfinite = flag if self.nonfinite is None else used_here(self.nonfinite) | flag
        buckets.mismatched.add(result.mismatched)


def register_fsdp2(
    model: nn.Module, wire: WireFormat | None, *, replicas: ProcessGroup | None = None
) -> CommHookState:
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
            wire, ``replicas`` with a two-dimensional mesh or that hold other shards of a replica.
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
    groups = [torch_compat.param_groups(module) for module in modules]
    for module, of_module in zip(modules, groups, strict=True):
        _check_groups(module, of_module, wire, replicas)
    every = [group for of_module in groups for group in of_module]
    _agree(AUTO if wire is None else wire.name, every, replicas)
    choice = _choose(every, replicas) if wire is None else None
    if choice is not None:
        wire = wire_format(choice.wire) if choice.compressed else None
    shards = every[0].mesh_info.shard_process_group
    state = CommHookState(wire or as_it_is(_reduced_in(every[0])), shards, choice)
    for module, of_module in zip(modules, groups, strict=True):
        for param_group in of_module:
            comm = None
            if wire is not None:
                index = len(state.groups)
                comm = WireReduceScatter(state, param_group, index, replicas, modules)
            _hook(module, param_group, state, replicas, comm)
    if wire is not None:
        for group in (shards, replicas):
            if group is not None and group.size() > 1:
                state.channel(every[0].device, group)
    return state


def _hook(
    module: FSDPModule,
    param_group: Any,
    state: CommHookState,
    replicas: ProcessGroup | None,
    comm: WireReduceScatter | None,
) -> None:
    """Fill torch's hook points of one module: with ``comm``, or, without one, uncompressed."""
    if comm is not None:
        module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]  # called, not inherited
        if replicas is not None:
            module.set_all_reduce_hook(comm.between_replicas)
        elif _only_all_reduced(param_group):
            theirs = torch_compat.all_reduce_hook(param_group)
            module.set_all_reduce_hook(partial(_count_all_reduce, state, theirs))
        state.groups.append(comm)
    elif replicas is not None:
        # Of these torch knows nothing: without a hook they would differ.
        module.set_all_reduce_hook(partial(_average, param_group, replicas))


def _refuse(failure: str, *_: Any) -> None:
    raise RuntimeError(failure)


def _only_all_reduced(param_group: Any) -> bool:
    """Return whether torch never calls a custom reduce-scatter: HSDP with one shard."""
    replicas = torch_compat.torchs_replicas(param_group)
    return replicas > 1 and int(param_group.mesh_info.shard_process_group.size()) == 1


def _count_all_reduce(
    state: CommHookState, theirs: Callable[[Tensor], None] | None, reduced: Tensor
) -> None:
    """Count what torch's HSDP all-reduced, then do as the user's own hook, if there was one."""
    state.fell_back(_ALL_REDUCED_BY_TORCH)
    if theirs is not None:
        theirs(reduced)


def _average(param_group: Any, replicas: ProcessGroup, reduce_output: Tensor) -> None:
    """Average over replicas as torch's HSDP does."""
    if torch_compat.gradient_divide_factor(param_group) is None:
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
        custom = torch_compat.custom_reduce_scatter(group)
        if custom is not None:
            raise ValueError(
                f"{name} has a custom reduce-scatter already ({custom}): register one hook only"
            )
        if wire is not None:
            check_width(wire, _reduced_in(group), "MixedPrecisionPolicy(reduce_dtype=...)")
        if replicas is not None and torch_compat.is_hsdp(group):
            raise ValueError(
                f"{name} is sharded over a two-dimensional mesh, whose replicas torch averages by "
                "itself: pass fully_shard the shard dimension alone, mesh['shard'], or leave out "
                "replicas"
            )
        if replicas is not None:
            _check_replicas(name, group, replicas)


def _check_replicas(name: str, group: Any, replicas: ProcessGroup) -> None:
    """Refuse replicas that hold other shards: their gradients are of other elements."""
    shards = dist.get_process_group_ranks(group.mesh_info.shard_process_group)
    member = not torch_compat.is_non_member(replicas)
    ranks = dist.get_process_group_ranks(replicas) if member else []
    if set(shards) & set(ranks) != {dist.get_rank()}:
        raise ValueError(
            f"replicas holds ranks {ranks}, but {name} is sharded over ranks {shards}: replicas "
            "must be the ranks that hold the same shard as this one, and no other of these; of a "
            "mesh with dimensions 'replicate' and 'shard' give mesh['replicate'].get_group()"
        )


def _agree(name: str, groups: list[Any], replicas: ProcessGroup | None) -> None:
    """Compare format and model among the ranks that will exchange."""
    numels: dict[ProcessGroup, int] = {}
    for group in groups:
        for ranks in (*torch_compat.mesh_groups(group), *([] if replicas is None else [replicas])):
            numels[ranks] = numels.get(ranks, 0) + _numel(group)
    agree(name, numels)


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
