"""initialize: from a model, its optimizers and a level to something that trains."""

from __future__ import annotations

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
from distamp.groups import resolve
from distamp.guard import StepGuard
from distamp.levels.amp import Amp
from distamp.levels.casting import prepare
from distamp.levels.checks import check
from distamp.levels.kept import Pins, match_patterns, pin_all, return_model_dtype
from distamp.levels.rank_setup import (
    compare_setups,
    idle_optimizers,
    setup_of,
    unmatched_on_some,
)
from distamp.levels.wrappers import Wrapping, recognise
from distamp.optimizers import parameters_of
from distamp.precision_level import PrecisionLevel
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
_logger = logging.getLogger("distamp.initialize")


def initialize(
    model: nn.Module | Sequence[nn.Module],
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    opt_level: str | PrecisionLevel = "fp16",
    *,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | Literal["split"] | None = None,
    loss_scale: float | str | None = None,
    module_precision: Mapping[str, str] | None = None,
    init_scale: float | None = None,
    schedule: LossScale | None = None,
    max_consecutive_skips: int | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    comm_hook: str | None = None,
    replicas: ProcessGroup | None = None,
    ops: OpLists | None = None,
    cache_enabled: bool | None = None,
    **apex: object,
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
        opt_level: A name in ``distamp.levels.LEVELS``, or a `PrecisionLevel`.
        keep_batchnorm_fp32: As in Apex; None, here and below, for the level's own.
        master_weights: As in Apex; ``"split"`` for `MasterParameters` in half the memory.
        loss_scale: As in Apex: a number or ``"dynamic"``.
        module_precision: Modules in a precision of their own, as in `cast_model`: shell patterns
            over module names, without those of wrappers. Give both the same, and all ranks the
            same.
        init_scale: The first loss scale, where it is dynamic.
        schedule: How a dynamic loss scale moves.
        max_consecutive_skips: See `DistGradScaler`.
        process_group: The ranks that have a part of the models; see `DistGradScaler`.
        comm_hook: The wire format of gradients between the ranks, such as ``"fp16"``;
            see ``distamp.comm_hooks.register_comm_hook``.
        replicas: With ``comm_hook``, for FSDP2 over only the shard dimension of a mesh: the ranks
            that have the same shard, between which the hook averages too.
        ops: Of the autocast region, as in `autocast`.
        cache_enabled: Of the autocast region, as in `autocast`.
        apex: Apex's other arguments, and a scaler's, which raise with what to use instead.

    Raises:
        ConfigError: The level does not exist, overrides contradict it, or the model, its wrapper
            or an optimizer does not fit it. The message gives the correction.
        RankMismatchError: Ranks have different patterns in ``precision``, or a rank does not come.
        TypeError: There is no such argument.
        ValueError: The wrapper does not support this ``comm_hook``.

    Source: Apex's documentation of amp.initialize.
    """
    for name in apex:
        hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise TypeError(f"initialize() got an unexpected keyword argument {name!r}{hint}")
    level = PrecisionLevel.from_name(
        opt_level,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        module_precision=module_precision,
    )
    models = _several("model", model, nn.Module)
    stepped = _several("optimizers", optimizers, torch.optim.Optimizer)
    wrappings = tuple(map(recognise, models))
    if ops is not None and not level.autocasts:
        raise ConfigError(
            f"ops= lists what autocast casts, and {level.name} casts nothing op by op; take fp16 "
            "or "
            "bf16, or name modules by module_precision="
        )
    pins, unmatched = match_patterns(models, level)
    device, refused = "", None
    try:
        device = check(models, wrappings, stepped, level, pins, comm_hook, replicas, ops)
    except Exception as error:
        refused = error
    mine = setup_of(level.pins, unmatched, stepped, refused)
    setups = compare_setups(mine, refused, resolve(process_group), optimizers is not None)
    settings: dict[str, Any] = {
        "process_group": process_group,
        "max_consecutive_skips": max_consecutive_skips,
        "named_parameters": [
            pair for m in models for pair in (*m.named_parameters(), *m.named_buffers())
        ],
    }
    moving, first = _schedule(level, schedule, init_scale)
    fp16_grads: Any = "inplace" if level.casts_model else "error"
    scaler: DistGradScaler | StepGuard = (
        DistGradScaler(
            device,
            first,
            loss_scale=moving,
            fp16_grads="master" if level.master_weights else fp16_grads,
            **settings,
        )
        if level.scales
        else StepGuard(**settings)
    )
    idle = () if stepped else idle_optimizers(setups, device)
    scaler.register_optimizers(*stepped, *idle)
    dtype = level.compute if level.autocasts else None
    lists = _lists_of(models, ops) if device == "cpu" and level.autocasts else ops
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


def _lists_of(models: Sequence[nn.Module], ops: OpLists | None) -> OpLists | None:
    """Return the lists of a CPU's region; with norms in fp32, as for CUDA, where kernels need it.

    They take weights in half precision, as a frozen base has them, with inputs of that dtype alone.
    """
    norms = (
        m for each in models for m in each.modules() if isinstance(m, nn.LayerNorm | nn.GroupNorm)
    )
    half = any(p.dtype.itemsize == 2 for norm in norms for p in norm.parameters(recurse=False))
    return OpLists(fp32={"layer_norm", "group_norm"}) | (ops or OpLists()) if half else ops


def _change(
    models: Sequence[nn.Module],
    wrappings: Sequence[Wrapping],
    optimizers: Sequence[torch.optim.Optimizer],
    level: PrecisionLevel,
    pins: Pins,
) -> None:
    """Pin modules, cast models that no wrapper has laid out, make masters of what is then half."""
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
        half = any(p.dtype.itemsize == 2 for p in parameters_of(optimizer))
        if (half or cast) and masters_of(optimizer) is None:
            split = level.master_weights == "split"
            MasterParameters(optimizer, split=split, allow_empty=True)


def _schedule(
    level: PrecisionLevel, schedule: LossScale | None, init_scale: float | None
) -> tuple[LossScale, float]:
    if level.loss_scale == "dynamic":
        return schedule or DynamicLossScale(), 2.0**16 if init_scale is None else init_scale
    if schedule is not None or init_scale is not None:
        name = "schedule" if schedule is not None else "init_scale"
        raise ConfigError(
            f"{name} was given, and the loss scale of {level.name} is the constant "
            f"{level.loss_scale:g}; pass loss_scale='dynamic' too, or leave {name} out"
        )
    return StaticLossScale(), level.loss_scale


def _several(name: str, given: Any, kind: type[_T]) -> tuple[_T, ...]:
    if given is None:
        return ()
    if isinstance(given, kind):
        return (given,)
    is_one = isinstance(given, (nn.Module, torch.optim.Optimizer, str))
    several = tuple(given) if isinstance(given, Iterable) and not is_one else (given,)
    for each in several:
        if not isinstance(each, kind):
            order = ""
            if isinstance(each, (nn.Module, torch.optim.Optimizer)):
                order = " The model comes first: initialize(model, optimizer, level)."
            elif isinstance(each, str):
                order = " The level comes third: initialize(model, optimizer, level)."
            raise TypeError(f"{name} must be {_INSTANCES[kind]}, not {type(each).__name__}.{order}")
    return several


_INSTANCES: Mapping[type, str] = {
    nn.Module: "a torch.nn.Module or several",
    torch.optim.Optimizer: "a torch.optim.Optimizer, several or None",
}


_ELSEWHERE = {
    "num_losses": "leave it out: all losses share one scale",
    "cast_model_type": "choose it by the level: fp16-O2 and fp16-O3 cast the model to float16, "
    "bf16-O2 and "
    "bf16-O3 to bfloat16",
    "patch_torch_functions": "nothing is patched: fp16 casts inside amp.autocast()",
    "cast_model_outputs": "pass opt_level=PrecisionLevel.from_name(level).replace(output=dtype)",
    "enabled": "pass opt_level='fp32'",
    "hard_override": "a contradiction cannot be overridden",
    "verbosity": "nothing is printed",
    "min_loss_scale": "pass schedule=DynamicLossScale(min_scale=...)",
    "max_loss_scale": "pass schedule=DynamicLossScale(max_scale=...)",
    **{
        name: f"pass schedule=DynamicLossScale({name}=...)"
        for name in ("growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale")
    },
}
