"""Gradients of FSDP through a wire, by the hook points that torch documents.

FSDP2 takes a reduce-scatter of its own kind (``set_custom_reduce_scatter``) and, after it, an
all-reduce hook between replicas; FSDP1 takes a hook with a state (``register_comm_hook``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy

from distamp.comm_hooks.stats import Account
from distamp.comm_hooks.wire import WIRE_FORMATS, WireFormat, wire_format
from distamp.comm_hooks.wire_reduce import all_reduce, reduce_scatter

__all__ = [
    "LowPrecisionState",
    "WireReduceScatter",
    "fsdp_bf16_compress_hook",
    "fsdp_fp16_compress_hook",
    "register_fsdp1",
    "register_fsdp2",
]

# -- FSDP2 ------------------------------------------------------------------------------------


class WireReduceScatter:
    """FSDP2's reduce-scatter, and the all-reduce between replicas, of one parameter group.

    Stands where torch's ``DefaultReduceScatter`` stood. Each gradient is divided as ``op`` says,
    in fp32, rounded once, and added up in fp32.

    Args:
        wire: The format on the way.
        account: Where bytes and waiting are counted.
        param_group: torch's own object for the group, read for its parameters and divide factor.
        replicas: The ranks that hold the same shard, where each replica is a one-dimensional FSDP
            and this hook is to average between them.

    Attributes:
        nonfinite: 0-d bool, the same on all ranks of the group (and its replicas): whether a
            gradient that was reduced since the last ``take_nonfinite`` held inf or NaN on any of
            them, or was so large (1e38) that sums may; None where none was reduced. None always
            under torch's own HSDP, whose all-reduce between replicas carries no such news.
    """

    def __init__(
        self,
        wire: WireFormat,
        account: Account,
        param_group: Any,
        replicas: ProcessGroup | None = None,
    ) -> None:
        self.wire = wire
        self.nonfinite: Tensor | None = None
        self._account = account
        self._param_group = param_group
        self._replicas = replicas
        self._native_hsdp = bool(getattr(param_group, "_is_hsdp", False))
        self._found: Tensor | None = None

    def parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters whose gradients come through here."""
        return [each.sharded_param for each in self._param_group.fsdp_params]

    def take_nonfinite(self) -> Tensor | None:
        """Return ``nonfinite`` and begin anew."""
        nonfinite, self.nonfinite = self.nonfinite, None
        return nonfinite

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
        _check_width(self.wire, input_tensor.dtype, "MixedPrecisionPolicy(reduce_dtype=...)")
        replicas = 1 if self._replicas is None else self._replicas.size()
        self._found = reduce_scatter(
            self.wire,
            input_tensor,
            output_tensor,
            group,
            divisor=_divisor(op, group.size()),
            account=self._account,
            terms=group.size() * replicas,
        )
        if self._native_hsdp:
            self._account.fallbacks["torch's HSDP all-reduces between replicas uncompressed"] += 1
        elif self._replicas is None:
            self._keep(self._found)

    def between_replicas(self, reduce_output: Tensor) -> None:
        """Average the reduced shard over the replicas: the hook of ``set_all_reduce_hook``."""
        assert self._replicas is not None
        # As torch's HSDP: a factor of the user's own divides for all ranks, in the first sum.
        factor = self._param_group.gradient_divide_factor
        divisor = 1.0 if factor is not None else float(self._replicas.size())
        found = all_reduce(
            self.wire,
            reduce_output,
            self._replicas,
            divisor=divisor,
            account=self._account,
            nonfinite=self._found,
        )
        self._found = None
        self._keep(found)

    def _keep(self, found: Tensor) -> None:
        self.nonfinite = found if self.nonfinite is None else self.nonfinite | found


def register_fsdp2(
    model: nn.Module,
    wire: WireFormat,
    account: Account,
    *,
    replicas: ProcessGroup | None = None,
) -> list[WireReduceScatter]:
    """Send the gradients of every FSDP2 module of ``model`` through ``wire``.

    Args:
        model: ``fully_shard`` was applied to it, or to modules within it.
        wire: The format on the way.
        account: Where bytes and waiting are counted.
        replicas: For replicas of a one-dimensional FSDP2: the ranks that hold the same shard.
            Unlike with a two-dimensional mesh, whose all-reduce torch does by itself, gradients
            go through ``wire`` between them too.

    Returns:
        One reduce-scatter for each parameter group, in the order of ``model.modules()``.

    Raises:
        ValueError: no FSDP2 module, a hook or a custom reduce-scatter is there already, a format
            that needs error feedback, gradients reduced in a dtype that is not wider than the
            wire, or ``replicas`` with a two-dimensional mesh.
        RuntimeError: this torch has no ``set_custom_reduce_scatter``.
    """
    _check_format(wire)
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
    registered = []
    for module, of_module in zip(modules, groups, strict=True):
        for param_group in of_module:
            comm = WireReduceScatter(wire, account, param_group, replicas)
            module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]  # called, not inherited
            if replicas is not None:
                module.set_all_reduce_hook(comm.between_replicas)
            registered.append(comm)
    return registered


def _param_groups(module: FSDPModule) -> list[Any]:
    """Return torch's parameter groups of one module: none, one, or one for each mesh."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _check_groups(
    module: FSDPModule, groups: list[Any], wire: WireFormat, replicas: ProcessGroup | None
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
        policy = group.mp_policy
        for each in group.fsdp_params:
            dtype = policy.reduce_dtype or policy.param_dtype or each.sharded_param.dtype
            _check_width(wire, dtype, "MixedPrecisionPolicy(reduce_dtype=...)")
        if replicas is not None and getattr(group, "_is_hsdp", False):
            raise ValueError(
                f"{name} is sharded over a two-dimensional mesh, whose replicas torch averages by "
                "itself: pass fully_shard the shard dimension alone, mesh['shard'], or leave out "
                "replicas"
            )


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


# -- FSDP1 ------------------------------------------------------------------------------------


class LowPrecisionState(default_hooks.LowPrecisionState):
    """State of the FSDP1 hooks, as torch's ``LowPrecisionState``, and an account of its own.

    Args:
        process_group: The ranks that FSDP shards over.
        parameter_type: dtype of the parameters, to which reduced gradients are cast.
    """

    def __init__(
        self, process_group: ProcessGroup, parameter_type: torch.dtype = torch.float32
    ) -> None:
        super().__init__(process_group, parameter_type)  # type: ignore[no-untyped-call]
        self.account = Account()
        self.nonfinite: Tensor | None = None


def fsdp_fp16_compress_hook(
    state: default_hooks.LowPrecisionState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average gradients of FSDP1 over the ranks through the ``fp16`` wire.

    Unlike torch's ``fp16_compress_hook`` for FSDP it adds up in fp32, neither over- nor underflows
    at any loss scale, sends half of what torch's does on gloo, and runs on a CPU.

    Args:
        state: Ours or torch's ``LowPrecisionState``; its two divide factors are honoured.
        grad: 1-D unsharded gradient; averaged in place where there is no ``output``.
        output: 1-D, this rank's shard of the average.
    """
    _low_precision_hook(wire_format("fp16"), state, grad, output)


def fsdp_bf16_compress_hook(
    state: default_hooks.LowPrecisionState, grad: Tensor, output: Tensor | None = None
) -> None:
    """Average gradients of FSDP1 over the ranks through the ``bf16`` wire.

    Unlike torch's ``bf16_compress_hook`` for FSDP it adds up in fp32 and runs on a CPU.

    Args:
        state: Ours or torch's ``LowPrecisionState``; its two divide factors are honoured.
        grad: 1-D unsharded gradient; averaged in place where there is no ``output``.
        output: 1-D, this rank's shard of the average.
    """
    _low_precision_hook(wire_format("bf16"), state, grad, output)


def register_fsdp1(model: FullyShardedDataParallel, wire: WireFormat) -> LowPrecisionState:
    """Send the gradients of an FSDP1 model through ``wire``.

    Args:
        model: The outermost ``FullyShardedDataParallel``; not run yet.
        wire: The format on the way.

    Returns:
        The state that all its hooks share.

    Raises:
        ValueError: not the outermost wrapper, a hook is there already, a hybrid strategy, a
            format that needs error feedback, or gradients in a dtype not wider than the wire.
    """
    _check_format(wire)
    if not model.check_is_root():
        raise ValueError(
            "this FullyShardedDataParallel is inside another: register on the outermost one"
        )
    units = FullyShardedDataParallel.fsdp_modules(model)
    for unit in units:
        if unit._comm_hook is not None:
            raise ValueError("this FSDP1 model has a communication hook already: register one only")
        if unit.sharding_strategy in _HYBRID:
            raise ValueError(
                f"FSDP1 takes no communication hook with {unit.sharding_strategy}: use FSDP2, or "
                "one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"
            )
        precision = unit.mixed_precision
        dtype = precision.reduce_dtype or precision.param_dtype or _dtype_of(unit)
        _check_width(wire, dtype, "MixedPrecision(reduce_dtype=...)")
    assert model.process_group is not None
    state = LowPrecisionState(model.process_group, _dtype_of(model))
    model.register_comm_hook(state, _HOOKS[wire.name])
    return state


def _low_precision_hook(
    wire: WireFormat,
    state: default_hooks.LowPrecisionState,
    grad: Tensor,
    output: Tensor | None,
) -> None:
    own = state if isinstance(state, LowPrecisionState) else None
    account = Account() if own is None else own.account
    group = state.process_group
    divisor = state.gradient_predivide_factor * state.gradient_postdivide_factor
    if output is None:
        found = all_reduce(wire, grad, group, divisor=divisor, account=account)
        if grad.dtype != state.parameter_type:
            grad.data = grad.data.to(state.parameter_type)
    else:
        # FSDP1 takes what the hook makes of the shard, in whichever dtype it then is.
        if output.dtype != state.parameter_type:
            output.data = torch.empty_like(output, dtype=state.parameter_type)
        found = reduce_scatter(wire, grad, output, group, divisor=divisor, account=account)
    if own is not None:
        own.nonfinite = found if own.nonfinite is None else own.nonfinite | found


def _hook(wire: WireFormat) -> Callable[[Any, Tensor, Tensor | None], None]:
    def hook(state: Any, grad: Tensor, output: Tensor | None = None) -> None:
        _low_precision_hook(wire, state, grad, output)

    hook.__name__ = hook.__qualname__ = f"fsdp_{wire.name}_hook"
    return hook


_HOOKS = {name: _hook(wire) for name, wire in WIRE_FORMATS.items()}
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)


# -- both -------------------------------------------------------------------------------------


def _check_format(wire: WireFormat) -> None:
    if wire.needs_error_feedback:
        allowed = [n for n, each in WIRE_FORMATS.items() if not each.needs_error_feedback]
        raise ValueError(
            f"{wire.name} needs error feedback, which sharded gradients have not: use "
            f"DistributedDataParallel, or one of {', '.join(allowed)}"
        )


def _check_width(wire: WireFormat, dtype: torch.dtype, where: str) -> None:
    if dtype.itemsize <= wire.payload.itemsize:
        raise ValueError(
            f"the {wire.name} wire is no narrower than gradients reduced in {dtype}: set {where} "
            "to torch.float32, or register no hook"
        )
