"""initialize: a model and its optimizers, prepared to train at a level of precision."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distamp.autocast import DataParallel, OpLists, autocast
from distamp.comm_hooks import CommHook
from distamp.comm_hooks.registration import hook_of, register_comm_hook
from distamp.errors import ConfigError
from distamp.guard import StepGuard
from distamp.levels.amp import Amp
from distamp.levels.casting import apply_level, resolve_level_argument
from distamp.levels.fp32_modules import (
    ModulePrecisions,
    apply_module_precisions,
    cast_outputs_to_model_dtype,
    match_patterns,
)
from distamp.levels.rank_setup import (
    compare_rank_setups,
    idle_optimizers,
    make_rank_setup,
    raise_in_initialize,
    unmatched_patterns_text,
)
from distamp.levels.validate import validate
from distamp.levels.wrappers import WrapperInfo, inspect_wrapper
from distamp.optim_utils import params_of
from distamp.precision_level import LevelLike, PrecisionLevel
from distamp.process_group import resolve_process_group
from distamp.scaler import (
    DistGradScaler,
    DynamicLossScale,
    LossScale,
    MasterParameters,
    StaticLossScale,
    masters_of,
)

__all__ = ["initialize"]

_T = TypeVar("_T")
_LEVEL_EXAMPLE = (
    "Pass level='bf16' on devices that compute in bfloat16, else level='fp16', as in "
    "initialize(model, optimizer, 'bf16')."
)
# The first loss scale of a scaler in torch and here.
_FIRST_SCALE = 2.0**16
_logger = logging.getLogger("distamp.levels")


def initialize(
    model: nn.Module | Sequence[nn.Module],
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    level: LevelLike | None = None,
    *,
    opt_level: LevelLike | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | Literal["split"] | None = None,
    loss_scale: LossScale | float | str | None = None,
    module_precision: Mapping[str, str] | None = None,
    init_scale: float | None = None,
    max_consecutive_skips: int | None = None,
    check_update: bool = False,
    check_replicas_every: int | None = None,
    on_mismatch: Literal["raise", "warn"] = "raise",
    process_group: ProcessGroup | DeviceMesh | None = None,
    comm_hook: str | None = None,
    replicas: ProcessGroup | None = None,
    op_lists: OpLists | None = None,
    cache_enabled: bool | None = None,
    **unknown: object,
) -> Amp:
    """Prepare a model and its optimizers for training at a level of precision.

    Like ``apex.amp.initialize``, but without patching, and for models in DDP, FSDP1, FSDP2,
    fairscale's ShardedDataParallel and DataParallel. The call casts a model in place if it is plain
    or in DataParallel. Under DDP, call `cast_model` before wrapping. Under FSDP, fp16-O2 is FSDP's
    own mixed precision. If a model does not fit, the error gives the right order of calls.

    Collective: every rank of `process_group` must call this. With ``optimizers=None`` it sends
    nothing. A rank that refuses its arguments makes every rank raise.

    Args:
        model: The model that you call, wrapped or not; or several.
        optimizers: One or several, over parameters of the models. An empty list for a rank that
            trains nothing, such as a frozen pipeline stage, if other ranks train: the rank takes
            part in every message of `Amp.step`. None to only run the model; then nothing is sent.
        level: The level, as `PrecisionLevel.from_name` takes it, such as ``"bf16"``. There is no
            default.
        opt_level: Apex's name of ``level``.
        keep_batchnorm_fp32: As in Apex; None, here and below, for the level's own.
        master_weights: As in Apex; ``"split"`` for `MasterParameters` in half the memory.
        loss_scale: Replaces the loss scale of the level: a constant number, ``"dynamic"``, or a
            `LossScale` such as ``DynamicLossScale(growth_interval=500)``.
        module_precision: Modules in a precision of their own, as in `cast_model`: shell patterns
            over module names without wrappers. Give both the same, and all ranks the
            same.
        init_scale: The first value of a dynamic loss scale.
        max_consecutive_skips: See `DistGradScaler`.
        check_update: See `StepGuard`.
        check_replicas_every: See `StepGuard`.
        on_mismatch: See `StepGuard`.
        process_group: The ranks that have a part of the models; see `DistGradScaler`.
        comm_hook: The format of gradients between the ranks, such as ``"fp16"``;
            see ``distamp.comm_hooks.register_comm_hook``.
        replicas: With ``comm_hook``, for FSDP2 over only the shard dimension of a mesh: the ranks
            that have the same shard, between which the hook averages too.
        op_lists: Op lists of the autocast region, as ``ops`` of `autocast`.
        cache_enabled: As in `autocast`.
        unknown: Raises TypeError. For an argument of Apex or of a scaler, the error gives the
            replacement.

    Raises:
        ConfigError: The level does not exist, overrides contradict it, or the model, its wrapper
            or an optimizer does not fit it. The message gives the correction.
        RankMismatchError: Ranks have different values of ``level`` or ``comm_hook``, or different
            patterns in ``module_precision``, or a rank does not call it.
        TypeError: An argument does not exist, or a model or an optimizer has another type.
        ValueError: The wrapper does not support this ``comm_hook``.

    Source: Apex's documentation of amp.initialize.
    """
    # Every rank checks its arguments before any rank changes anything.
    group = resolve_process_group(process_group)
    optimizers_given = optimizers is not None
    try:
        for name in unknown:
            raise _unexpected_argument(name)
        models = _as_tuple("model", model, nn.Module)
        optimizers = _as_tuple("optimizers", optimizers, torch.optim.Optimizer)
        level = PrecisionLevel.from_name(
            resolve_level_argument("initialize", level, opt_level, _LEVEL_EXAMPLE),
            keep_batchnorm_fp32=keep_batchnorm_fp32,
            master_weights=master_weights,
            loss_scale=_loss_scale_of_level(loss_scale, init_scale),
            module_precision=module_precision,
        )
        loss_scale_rule, first_scale = _loss_scale_rule(level, loss_scale, init_scale)
        wrappers = tuple(map(inspect_wrapper, models))
        precisions, unmatched = match_patterns(models, level)
        device = validate(
            models, wrappers, optimizers, level, precisions, comm_hook, replicas, op_lists
        )
    except Exception as error:
        # The other ranks wait in the comparison of setups.
        raise_in_initialize(error, group, optimizers_given)
    setup = make_rank_setup(level, comm_hook, unmatched, optimizers)
    setups = compare_rank_setups(setup, group, optimizers_given)
    idle = () if optimizers else idle_optimizers(setups, device)

    guard_settings: dict[str, Any] = {
        "process_group": process_group,
        "max_consecutive_skips": max_consecutive_skips,
        "check_update": check_update,
        "check_replicas_every": check_replicas_every,
        "on_mismatch": on_mismatch,
        "named_parameters": _named_tensors(models),
    }
    scaler: DistGradScaler | StepGuard
    if level.scales:
        scaler = DistGradScaler(
            device,
            first_scale,
            loss_scale=loss_scale_rule,
            fp16_grads=_fp16_grads(level),
            **guard_settings,
        )
    else:
        scaler = StepGuard(**guard_settings)
    scaler.register_optimizers(*optimizers, *idle)
    region = _make_region(models, level, device, op_lists, cache_enabled)
    # Hooks are registered before the models change, because a registration may be refused.
    comm_hooks = _register_comm_hooks(models, comm_hook, replicas)
    _apply_level(models, wrappers, level, precisions)
    if level.master_weights:
        _make_masters(optimizers, wrappers, level)
    _warn_of_bf16_weights(optimizers, group)
    if scaler.is_enabled():
        for hook in comm_hooks:
            scaler.attach_comm_hook(hook)
    shard_group_fn = None
    if replicas is not None:
        # The mesh of a DTensor does not contain the copies of shards that the hook averages.
        shard_group_fn = _mesh_of
    notes = unmatched_patterns_text(setups)
    for note in notes:
        _logger.info(note)
    return Amp(models, optimizers, level, scaler, region, comm_hooks, shard_group_fn, idle, notes)


def _named_tensors(models: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of all models with their names, for messages."""
    tensors: list[tuple[str, Tensor]] = []
    for model in models:
        tensors.extend(model.named_parameters())
        tensors.extend(model.named_buffers())
    return tensors


def _fp16_grads(level: PrecisionLevel) -> Literal["master", "inplace", "error"]:
    """Return the rule of the scaler for float16 gradients at a level."""
    if level.master_weights:
        return "master"
    return "inplace" if level.casts_model else "error"


def _mesh_of(param: Tensor) -> Any:
    return getattr(param, "device_mesh", None)


def _unexpected_argument(name: str) -> TypeError:
    """Return the error for a keyword argument that `initialize` does not have."""
    message = f"initialize() got an unexpected keyword argument {name!r}"
    if name in _REPLACEMENTS:
        return TypeError(f"{message}. {_REPLACEMENTS[name]}")
    similar = difflib.get_close_matches(name, inspect.signature(initialize).parameters, n=1)
    return TypeError(f"{message}. Did you mean {similar[0]!r}?" if similar else message)


def _make_region(
    models: Sequence[nn.Module],
    level: PrecisionLevel,
    device: str,
    op_lists: OpLists | None,
    cache_enabled: bool | None,
) -> autocast:
    """Return the autocast region of a level, which is disabled at levels that do not autocast."""
    dtype = level.compute if level.autocasts else None
    if device == "cpu" and level.autocasts and _has_half_norms(models):
        # A CPU's norms need inputs in the dtype of their weights, which a region does not cast.
        norms_in_fp32 = OpLists(fp32={"layer_norm", "group_norm"})
        op_lists = norms_in_fp32 if op_lists is None else norms_in_fp32 | op_lists
    return autocast(device, dtype, level.autocasts, cache_enabled, ops=op_lists)


def _has_half_norms(models: Sequence[nn.Module]) -> bool:
    """Return whether a model has a norm in half precision, such as one of a frozen base."""
    for model in models:
        for module in model.modules():
            if not isinstance(module, nn.LayerNorm | nn.GroupNorm):
                continue
            if any(param.dtype.itemsize == 2 for param in module.parameters(recurse=False)):
                return True
    return False


def _register_comm_hooks(
    models: Sequence[nn.Module], comm_hook: str | None, replicas: ProcessGroup | None
) -> tuple[CommHook, ...]:
    """Register the hook on every model, or return the hooks that the models have already."""
    hooks: list[CommHook] = []
    for model in models:
        if comm_hook is None:
            hook = hook_of(model)
        else:
            hook = register_comm_hook(model, comm_hook, replicas=replicas)
        if hook is not None:
            hooks.append(hook)
    return tuple(hooks)


def _apply_level(
    models: Sequence[nn.Module],
    wrappers: Sequence[WrapperInfo],
    level: PrecisionLevel,
    precisions: ModulePrecisions,
) -> None:
    """Set the precision of modules, and cast the models that FSDP does not cast itself."""
    for model, wrapper in zip(models, wrappers, strict=True):
        if wrapper.policies:
            apply_module_precisions(wrapper.inner, precisions, level.param)
            if not level.autocasts:
                cast_outputs_to_model_dtype(wrapper.inner, precisions, level.param)
        else:
            apply_level(wrapper.inner, level, precisions)
        if level.autocasts and type(model) is nn.DataParallel:
            # torch's replicas inherit that autocast is on, and not its dtype.
            model.__class__ = DataParallel


def _make_masters(
    optimizers: Sequence[torch.optim.Optimizer],
    wrappers: Sequence[WrapperInfo],
    level: PrecisionLevel,
) -> None:
    """Make the masters of every optimizer that has half-precision parameters, now or later."""
    # If FSDP casts by its own mixed precision, no optimizer ever has half-precision parameters.
    # Otherwise add_param_group may bring the first ones later.
    fsdp_casts = any(wrapper.policies for wrapper in wrappers)
    for optimizer in optimizers:
        has_half = any(param.dtype.itemsize == 2 for param in params_of(optimizer))
        if (has_half or not fsdp_casts) and masters_of(optimizer) is None:
            split = level.master_weights == "split"
            MasterParameters(optimizer, split=split, allow_empty=True)


def _warn_of_bf16_weights(
    optimizers: Sequence[torch.optim.Optimizer], process_group: ProcessGroup | None
) -> None:
    """Log a warning on the first rank if optimizers step bfloat16 weights without masters."""
    params: list[Tensor] = []
    for optimizer in optimizers:
        if masters_of(optimizer) is None:
            params += [param for param in params_of(optimizer) if param.requires_grad]
    count = sum(param.dtype is torch.bfloat16 for param in params)
    if count and (process_group is None or process_group.rank() == 0):
        _logger.warning(
            "%d trained weights are bfloat16 without float32 masters, so updates below half an "
            "ulp of a weight are lost, which often are all updates of a norm. Measure them by "
            "distamp.report.lost_updates(step, model, optimizer), or use bf16-O2.",
            count,
        )


def _loss_scale_of_level(
    loss_scale: LossScale | float | str | None, init_scale: float | None
) -> float | str | None:
    """Return the loss scale of the level for a ``loss_scale`` argument; None keeps the level's."""
    if isinstance(loss_scale, StaticLossScale):
        return _FIRST_SCALE if init_scale is None else init_scale
    return "dynamic" if isinstance(loss_scale, LossScale) else loss_scale


def _loss_scale_rule(
    level: PrecisionLevel, loss_scale: LossScale | float | str | None, init_scale: float | None
) -> tuple[LossScale, float]:
    """Return the rule that moves the loss scale of a level, and its first value.

    Raises:
        ConfigError: ``init_scale`` was given, and the loss scale is another constant.
    """
    if level.loss_scale == "dynamic":
        rule = loss_scale if isinstance(loss_scale, LossScale) else DynamicLossScale()
        return rule, _FIRST_SCALE if init_scale is None else init_scale
    if isinstance(loss_scale, StaticLossScale):
        return loss_scale, level.loss_scale
    if init_scale is not None:
        raise ConfigError(
            f"init_scale={init_scale:g} was given, and the loss scale of {level.name} is the "
            f"constant {level.loss_scale:g}. Pass loss_scale='dynamic' as well, or leave "
            "init_scale out."
        )
    return StaticLossScale(), level.loss_scale


def _as_tuple(name: str, value: Any, kind: type[_T]) -> tuple[_T, ...]:
    if value is None:
        return ()
    if isinstance(value, kind):
        return (value,)
    values: tuple[Any, ...] = (value,)
    is_single = isinstance(value, (nn.Module, torch.optim.Optimizer, str))
    if isinstance(value, Iterable) and not is_single:
        values = tuple(value)
    for item in values:
        if not isinstance(item, kind):
            order = ""
            if isinstance(item, (nn.Module, torch.optim.Optimizer)):
                order = " The model comes first: initialize(model, optimizer, level)."
            elif isinstance(item, str):
                order = " The level comes third: initialize(model, optimizer, level)."
            raise TypeError(f"{name} must be {_INSTANCES[kind]}, not {type(item).__name__}.{order}")
    return values


_INSTANCES: Mapping[type, str] = {
    nn.Module: "a torch.nn.Module or several",
    torch.optim.Optimizer: "a torch.optim.Optimizer, several or None",
}


#: The sentence that answers each argument of ``apex.amp.initialize`` or of a scaler.
_REPLACEMENTS = {
    "num_losses": "Leave it out, because all losses share one scale",
    "cast_model_type": "The level decides it: fp16-O2 and fp16-O3 cast the model to float16, "
    "bf16-O2 and bf16-O3 cast it to bfloat16",
    "patch_torch_functions": "Leave it out, because nothing is patched: fp16 casts inside "
    "amp.autocast()",
    "cast_model_outputs": "Pass level=PrecisionLevel.from_name(level).replace(output=dtype)",
    "enabled": "Pass level='fp32' to train in float32",
    "hard_override": "Leave it out, and pass overrides that agree with the level",
    "verbosity": "Leave it out, because nothing is printed. The loggers of distamp have levels",
    "min_loss_scale": "Pass loss_scale=DynamicLossScale(min_scale=...)",
    "max_loss_scale": "Pass loss_scale=DynamicLossScale(max_scale=...)",
    **{
        name: f"Pass loss_scale=DynamicLossScale({name}=...)"
        for name in ("growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale")
    },
}
