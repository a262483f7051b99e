"""What `initialize` refuses before it changes anything, each with what to do instead."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distamp.errors import SettingError
from distamp.initialize.casting import cast_as
from distamp.initialize.wrappers import (
    Wrapping,
    batchnorms_cast_by_wrapper,
    gathers_for_region,
    is_fsdp2,
)
from distamp.optimizers import parameters_of
from distamp.precision import Precision

__all__ = ["check_comm_hook", "check_models", "check_optimizers"]

_HALF = (torch.float16, torch.bfloat16)


def check_models(
    models: tuple[nn.Module, ...], wrappings: tuple[Wrapping, ...], precision: Precision
) -> None:
    """Refuse a model that cannot be trained at this level as it is.

    Raises:
        SettingError: See the text.
    """
    for model, wrapping in zip(models, wrappings, strict=True):
        _check_model(model, wrapping, precision)


def _check_model(model: nn.Module, wrapping: Wrapping, precision: Precision) -> None:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if wrapping.computes_in is not None:
        _check_casting_wrapper(model, wrapping, precision, dtypes)
    elif precision.casts_model:
        _check_cast(model, wrapping, precision)
    elif half := [dtype for dtype in _HALF if dtype in dtypes]:
        raise SettingError(
            f"{precision.level} trains float32 parameters and the model has some in {half[0]}; "
            "leave out model.half() or cast_model(), or take O2, whose model is cast"
        )


def _check_casting_wrapper(
    model: nn.Module, wrapping: Wrapping, precision: Precision, dtypes: set[torch.dtype]
) -> None:
    name, dtype = wrapping.name, wrapping.computes_in
    if precision.autocasts and gathers_for_region(model, precision):
        if any(d in _HALF for d in dtypes):
            raise SettingError(
                f"{precision.level} trains float32 parameters and the model has some in {dtype}; "
                f"leave out model.half() or cast_model(): {name} casts what it gathers by itself"
            )
        return  # gathered in the dtype that the region would cast it to
    if not precision.casts_model or dtype is not precision.param:
        raise SettingError(
            f"{name} casts parameters to {dtype} by its own mixed precision, and {precision.level} "
            f"has them in {precision.param}; leave the wrapper's setting out, or take "
            f"{_level_casting_to(dtype)}"
        )
    if any(d in _HALF for d in dtypes):
        raise SettingError(
            f"{name} casts parameters to {dtype} by its own mixed precision, and they are that "
            "already: nothing would be stepped in float32. Either leave its setting out after "
            "cast_model(), or leave cast_model() out"
        )
    if not precision.master_weights:
        raise SettingError(
            f"{name} keeps float32 parameters for the optimizer by its own mixed precision, and "
            f"{precision.level} as asked for has none; the order without them is "
            f"cast_model(model, ...), {name} without that setting, the optimizer, initialize"
        )
    if precision.keep_batchnorm_fp32 and (cast := batchnorms_cast_by_wrapper(model)):
        raise SettingError(
            f"{name} casts {_some(cast)} to {dtype} along with the rest, and {precision.level} "
            "keeps batch norms in float32; wrap each batch norm by itself first, without mixed "
            "precision, or pass keep_batchnorm_fp32=False"
        )


def _check_cast(model: nn.Module, wrapping: Wrapping, precision: Precision) -> None:
    cast = cast_as(wrapping.inner)
    if cast is None and wrapping.name in (None, "DataParallel"):
        return
    if cast is None:
        shards = wrapping.is_sharded
        hint = f", or give {wrapping.name} a mixed precision of {precision.param}" if shards else ""
        raise SettingError(
            f"{precision.level} casts the model to {precision.param}, and {wrapping.name} has laid "
            f"its parameters out already; the order is cast_model(model, {precision.level!r}), "
            f"{wrapping.name}, the optimizer, initialize{hint}"
        )
    if cast.param is not precision.param or cast.keep_batchnorm_fp32 != (
        precision.keep_batchnorm_fp32
    ):
        raise SettingError(
            f"the model was cast for {cast.level} (parameters {cast.param}, "
            f"keep_batchnorm_fp32={cast.keep_batchnorm_fp32}) and initialize was asked for "
            f"{precision.level} (parameters {precision.param}, "
            f"keep_batchnorm_fp32={precision.keep_batchnorm_fp32}); give both the same"
        )
    if precision.keep_batchnorm_fp32 and any(is_fsdp2(m) for m in model.modules()):
        mixed = [
            name
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm)
            and not is_fsdp2(module)
            and any(True for _ in module.parameters(recurse=False))
        ]
        if mixed:
            raise SettingError(
                f"{_some(mixed)} is float32 in a fully_shard group of {precision.param} "
                "parameters, which torch cannot reduce together; call fully_shard on each batch "
                "norm by itself first, or pass keep_batchnorm_fp32=False"
            )


def check_optimizers(
    models: tuple[nn.Module, ...],
    optimizers: tuple[torch.optim.Optimizer, ...],
    precision: Precision,
) -> None:
    """Refuse optimizers over parameters that no model has, as those made before a wrapper.

    Also those whose state would be float16 and whose ``eps`` float16 rounds to zero: Adam divides
    zero by zero then.

    Raises:
        SettingError: See the text.
    """
    known = {id(p) for model in models for p in model.parameters()}
    stepped = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
    left_out = [
        p for m in models for p in m.parameters() if p.requires_grad and id(p) not in stepped
    ]
    for number, optimizer in enumerate(optimizers):
        parameters = parameters_of(optimizer)
        strange = sum(id(p) not in known for p in parameters)
        # One beside the model is welcome, a learnable temperature for example; but not one in the
        # place of a parameter that no optimizer steps.
        if strange and (left_out or strange == len(parameters)):
            raise SettingError(
                f"{strange} of the {len(parameters)} parameters of optimizer {number} "
                f"({type(optimizer).__name__}) do not belong to the model; a wrapper that shards "
                "replaces parameters, so make the optimizer after it, from model.parameters()"
            )
        if precision.param is torch.float16 and not precision.master_weights:
            _check_eps(optimizer, precision)


def _check_eps(optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if eps and torch.tensor(float(eps), dtype=torch.float16) == 0:
            raise SettingError(
                f"{type(optimizer).__name__} has eps={eps:g}, which float16 rounds to zero, and "
                f"{precision.level} keeps the optimizer's state in float16: 0 / 0 would make "
                "parameters NaN. Pass eps=1e-3, or take O2"
            )


def check_comm_hook(
    wrappings: tuple[Wrapping, ...], comm_hook: str | None, replicas: object = None
) -> None:
    """Refuse a communication hook where nothing communicates, and replicas without a hook.

    Raises:
        SettingError: A model has no wrapper that reduces gradients, or it has replicas between
            which nothing would.
    """
    if comm_hook is None and replicas is not None:
        raise SettingError(
            "replicas= needs a communication hook to average them; comm_hook is None: pass "
            "comm_hook='fp16', or apply fully_shard with the whole mesh and leave replicas out"
        )
    for wrapping in wrappings:
        if comm_hook is not None and wrapping.name in (None, "DataParallel"):
            raise SettingError(
                f"comm_hook={comm_hook!r} needs a wrapper that reduces gradients between ranks; "
                "this model has none: wrap it in DistributedDataParallel or FSDP first, or leave "
                "comm_hook out"
            )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"batch norm {names[0]!r}{rest}"


def _level_casting_to(dtype: torch.dtype | None) -> str:
    return "O2" if dtype is torch.float16 else "bf16-O2"
