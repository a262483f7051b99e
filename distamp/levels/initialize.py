"""initialize: from a model, its optimizers and a level to something that trains."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distamp.autocast import DataParallel, OpLists, autocast
from distamp.comm_hooks.registration import hook_of, register_comm_hook
from distamp.errors import ConfigError
from distamp.guard import StepGuard
from distamp.levels.amp import Amp
from distamp.levels.casting import chosen_level, prepare
from distamp.levels.checks import check
from distamp.levels.kept import Pins, match_patterns, pin_all, return_model_dtype
from distamp.levels.rank_setup import (
    compare_setups,
    idle_optimizers,
    setup_of,
    unmatched_on_some,
)
from distamp.levels.wrappers import Wrapping, recognise
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
_logger = logging.getLogger("distamp.initialize")


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
    process_group: ProcessGroup | DeviceMesh | None = None,
    comm_hook: str | None = None,
    replicas: ProcessGroup | None = None,
    op_lists: OpLists | None = None,
    cache_enabled: bool | None = None,
    **unknown: object,
) -> Amp:
    """Prepare a model and its optimizers for training at a level of precision.

    Like ``apex.amp.initialize``, but in every layout and without patching: DDP, FSDP1, FSDP2,
    fairscale's ShardedDataParallel and DataParallel are recognised. A model that is plain or in
    DataParallel is cast in place. Under DDP, call `cast_model` before wrapping. Under FSDP, fp16-O2
    is its own mixed precision. Where it is otherwise, the error gives the right order.

    Collective: every rank of `process_group` must call this. With ``optimizers=None`` it sends
    nothing. A rank that refuses its arguments makes every rank raise.

    Args:
        model: The model that you call, wrapped or not; or several.
        optimizers: One or several, over parameters of the models. An empty list for a rank that
            trains nothing beside others that train, such as a frozen pipeline stage: it takes part
            in every message of `Amp.step`. None to only run the model; then nothing is sent.
        level: The level, as `PrecisionLevel.from_name` takes it, such as ``"bf16"``. There is no
            default.
        opt_level: Apex's name of ``level``.
        keep_batchnorm_fp32: As in Apex; None, here and below, for the level's own.
        master_weights: As in Apex; ``"split"`` for `MasterParameters` in half the memory.
        loss_scale: Replaces the loss scale of the level: a constant number, ``"dynamic"``, or a
            `LossScale` such as ``DynamicLossScale(growth_interval=500)``.
        module_precision: Modules in a precision of their own, as in `cast_model`: shell patterns
            over module names, without those of wrappers. Give both the same, and all ranks the
            same.
        init_scale: The first value of a dynamic loss scale.
        max_consecutive_skips: See `DistGradScaler`.
        process_group: The ranks that have a part of the models; see `DistGradScaler`.
        comm_hook: The wire format of gradients between the ranks, such as ``"fp16"``;
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
        RankMismatchError: Ranks have different patterns in ``module_precision``, or a rank does not
            call it.
        TypeError: An argument does not exist, or a model or an optimizer has another type.
        ValueError: The wrapper does not support this ``comm_hook``.

    Source: Apex's documentation of amp.initialize.
    """
    for name in unknown:
        raise _unexpected_argument(name)
    models = _as_tuple("model", model, nn.Module)
    stepped = _as_tuple("optimizers", optimizers, torch.optim.Optimizer)
    level = PrecisionLevel.from_name(
        chosen_level("initialize", level, opt_level, _LEVEL_EXAMPLE),
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=_loss_scale_of_level(loss_scale, init_scale),
        module_precision=module_precision,
    )
    loss_scale_rule, first_scale = _loss_scale_rule(level, loss_scale, init_scale)
    wrappings = tuple(map(recognise, models))
    if op_lists is not None and not level.autocasts:
        raise ConfigError(
            f"op_lists= lists the ops that autocast casts, and {level.name} casts none. Take fp16 "
            "or bf16, or choose modules by module_precision=."
        )
    pins, unmatched = match_patterns(models, level)
    device, refused = "", None
    try:
        device = check(models, wrappings, stepped, level, pins, comm_hook, replicas, op_lists)
    except Exception as error:
        refused = error
    mine = setup_of(level.pins, unmatched, stepped, refused)
    setups = compare_setups(
        mine, refused, resolve_process_group(process_group), optimizers is not None
    )
    settings: dict[str, Any] = {
        "process_group": process_group,
        "max_consecutive_skips": max_consecutive_skips,
        "named_parameters": [
            pair for m in models for pair in (*m.named_parameters(), *m.named_buffers())
        ],
    }
    fp16_grads: Any = "inplace" if level.casts_model else "error"
    scaler: DistGradScaler | StepGuard = (
        DistGradScaler(
            device,
            first_scale,
            loss_scale=loss_scale_rule,
            fp16_grads="master" if level.master_weights else fp16_grads,
            **settings,
        )
        if level.scales
        else StepGuard(**settings)
    )
    idle = () if stepped else idle_optimizers(setups, device)
    scaler.register_optimizers(*stepped, *idle)
    dtype = level.compute if level.autocasts else None
    lists = _lists_of(models, op_lists) if device == "cpu" and level.autocasts else op_lists
    region = autocast(device, dtype, level.autocasts, cache_enabled, ops=lists)
    # Before masters are made, as it may refuse.
    hooks = tuple(
        hook_of(each)
        if comm_hook is None
        else register_comm_hook(each, comm_hook, replicas=replicas)
        for each in models
    )
    _change(models, wrappings, stepped, level, pins)
    made = tuple(state for state in hooks if state is not None)
    for state in made if scaler.is_enabled() else ():
        scaler.attach_comm_hook(state)
    # A hook averages copies of shards, of which their mesh says nothing.
    shard_group_fn = None if replicas is None else lambda p: getattr(p, "device_mesh", None)
    lines = unmatched_on_some(setups)
    for line in lines:
        _logger.info(line)
    return Amp(models, stepped, level, scaler, region, made, shard_group_fn, idle, lines)


def _unexpected_argument(name: str) -> TypeError:
    """Return the error for a keyword argument that `initialize` does not have."""
    message = f"initialize() got an unexpected keyword argument {name!r}"
    if name in _REPLACEMENTS:
        return TypeError(f"{message}. {_REPLACEMENTS[name]}")
    similar = difflib.get_close_matches(name, inspect.signature(initialize).parameters, n=1)
    return TypeError(f"{message}. Did you mean {similar[0]!r}?" if similar else message)


def _lists_of(models: Sequence[nn.Module], op_lists: OpLists | None) -> OpLists | None:
    """Return the lists of a CPU's region; with norms in fp32, as for CUDA, where kernels need it.

    They take weights in half precision, as a frozen base has them, with inputs of that dtype alone.
    """
    norms = (
        m for each in models for m in each.modules() if isinstance(m, nn.LayerNorm | nn.GroupNorm)
    )
    half = any(p.dtype.itemsize == 2 for norm in norms for p in norm.parameters(recurse=False))
    return (
        OpLists(fp32={"layer_norm", "group_norm"}) | (op_lists or OpLists()) if half else op_lists
    )


def _change(
    models: Sequence[nn.Module],
    wrappings: Sequence[Wrapping],
    optimizers: Sequence[torch.optim.Optimizer],
    level: PrecisionLevel,
    pins: Pins,
) -> None:
    """Set the precision of modules, cast plain models, and make masters of half precision."""
    for model, wrapping in zip(models, wrappings, strict=True):
        if wrapping.policies:
            pin_all(wrapping.inner, pins, level.param)
            if not level.autocasts:
                return_model_dtype(wrapping.inner, pins, level.param)
        else:
            prepare(wrapping.inner, level, pins)
        if level.autocasts and type(model) is nn.DataParallel:
            # torch's replicas know whether autocast is on, and not in which dtype.
            model.__class__ = DataParallel
    if not level.master_weights:
        return
    # Where FSDP casts by its own mixed precision, no optimizer ever holds half precision. Elsewhere
    # add_param_group may bring the first half-precision parameters later.
    cast = not any(wrapping.policies for wrapping in wrappings)
    for optimizer in optimizers:
        half = any(p.dtype.itemsize == 2 for p in params_of(optimizer))
        if (half or cast) and masters_of(optimizer) is None:
            split = level.master_weights == "split"
            MasterParameters(optimizer, split=split, allow_empty=True)


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
