"""What `initialize` refuses before it changes anything, each with what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from distamp.autocast import OpLists
from distamp.autocast.module_precision import get_module_precision
from distamp.autocast.op_kernels import CastPolicy
from distamp.errors import ConfigError
from distamp.fsdp_unit import FSDPUnit
from distamp.levels.casting import O2_OF, cast_as, check_cast_before, check_frozen
from distamp.levels.float8 import check_kernels
from distamp.levels.kept import Pins
from distamp.levels.wrappers import (
    FSDP1,
    FSDP2,
    Wrapping,
    casting_units,
    compute_device,
    units_of,
)
from distamp.masters import masters_of
from distamp.masters.optimizer_checks import check_no_other_param_refs, check_not_zero_optimizer
from distamp.module_names import module_names
from distamp.optim_utils import params_of
from distamp.precision_level import PrecisionLevel

__all__ = ["check", "check_trained"]

# What FSDP calls its own mixed precision.
_SETTINGS = {
    FSDP2: "mp_policy=MixedPrecisionPolicy(param_dtype={})",
    FSDP1: "mixed_precision=MixedPrecision(param_dtype={})",
}


def check(
    models: Sequence[nn.Module],
    wrappings: Sequence[Wrapping],
    optimizers: Sequence[torch.optim.Optimizer],
    level: PrecisionLevel,
    pins: Pins,
    comm_hook: str | None,
    replicas: object,
    ops: OpLists | None,
) -> str:
    """Refuse what cannot be trained at this level as it is; return the models' device type.

    Raises:
        ConfigError: See the texts.
    """
    device = next(filter(None, map(compute_device, models)), None)
    if device is None:
        raise ConfigError("initialize needs a model with parameters: there is nothing to train")
    if device.type == "meta":
        raise ConfigError(
            "the model is on 'meta' and has no values yet; materialise it first, by "
            "model.to_empty(device=...) and its initialisation or a checkpoint, then initialize"
        )
    _check_optimizers(models, optimizers, level)
    if level.master_weights and not any(wrapping.policies for wrapping in wrappings):
        for optimizer in optimizers:
            check_no_other_param_refs(optimizer)
    if level.float8 is not None:
        _check_ops(level, ops)
        check_kernels(models, device, level)
    for model, wrapping in zip(models, wrappings, strict=True):
        _check_model(model, wrapping, level, pins)
    _check_comm_hook(wrappings, comm_hook, replicas)
    return device.type


def _check_ops(level: PrecisionLevel, ops: OpLists | None) -> None:
    lower = CastPolicy.LOWER_PRECISION
    found = lower if ops is None else ops.by_op().get("mm", lower)
    if found is not lower:
        raise ConfigError(
            f"ops lists matrix products as {found.value}, and at {level.name} linear layers "
            "compute them in float8; leave linear out, or pin layers: module_precision={'name': "
            "'fp32'}"
        )


def _check_model(model: nn.Module, wrapping: Wrapping, level: PrecisionLevel, pins: Pins) -> None:
    check_frozen(model, level)
    cast = cast_as(wrapping.inner)
    if wrapping.policies:
        check_trained(model, wrapping, level)
        _check_policies(model, wrapping, level)
    if cast is not None or (level.changes_model and not wrapping.policies):
        _check_cast(wrapping, level)
    check_trained(model, wrapping, level)
    _check_pins(model, wrapping, pins)
    if wrapping.name == FSDP2:
        _check_units(model)


def check_trained(model: nn.Module, wrapping: Wrapping, level: PrecisionLevel) -> None:
    """Refuse trained parameters in half precision, unless the level casts them itself.

    Raises:
        ConfigError: The model has such parameters.
    """
    if level.casts_model and not wrapping.policies:
        return
    trained = [(name, p.dtype) for name, p in model.named_parameters() if p.requires_grad]
    half = [(name, dtype) for name, dtype in trained if dtype in O2_OF]
    if not half:
        return
    name, dtype = half[0]
    if wrapping.policies:
        raise ConfigError(
            f"{wrapping.name} casts float32 parameters by its own mixed precision, and the model "
            f"has some in {dtype}, first {name}, so nothing would be stepped in float32; leave "
            "out model.half() or cast_model()"
        )
    raise ConfigError(
        f"{level.name} trains float32 parameters and the model has some in {dtype}, first "
        f"{name}; leave out model.half(), or make those float32 by .float() of their module "
        f"(peft's modules_to_save), or take {O2_OF[dtype]}, whose model is cast; what stays "
        "frozen, as the base under adapters, may be in any dtype: requires_grad_(False)"
    )


def _check_policies(model: nn.Module, wrapping: Wrapping, level: PrecisionLevel) -> None:
    """Refuse FSDP's mixed precision where it is not what the level does."""
    name, level_name = wrapping.name, level.name
    if level.autocasts and wrapping.policies == {(level.compute, level.reduce)}:
        return  # gathered in the dtype that the region would cast it to
    dtypes = {dtype for dtype, _ in wrapping.policies}
    if not level.master_weights or dtypes != {level.param}:
        raise ConfigError(
            f"{name} computes in {', '.join(map(str, dtypes))} and keeps float32 parameters by its "
            f"own mixed precision, and {level_name} computes in {level.compute} with parameters in "
            f"{level.param} and gradients reduced in {level.reduce}; leave that setting "
            f"out, or take {'fp16-O2' if torch.float16 in dtypes else 'bf16-O2'}"
        )
    if name == FSDP2:
        _check_output_dtypes(model, level)
    units = casting_units(model)
    norms = {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.affine}
    cast = [name for name, norm in norms.items() if units[norm] is not None]
    if level.keep_batchnorm_fp32 and cast:
        raise ConfigError(
            f"{name} casts batch norm {cast[0]!r} to {level.param} with the modules around it "
            f"({len(cast)} in all), and {level_name} keeps batch norms in float32; wrap each batch "
            "norm by itself first, without mixed precision, or pass keep_batchnorm_fp32=False"
        )


def _check_output_dtypes(model: nn.Module, level: PrecisionLevel) -> None:
    """Refuse a unit inside of another whose outputs the modules of the outer one cannot take.

    FSDP2 casts what goes into a unit, and nothing between the modules that share one. An embedding
    takes no floating input.
    """
    units = units_of(model)
    takes_inputs: dict[nn.Module | None, nn.Module] = {}
    for module, unit in casting_units(model).items():
        has_weights = any(True for _ in module.parameters(recurse=False))
        if has_weights and not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            takes_inputs.setdefault(unit, module)
    takes_inputs.pop(None, None)
    around: dict[nn.Module, nn.Module | None] = {}
    for module, unit in units.items():
        for child in module.children():
            if units[child] is child:
                around[child] = unit
    for unit, outer in around.items():
        dtype = FSDPUnit(unit).output_dtype
        if dtype in (None, level.param) or outer not in takes_inputs:
            continue
        names = module_names(model)
        raise ConfigError(
            f"fully_shard casts the outputs of {names[unit]!r} to {dtype} "
            f"(output_dtype of its policy), and {names[takes_inputs[outer]]!r}, which belongs to "
            f"the unit around it, computes in {level.param} and is given no cast. Pass "
            "output_dtype to the root alone: MixedPrecisionPolicy(param_dtype="
            f"{level.param}) for every other unit."
        )


def _check_units(model: nn.Module) -> None:
    """Refuse a unit that trains parameters of several dtypes, as the first forward pass would."""
    held: dict[nn.Module | None, dict[torch.dtype, nn.Module]] = {}
    for module, unit in units_of(model).items():
        trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
        held.setdefault(unit, {}).update((p.dtype, module) for p in trained)
    held.pop(None, None)
    for dtypes in held.values():
        if len(dtypes) > 1:
            kept = dtypes.get(torch.float32, next(iter(dtypes.values())))
            raise ConfigError(
                f"a unit of fully_shard trains parameters in {' and '.join(map(str, dtypes))}, and "
                f"takes one dtype; call fully_shard first on what stays as it is, such as "
                f"{module_names(model)[kept]!r}"
            )


def _check_pins(model: nn.Module, wrapping: Wrapping, pins: Pins) -> None:
    """Refuse modules pinned to float32 that FSDP's mixed precision would compute otherwise.

    FSDP1 has views of a flat parameter in place of weights, which cannot be taken in float32; and
    a unit inside of a pinned module casts what it is given.
    """
    fp32 = {module for module, pin in pins.items() if pin.startswith("fp32")}
    fp32 |= {
        m for m in model.modules() if (p := get_module_precision(m)) and p.dtype is torch.float32
    }
    units = casting_units(model)
    for module in filter(fp32.__contains__, units):
        inside = {units[each] for each in module.modules()} - {None}
        if wrapping.name == FSDP2:
            inside -= {units[module]}
        if inside:
            raise ConfigError(
                f"{module_names(model)[module]!r} is to compute in fp32, and {wrapping.name} "
                "gathers its weights in another dtype; wrap the module by itself, as one unit and "
                "without mixed precision, before what is around it"
            )


def _check_cast(wrapping: Wrapping, level: PrecisionLevel) -> None:
    """Refuse a model that was not changed before it was wrapped, or for another level."""
    name, level_name, cast = wrapping.name, level.name, cast_as(wrapping.inner)
    # Masters are of parameters that stay in place: FSDP1's do not.
    if level.master_weights and name in _SETTINGS and (cast is None or name == FSDP1):
        without = "" if cast is None else "leave out cast_model() and "
        or_cast = ", or call cast_model() before it" if name == FSDP2 else ""
        raise ConfigError(
            f"{level_name} over {name} is its own mixed precision over float32 parameters, and it "
            f"was given none: {without}pass {name} {_SETTINGS[name].format(level.param)}{or_cast}"
        )
    if cast is None and (level.float8_all_gather or name not in (None, "DataParallel")):
        change = "layers to float8" if level.float8 else f"the model to {level.param}"
        raise ConfigError(
            f"{level_name} casts {change}, and {name or 'the optimizer'} has its parameters "
            f"already; the order is cast_model(model, {level_name!r}), {name or FSDP2}, the "
            "optimizer, initialize"
        )
    check_cast_before(wrapping.inner, level)


def _check_optimizers(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    level: PrecisionLevel,
) -> None:
    """Refuse optimizers over parameters that no model has, as those made before a wrapper.

    Also those that would need masters of parameters which other ranks step, and those whose state
    would be float16 and whose ``eps`` float16 rounds to zero: Adam divides zero by zero then.
    """
    trained = [p for model in models for p in model.parameters()]
    known = set(map(id, trained))
    stepped = {id(p) for optimizer in optimizers for p in params_of(optimizer)}
    left_out = any(p.requires_grad and id(p) not in stepped for p in trained)
    for number, optimizer in enumerate(optimizers):
        kind, parameters = type(optimizer).__name__, params_of(optimizer)
        if masters_of(optimizer) is not None:
            raise ConfigError(
                f"optimizer {number} ({kind}) has master parameters already, because initialize or "
                "MasterParameters was called with it before. Use the Amp that the first initialize "
                "returned, or make a new model and a new optimizer."
            )
        strange = sum(id(p) not in known for p in parameters)
        # One beside the model is welcome, a learnable temperature for example; but not one in the
        # place of a parameter that no optimizer steps.
        if strange and (left_out or strange == len(parameters)):
            raise ConfigError(
                f"{strange} of the {len(parameters)} parameters of optimizer {number} ({kind}) do "
                "not belong to the model as it is now; a wrapper that shards replaces parameters, "
                "so make the optimizer after it, from model.parameters(), and call initialize "
                "before the first forward pass"
            )
        if level.master_weights:
            check_not_zero_optimizer(optimizer)
        given = tree_leaves([group.get("eps") for group in optimizer.param_groups])
        eps = min(filter(None, given), default=1)  # Adafactor has a tuple
        steps_half = level.param is torch.float16 and not level.master_weights
        if steps_half and torch.tensor(float(eps), dtype=torch.float16) == 0:
            raise ConfigError(
                f"{kind} has eps={eps:g}, which float16 rounds to zero, and {level.name} "
                "keeps the optimizer's state in float16: 0 / 0 would make parameters NaN. Pass "
                "eps=1e-3, or take fp16-O2"
            )


def _check_comm_hook(
    wrappings: Sequence[Wrapping], comm_hook: str | None, replicas: object
) -> None:
    """Refuse a communication hook where nothing communicates, and replicas without a hook."""
    if comm_hook is None and replicas is not None:
        raise ConfigError(
            "replicas= needs a communication hook to average them; comm_hook is None: pass "
            "comm_hook='fp16', or apply fully_shard with the whole mesh and leave replicas out"
        )
    if comm_hook is not None and any(w.name in (None, "DataParallel") for w in wrappings):
        raise ConfigError(
            f"comm_hook={comm_hook!r} needs a wrapper that reduces gradients between ranks, and a "
            "model has none: wrap it in DistributedDataParallel or FSDP first, or leave comm_hook "
            "out"
        )
