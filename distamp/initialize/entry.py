"""initialize: from a model, its optimizers and a level to something that trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import nn
from torch.distributed import ProcessGroup

from distamp.autocast import OpLists, autocast, bind
from distamp.comm_hooks import CommHookState, register
from distamp.errors import SettingError
from distamp.initialize.amp import Amp
from distamp.initialize.casting import cast_as, cast_model
from distamp.initialize.checks import check_comm_hook, check_models, check_optimizers
from distamp.initialize.wrappers import Wrapping, recognise
from distamp.optimizers import parameters_of
from distamp.precision import Precision
from distamp.scaler import (
    DistGradScaler,
    DynamicSchedule,
    MasterParameters,
    Schedule,
    StaticSchedule,
    masters_of,
)
from distamp.scaler.groups import GroupLike

__all__ = ["Overrides", "initialize"]


class Overrides(TypedDict, total=False):
    """Keyword arguments of `initialize` besides the level."""

    keep_batchnorm_fp32: bool | str | None
    master_weights: bool | None
    loss_scale: float | str | None
    num_losses: int
    init_scale: float
    schedule: Schedule | None
    max_consecutive_skips: int | None
    ops: OpLists | None
    cache_enabled: bool | None


def initialize(
    model: nn.Module | Sequence[nn.Module],
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    opt_level: str | Precision = "O1",
    *,
    process_group: GroupLike = None,
    comm_hook: str | None = None,
    replicas: ProcessGroup | None = None,
    **overrides: Unpack[Overrides],
) -> Amp:
    """Prepare a model and its optimizers for training at a level of precision.

    Like ``apex.amp.initialize``, but in every layout and without patching: DDP, FSDP1, FSDP2,
    fairscale's wrappers and DataParallel are recognised. A model that is plain or in DataParallel
    is cast in place. For any other wrapper, call `cast_model` before wrapping; if not, the error
    gives the right order.

    Args:
        model: The model that you call, wrapped or not; or several.
        optimizers: One or several, over parameters of the models; None to only run the model.
        opt_level: A name in ``distamp.precision.LEVELS``, or a `Precision`.
        process_group: The ranks that have a part of the models; see `DistGradScaler`.
        comm_hook: The wire format of gradients between the ranks, such as ``"fp16"``;
            see ``distamp.comm_hooks.register``. The scaler then learns of overflows from them.
        replicas: With ``comm_hook``, for FSDP2 over only the shard dimension of a mesh: the ranks
            that have the same shard, between which the hook averages too.
        overrides: ``keep_batchnorm_fp32``, ``master_weights`` and ``loss_scale`` (a number or
            ``"dynamic"``) as in Apex, or None for the level's default; ``num_losses`` as in Apex,
            but they share one scale; ``init_scale``, ``schedule`` and ``max_consecutive_skips`` of
            the scaler; ``ops`` and ``cache_enabled`` of the autocast region.

    Raises:
        SettingError: The level does not exist, overrides contradict it, or the model, its wrapper
            or an optimizer does not fit it. The message gives the correction.
        TypeError: There is no such override.
        ValueError: The wrapper does not support this ``comm_hook``.

    Source: Apex's documentation of amp.initialize.
    """
    precision = _precision(opt_level, overrides)
    models = _several("model", model, nn.Module)
    to_step = _several("optimizers", optimizers, torch.optim.Optimizer)
    if not models:
        raise SettingError("initialize needs at least one model")
    wrappings = tuple(map(recognise, models))
    check_models(models, wrappings, precision)
    check_optimizers(models, to_step, precision)
    check_comm_hook(wrappings, comm_hook, replicas)
    scaler = _scaler(precision, models, process_group, overrides)
    region = _region(precision, models, overrides)
    _prepare(models, wrappings, precision)
    hooks = _attach_hooks(models, comm_hook, replicas, scaler)
    if precision.master_weights:
        _make_masters(to_step)
    return Amp(models, wrappings, to_step, precision, scaler, region, hooks)


def _precision(opt_level: str | Precision, overrides: Overrides) -> Precision:
    _refuse_unknown(overrides)
    return Precision.of(
        opt_level,
        keep_batchnorm_fp32=overrides.get("keep_batchnorm_fp32"),
        master_weights=overrides.get("master_weights"),
        loss_scale=overrides.get("loss_scale"),
    )


def _region(precision: Precision, models: tuple[nn.Module, ...], overrides: Overrides) -> autocast:
    return autocast(
        _device_of(models).type,
        precision.compute if precision.autocasts else None,
        enabled=precision.autocasts,
        cache_enabled=overrides.get("cache_enabled"),
        ops=overrides.get("ops"),
    )


def _prepare(
    models: tuple[nn.Module, ...], wrappings: tuple[Wrapping, ...], precision: Precision
) -> None:
    for model, wrapping in zip(models, wrappings, strict=True):
        plain = wrapping.computes_in is None and cast_as(wrapping.inner) is None
        if precision.casts_model and plain:
            cast_model(wrapping.inner, precision)
        if precision.autocasts and wrapping.name == "DataParallel":
            # torch's replicas know whether autocast is on, and not in which dtype.
            bind(model)


def _attach_hooks(
    models: tuple[nn.Module, ...],
    comm_hook: str | None,
    replicas: ProcessGroup | None,
    scaler: DistGradScaler,
) -> tuple[CommHookState, ...]:
    if comm_hook is None:
        return ()
    states = tuple(register(model, comm_hook, replicas=replicas) for model in models)
    if scaler.is_enabled():
        for state in states:
            scaler.attach(state)
    return states


def _make_masters(optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    for optimizer in optimizers:
        half = any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters_of(optimizer))
        if half and masters_of(optimizer) is None:
            MasterParameters(optimizer)


def _scaler(
    precision: Precision,
    models: tuple[nn.Module, ...],
    process_group: GroupLike,
    overrides: Overrides,
) -> DistGradScaler:
    schedule, init_scale = _schedule(precision, overrides)
    _check_count(overrides.get("num_losses", 1))
    return DistGradScaler(
        _device_of(models).type,
        init_scale=init_scale,
        schedule=schedule,
        enabled=precision.scales,
        process_group=process_group,
        fp16_grads=_unscaling(precision),
        max_consecutive_skips=overrides.get("max_consecutive_skips"),
        named_parameters=[pair for model in models for pair in model.named_parameters()],
    )


def _unscaling(precision: Precision) -> Literal["error", "inplace", "master"]:
    if precision.master_weights:
        return "master"
    return "inplace" if precision.casts_model else "error"


def _schedule(precision: Precision, overrides: Overrides) -> tuple[Schedule, float]:
    given, init_scale = overrides.get("schedule"), overrides.get("init_scale")
    if precision.loss_scale == "dynamic":
        return given or DynamicSchedule(), 2.0**16 if init_scale is None else init_scale
    if given is not None or init_scale is not None:
        name = "schedule" if given is not None else "init_scale"
        raise SettingError(
            f"{name} was given, and the loss scale of {precision.level} is the constant "
            f"{precision.loss_scale:g}; pass loss_scale='dynamic' too, or leave {name} out"
        )
    return StaticSchedule(), float(precision.loss_scale)


def _several(name: str, given: Any, kind: type) -> tuple[Any, ...]:
    several = () if given is None else (given,) if isinstance(given, kind) else tuple(given)
    for each in several:
        if not isinstance(each, kind):
            raise TypeError(
                f"{name} must be a {kind.__name__} or several, not {type(each).__name__}"
            )
    return several


def _device_of(models: tuple[nn.Module, ...]) -> torch.device:
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    raise SettingError("the model has no parameters, so there is nothing to train")


def _check_count(count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise SettingError(f"num_losses must be an integer >= 1, not {count!r}")


_APEX = {
    "cast_model_type": "choose it by the level: O2 and O3 cast the model to float16, bf16-O2 and "
    "bf16-O3 to bfloat16",
    "patch_torch_functions": "nothing is patched: O1 casts inside amp.autocast()",
    "cast_model_outputs": "pass opt_level=Precision.of(level).replaced(output=dtype)",
    "enabled": "pass opt_level='O0'",
    "hard_override": "a contradiction cannot be overridden",
    "verbosity": "nothing is printed",
    "min_loss_scale": "pass schedule=DynamicSchedule(min_scale=...)",
    "max_loss_scale": "pass schedule=DynamicSchedule(max_scale=...)",
}


def _refuse_unknown(overrides: Overrides) -> None:
    for name in overrides:
        if name not in Overrides.__annotations__:
            known = ", ".join(Overrides.__annotations__)
            hint = f"Apex's {name}: {_APEX[name]}" if name in _APEX else f"it takes {known}"
            raise TypeError(f"initialize() got an unexpected argument {name!r}; {hint}")
