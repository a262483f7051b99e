"""FSDPUnit: one module of FSDP2, and all private names of FSDP that distamp reads.

A new version of torch changes this file alone. The names were read in torch 2.11, 2.13 and 2.15.
If torch renames one, the call that needs it raises RuntimeError with the name, and everything else
goes on.

======================================  ==========  ==============================================
name                                    in torch    without it
======================================  ==========  ==============================================
module._get_fsdp_state                  2.11-2.15   no unit can be read: hooks, levels with
                                                    ``fully_shard`` and `Amp.no_sync` raise
state._fsdp_param_groups                2.13-2.15   `_fsdp_param_group` of 2.11 is read instead
state._fsdp_param_group                 2.11        read in torch 2.11, which has one group
state._mp_policy                        2.11-2.15   registration and the checks of levels raise
state._state_ctx and its                2.15        a step before ``finalize_backward()`` is not
`manual_backward_finalization_active`               refused
group.mesh_info and its groups          2.11-2.15   registration raises
group.post_forward_mesh_info            2.11-2.15   registration with replicas raises
mesh_info.reduce_scatter_process_group  2.13-2.15   registration with replicas does not copy it, and
                                                    gradients are reduced in the shards' group
group.fsdp_params and `sharded_param`,  2.11-2.15   registration raises
`padded_sharded_param_size` of each
fsdp_param.mp_policy                    2.11-2.15   `FSDPUnit.param_dtype_of` raises, and so does
                                                    registration if a ``grad_dtype`` is None
group.device                            2.11-2.15   registration raises
group._reduce_scatter_comm,             2.11-2.15   registration raises, because a hook of the
group._all_gather_comm,                             user would be replaced silently
group._all_reduce_hook                  2.11-2.15   registration with replicas raises likewise
group.all_reduce_grads                  2.11-2.15   the first average between replicas raises
group.gradient_divide_factor            2.11-2.15   the first average between replicas raises
group.reduce_grads                      2.11-2.15   `Amp.no_sync` raises
group._partial_reduce_output            2.11-2.15   `Amp.zero_grad` after `Amp.no_sync` raises,
                                                    and training without the two goes on
fsdp_param.unsharded_accumulated_grad   2.11-2.15   as above; 2.15 returns `_unsharded_param.grad`
fsdp_param._unsharded_param             2.11-2.15   as above, and as in the next row
fsdp_param._sharded_post_forward_param, 2.11-2.15   clipping, reports and replays that get a
_composable_state.                                  gathered parameter without a gradient raise
_module_state_mapping                               GradientError, because they need its shard
fsdp_param.accumulate_unsharded_grad_   2.11-2.13   not called: 2.15 reduces mixed gradient dtypes,
if_needed and `to_accumulated_grad_                 which a parameter with its first gradient after
if_needed`                                          paused passes causes
_fsdp_common.FSDPMeshInfo and           2.11-2.15   registration with replicas raises
`DataParallelMeshInfo`
FSDP1: module._handle and its           2.11-2.15   snapshots of FSDP1 raise
`flat_param._full_param_padded`,
`_prefetched`
======================================  ==========  ==============================================
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.torch_version import TorchVersion

__all__ = ["FSDPUnit", "free_gathered_flat_params"]

# Since torch 2.15 FSDP2 reduces gradients in the parameters' grad_dtype if a policy has no
# reduce_dtype. Before, it reduced them in param_dtype.
_REDUCES_IN_GRAD_DTYPE = TorchVersion(torch.__version__) >= "2.15"
# Since torch 2.15 a user may finalize backward passes of FSDP2.
_HAS_MANUAL_FINALIZATION = _REDUCES_IN_GRAD_DTYPE
# The classes of torch's own collectives, which a hook may replace.
_TORCH_COMM_PREFIXES = ("Default", "ProcessGroupAlloc", "SymmMem")


class FSDPUnit:
    """One module to which ``fully_shard`` or ``replicate`` was applied.

    Args:
        module: The module, which is not compiled.

    Attributes:
        module: The module.
        param_groups: torch's groups of parameters: none, one, or one for each mesh.

    Raises:
        RuntimeError: This torch does not have a name that this class reads.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._state = _read(module, "_get_fsdp_state")()
        if hasattr(self._state, "_fsdp_param_groups"):
            self.param_groups: list[Any] = list(_read(self._state, "_fsdp_param_groups"))
        else:
            group = _read(self._state, "_fsdp_param_group")
            self.param_groups = [] if group is None else [group]

    @classmethod
    def all_units(cls) -> list[FSDPUnit]:
        """Return the units of all modules of this process."""
        composable_state = sys.modules.get("torch.distributed._composable_state")
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if composable_state is None or fsdp is None:  # FSDP2 was never imported
            return []
        modules = list(_read(composable_state, "_module_state_mapping"))
        # Other composable functions of torch register modules, too.
        return [cls(module) for module in modules if isinstance(module, fsdp.FSDPModule)]

    @classmethod
    def units_awaiting_finalization(cls) -> list[FSDPUnit]:
        """Return the units of this process in a backward pass without its manual finalization.

        After ``set_manual_backward_finalization(True)``, gradients are not reduced until
        ``finalize_backward()`` returns, or ``wait()`` of its handle.
        """
        if not _HAS_MANUAL_FINALIZATION:
            return []
        units = []
        try:
            for unit in cls.all_units():
                if unit.awaits_finalization:
                    units.append(unit)
        except RuntimeError:
            # Every step calls this, and without this check training goes on.
            return []
        return units

    @property
    def awaits_finalization(self) -> bool:
        """The flag of a backward pass with manual finalization, until torch resets it."""
        context = _read(self._state, "_state_ctx")
        # None between two iterations, and False if torch finalizes this one.
        return bool(_read(context, "manual_backward_finalization_active"))

    def shards(self) -> Iterator[nn.Parameter]:
        """Yield the sharded parameters of the unit, as an optimizer holds them."""
        for group in self.param_groups:
            for fsdp_param in _read(group, "fsdp_params"):
                yield _read(fsdp_param, "sharded_param")

    def gathered_params(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter that the unit has gathered, and its shard.

        If ``reshard_after_forward`` is a number, a parameter after a forward pass is a shard over a
        smaller mesh, which this yields, too.
        """
        for group in self.param_groups:
            for fsdp_param in _read(group, "fsdp_params"):
                shard = _read(fsdp_param, "sharded_param")
                for gathered in _gathered_params(fsdp_param):
                    yield gathered, shard

    def reshard(self) -> None:
        """Free the gathered parameters, and register the shards as the module's parameters."""
        self.module.reshard()

    # -- the policy ------------------------------------------------------------------------------

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype in which the unit gathers parameters, or None if it does not cast them.

        Since torch 2.15 ``param_dtype_override_fn`` may choose another dtype for a parameter, which
        `param_dtype_of` returns.
        """
        dtype: torch.dtype | None = _read(self._state, "_mp_policy").param_dtype
        return dtype

    def param_dtype_of(self, param: Tensor) -> torch.dtype:
        """Return the dtype in which the unit gathers one of its parameters.

        Args:
            param: A parameter of the module, sharded or gathered.

        Raises:
            ValueError: The parameter belongs to another unit, or to none.
        """
        for group in self.param_groups:
            for fsdp_param in _read(group, "fsdp_params"):
                tensors = [_read(fsdp_param, "sharded_param")]
                tensors += _gathered_params(fsdp_param)
                if any(tensor is param for tensor in tensors):
                    return _compute_dtype(fsdp_param)
        name = type(self.module).__name__
        raise ValueError(
            f"A parameter of shape {tuple(param.shape)} is not sharded by the unit {name}. Pass a "
            "parameter of that unit."
        )

    @property
    def output_dtype(self) -> torch.dtype | None:
        """The dtype to which the unit casts its outputs, or None if it does not cast them."""
        dtype: torch.dtype | None = _read(self._state, "_mp_policy").output_dtype
        return dtype

    def reduce_dtype(self, grad_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the unit reduces gradients.

        Args:
            grad_dtype: The dtype of the parameters' gradients.
        """
        policy = _read(self._state, "_mp_policy")
        default = None if _REDUCES_IN_GRAD_DTYPE else policy.param_dtype
        dtype: torch.dtype = policy.reduce_dtype or default or grad_dtype
        return dtype

    # -- pauses in the reduction of gradients ----------------------------------------------------

    @contextmanager
    def paused_gradient_sync(self) -> Iterator[None]:
        """Leave gradients unreduced inside, and restore the setting from before at the end."""
        settings = []
        for group in self.param_groups:
            for name in ("reduce_grads", "all_reduce_grads"):
                settings.append((group, name, _read(group, name)))
        self.module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for group, name, value in settings:
                setattr(group, name, value)

    @property
    def has_partly_reduced_gradients(self) -> bool:
        """True if HSDP has reduced gradients over its shards and not over its replicas."""
        return any(
            _read(group, "_partial_reduce_output") is not None for group in self.param_groups
        )

    def drop_unreduced_gradients(self) -> list[nn.Parameter]:
        """Drop the gradients that the unit has accumulated and not reduced.

        FSDP2 has no public name for them. They are gradients of whole parameters, in
        ``_unsharded_param.grad`` or, before torch 2.15 and in the dtype of the reduction, in
        ``unsharded_accumulated_grad``. ``_partial_reduce_output`` holds gradients that HSDP has
        reduced over its shards alone.

        Returns:
            The sharded parameters that had such a gradient.
        """
        dropped = []
        for group in self.param_groups:
            if _read(group, "_partial_reduce_output") is not None:
                setattr(group, "_partial_reduce_output", None)  # noqa: B010  # torch's attribute
            for fsdp_param in _read(group, "fsdp_params"):
                had_gradient = False
                unsharded = _gathered_param(fsdp_param, "_unsharded_param")
                if unsharded is not None and unsharded.grad is not None:
                    unsharded.grad = None
                    had_gradient = True
                # torch 2.15 has no setter for this, and returns the gradient that is gone by now.
                if _read(fsdp_param, "unsharded_accumulated_grad") is not None:
                    fsdp_param.unsharded_accumulated_grad = None
                    had_gradient = True
                if had_gradient:
                    dropped.append(fsdp_param.sharded_param)
        return dropped

    @contextmanager
    def accumulating_in_reduce_dtype(self) -> Iterator[None]:
        """Let parameters get their first gradient after others of the unit were accumulated.

        Under a policy, FSDP2 accumulates unreduced gradients in the dtype of the reduction. A
        parameter may get its first gradient in the pass that reduces, in the dtype of its
        gradient, and torch refuses to reduce both in one message ("uniform gradient dtype"). So
        torch's own methods move that gradient to the accumulated gradients as soon as it exists.
        Torch 2.15 reduces both in one message, and does not have the methods.
        """
        handles = []
        for group in self.param_groups:
            fsdp_params = _read(group, "fsdp_params")
            if not all(hasattr(param, "to_accumulated_grad_if_needed") for param in fsdp_params):
                continue
            late = [param for param in fsdp_params if param.unsharded_accumulated_grad is None]
            if len(late) == len(fsdp_params):
                continue
            for fsdp_param in late:
                unsharded = _gathered_param(fsdp_param, "_unsharded_param")
                if unsharded is not None and unsharded.requires_grad:
                    callback = _accumulate_gradient(fsdp_param)
                    handles.append(unsharded.register_post_accumulate_grad_hook(callback))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # -- one group of parameters, which hooks need -----------------------------------------------

    @property
    def _group(self) -> Any:
        return self.param_groups[0]

    @property
    def device(self) -> torch.device:
        """The device on which the unit computes."""
        device: torch.device = _read(self._group, "device")
        return device

    @property
    def shard_group(self) -> ProcessGroup | None:
        """The ranks over which the unit is sharded, or None under ``replicate``."""
        group: ProcessGroup | None = getattr(self._mesh_info, "shard_process_group", None)
        return group

    @property
    def replicate_group(self) -> ProcessGroup | None:
        """The ranks over which torch averages the unit's shards, or None without replicas."""
        group: ProcessGroup | None = getattr(self._mesh_info, "replicate_process_group", None)
        return group

    @property
    def _mesh_info(self) -> Any:
        return _read(self._group, "mesh_info")

    @property
    def numel(self) -> int:
        """The number of elements of the shards."""
        return sum(param.sharded_param.numel() for param in _read(self._group, "fsdp_params"))

    @property
    def shard_numels(self) -> list[int]:
        """The length of each parameter in the tensor that an all-gather sends."""
        fsdp_params = _read(self._group, "fsdp_params")
        return [_read(param, "padded_sharded_param_size").numel() for param in fsdp_params]

    def trainable_shards(self) -> tuple[list[int], list[Tensor]]:
        """Return the length of each trained parameter in a reduced shard, and the parameters.

        They are in the order of torch's ``foreach_reduce``. A frozen parameter has no gradient. If
        a parameter had no gradient in this pass, torch leaves it out, and a reduced shard is
        shorter than the sum of these lengths.
        """
        numels = []
        params = []
        for fsdp_param in self._trainable_params():
            numels.append(_read(fsdp_param, "padded_sharded_param_size").numel())
            params.append(fsdp_param.sharded_param)
        return numels, params

    def _trainable_params(self) -> list[Any]:
        """Return torch's objects of the trained parameters, in the order of ``foreach_reduce``."""
        params_by_grad_dtype: dict[torch.dtype | None, list[Any]] = {}
        for fsdp_param in _read(self._group, "fsdp_params"):
            shard = _read(fsdp_param, "sharded_param")
            if shard.requires_grad:
                # Since torch 2.15 gradients of one dtype are neighbours, in the order in which
                # the dtypes first occur.
                grad_dtype = shard.grad_dtype if _REDUCES_IN_GRAD_DTYPE else None
                params_by_grad_dtype.setdefault(grad_dtype, []).append(fsdp_param)
        return [param for params in params_by_grad_dtype.values() for param in params]

    @property
    def grad_reduce_dtype(self) -> torch.dtype:
        """The dtype in which the unit reduces the gradients of its trained parameters.

        Since torch 2.15 parameters may have several ``grad_dtype``, which torch promotes.
        """
        dtypes = []
        for fsdp_param in self._trainable_params():
            shard = fsdp_param.sharded_param
            grad_dtype = shard.dtype
            if _REDUCES_IN_GRAD_DTYPE:
                # A parameter whose grad_dtype is None takes the gradient that autograd computes.
                grad_dtype = shard.grad_dtype or _compute_dtype(fsdp_param)
            dtypes.append(self.reduce_dtype(grad_dtype))
        if not dtypes:
            return self.reduce_dtype(torch.float32)
        return functools.reduce(torch.promote_types, dtypes)

    @property
    def averages_replicas_now(self) -> bool:
        """The setting by which the last backward pass of an accumulation averages replicas."""
        return bool(_read(self._group, "all_reduce_grads"))

    @property
    def divide_factor(self) -> float | None:
        """The user's factor, which divides for all ranks in the first sum, or None."""
        factor: float | None = _read(self._group, "gradient_divide_factor")
        return factor

    def installed_hook(self, all_gather: bool, all_reduce: bool) -> str | None:
        """Return the hook point that is used already, in words, or None.

        Args:
            all_gather: Whether an all-gather is to be installed.
            all_reduce: Whether an all-reduce hook is to be installed.
        """
        names = ["_reduce_scatter_comm"]
        if all_gather:
            names.append("_all_gather_comm")
        for name in names:
            class_name = type(_read(self._group, name)).__name__
            if not class_name.startswith(_TORCH_COMM_PREFIXES):
                return f"a custom collective ({class_name})"
        if all_reduce and _read(self._group, "_all_reduce_hook") is not None:
            return "an all-reduce hook"
        return None

    def leave_replicas_to_hook(self) -> None:
        """Let torch reduce over the shards alone, so that the all-reduce hook averages replicas.

        torch runs that hook only if its mesh has no replicas. Parameters keep their mesh, and
        only the mesh that torch reads for the reduction changes.
        """
        from torch.distributed.fsdp._fully_shard import _fsdp_common

        mesh_info = self._mesh_info
        is_sharded = self.shard_group is not None
        mesh_class: Any = _fsdp_common.DataParallelMeshInfo
        if is_sharded:
            mesh_class = _fsdp_common.FSDPMeshInfo
        arguments = {}
        for field in fields(mesh_class):
            if field.init:
                arguments[field.name] = getattr(mesh_info, field.name)
        shard_info = mesh_class(**arguments)
        # torch 2.13 and later may have a group for the stream of the reduce-scatter.
        if is_sharded and hasattr(mesh_info, "reduce_scatter_process_group"):
            shard_info.reduce_scatter_process_group = mesh_info.reduce_scatter_process_group
        if _read(self._group, "post_forward_mesh_info") == mesh_info:
            self._group.post_forward_mesh_info = shard_info
        self._group.mesh_info = shard_info

    def install(
        self,
        reduce_scatter: Any = None,
        all_gather: Any = None,
        all_reduce_hook: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Fill torch's public hook points; None leaves a point unchanged.

        Args:
            reduce_scatter: Replaces ``DefaultReduceScatter``. torch calls it, and it need not
                inherit from torch's protocol.
            all_gather: Replaces ``DefaultAllGather`` likewise.
            all_reduce_hook: Runs after the reduce-scatter.
        """
        if reduce_scatter is not None:
            self.module.set_custom_reduce_scatter(reduce_scatter)
        if all_reduce_hook is not None:
            self.module.set_all_reduce_hook(all_reduce_hook)
        if all_gather is not None:
            self.module.set_custom_all_gather(all_gather)


def free_gathered_flat_params(module: nn.Module) -> None:
    """Free the gathered flat parameter of a module of FSDP1; do nothing for another module.

    After a forward pass without a backward pass, FSDP1 keeps the gathered parameter of its root,
    and the next forward pass uses it again.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FullyShardedDataParallel):
        return
    handle = _read(module, "_handle")
    # A handle gets its memory for gathered parameters in the first forward pass.
    if handle is None or not hasattr(handle.flat_param, "_full_param_padded"):
        return
    handle.reshard(handle.uses_sharded_strategy)
    handle.post_reshard()
    setattr(handle, "_prefetched", False)  # noqa: B010  # torch's attribute


def _read(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        owner_name = getattr(owner, "__name__", type(owner).__name__)
        raise RuntimeError(
            f"torch {torch.__version__} has no {name} in {owner_name}, which distamp reads to work "
            "with fully_shard. Use one of the versions of torch that distamp supports."
        ) from None


def _gathered_param(fsdp_param: Any, name: str) -> nn.Parameter | None:
    """Return a gathered parameter, or None before torch makes it in the first forward pass."""
    if name not in type(fsdp_param).__annotations__:
        _read(fsdp_param, name)
    return getattr(fsdp_param, name, None)


def _gathered_params(fsdp_param: Any) -> Iterator[nn.Parameter]:
    """Yield the gathered parameter, and its shard over a smaller mesh, as far as they exist."""
    for name in ("_unsharded_param", "_sharded_post_forward_param"):
        gathered = _gathered_param(fsdp_param, name)
        if gathered is not None:
            yield gathered


def _compute_dtype(fsdp_param: Any) -> torch.dtype:
    """Return the dtype of a parameter while it is gathered."""
    own_dtype: torch.dtype = _read(fsdp_param, "sharded_param").dtype
    param_dtype: torch.dtype | None = _read(fsdp_param, "mp_policy").param_dtype
    if param_dtype is None or not own_dtype.is_floating_point:
        return own_dtype
    return param_dtype


def _accumulate_gradient(fsdp_param: Any) -> Callable[[Tensor], None]:
    """Return a hook that moves an unsharded gradient to the accumulated gradients of FSDP2."""

    def accumulate(_: Tensor) -> None:
        fsdp_param.accumulate_unsharded_grad_if_needed()
        fsdp_param.to_accumulated_grad_if_needed()

    return accumulate
