"""The checks of `initialize` before it changes anything. Each error gives the correction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from distamp.autocast import OpLists
from distamp.autocast.op_kernels import CastPolicy
from distamp.errors import ConfigError
from distamp.fsdp_unit import FSDPUnit
from distamp.levels.casting import (
    MASTER_LEVELS,
    applied_level,
    check_applied_level,
    check_frozen,
)
from distamp.levels.float8 import check_device_support
from distamp.levels.fp32_modules import ModulePrecisions, is_fp32_module
from distamp.levels.wrappers import (
    DATA_PARALLEL,
    FSDP1,
    FSDP2,
    WrapperInfo,
    casting_fsdp_unit_by_module,
    compute_device,
    fsdp_unit_by_module,
)
from distamp.linear_recipe import LINEAR_RECIPES
from distamp.masters import masters_of
from distamp.masters.optimizer_checks import check_no_other_param_refs, check_not_zero_optimizer
from distamp.module_names import module_names
from distamp.optim_utils import params_of
from distamp.precision_level import PrecisionLevel

__all__ = ["check_trained", "validate"]

# The spelling of FSDP's own mixed precision.
_POLICY_ARGUMENTS = {
    FSDP2: "mp_policy=MixedPrecisionPolicy(param_dtype={})",
    FSDP1: "mixed_precision=MixedPrecision(param_dtype={})",
}


def validate(
    models: Sequence[nn.Module],
    wrappers: Sequence[WrapperInfo],
    optimizers: Sequence[torch.optim.Optimizer],
    level: PrecisionLevel,
    precisions: ModulePrecisions,
    comm_hook: str | None,
    replicas: object,
    op_lists: OpLists | None,
) -> str:
    """Refuse arguments of `initialize` that cannot train at a level.

    Args:
        models: The models.
        wrappers: The wrapper of each model.
        optimizers: The optimizers.
        level: The level.
        precisions: The modules that ``module_precision=`` matches.
        comm_hook: The argument of `initialize`.
        replicas: The argument of `initialize`.
        op_lists: The argument of `initialize`.

    Returns:
        The device type on which the models compute.

    Raises:
        ConfigError: The arguments do not fit together.
    """
    device = _device_of(models)
    if op_lists is not None and not level.autocasts:
        raise ConfigError(
            f"op_lists= lists the ops that autocast casts, and {level.name} casts none. Take fp16 "
            "or bf16, or choose modules by module_precision=."
        )
    _check_optimizers(models, optimizers, level)
    has_policies = any(wrapper.policies for wrapper in wrappers)
    if level.master_weights and not has_policies:
        for optimizer in optimizers:
            check_no_other_param_refs(optimizer)
    if level.linear_recipe is not None:
        _check_op_lists(level, op_lists)
        check_device_support(models, device, level)
    for model, wrapper in zip(models, wrappers, strict=True):
        _check_model(model, wrapper, level, precisions)
    _check_comm_hook(wrappers, comm_hook, replicas)
    return device.type


def _device_of(models: Sequence[nn.Module]) -> torch.device:
    device: torch.device | None = None
    for model in models:
        if device is None:
            device = compute_device(model)
    if device is None:
        raise ConfigError("initialize needs a model with parameters: there is nothing to train")
    if device.type == "meta":
        raise ConfigError(
            "The model is on 'meta', so its parameters have no values. Call "
            "model.to_empty(device=...), then initialise its parameters or load a checkpoint, then "
            "call initialize."
        )
    return device


def _check_op_lists(level: PrecisionLevel, op_lists: OpLists | None) -> None:
    """Refuse lists that give matrix products another dtype than a linear recipe does."""
    if op_lists is None:
        return
    policy = op_lists.by_op().get("mm", CastPolicy.LOWER_PRECISION)
    if policy is not CastPolicy.LOWER_PRECISION:
        assert level.linear_recipe is not None
        recipe = LINEAR_RECIPES[level.linear_recipe]
        raise ConfigError(
            f"op_lists= lists matrix products as {policy.value}, and at {level.name} linear layers "
            f"compute them in {recipe.label}. Leave linear out of the lists, or set the precision "
            "of layers by module_precision={'name': 'fp32'}."
        )


def _check_comm_hook(
    wrappers: Sequence[WrapperInfo], comm_hook: str | None, replicas: object
) -> None:
    """Refuse a hook for a model that reduces no gradients, and replicas without a hook."""
    if comm_hook is None:
        if replicas is not None:
            raise ConfigError(
                "replicas= needs a communication hook that averages them, and comm_hook is None. "
                "Pass comm_hook='fp16', or apply fully_shard with the whole mesh and leave "
                "replicas out."
            )
        return
    for wrapper in wrappers:
        if wrapper.name in (None, DATA_PARALLEL):
            raise ConfigError(
                f"comm_hook={comm_hook!r} needs a wrapper that reduces gradients between ranks, "
                "and a model has none. Wrap it in DistributedDataParallel or FSDP first, or leave "
                "comm_hook out."
            )


# -- one model -------------------------------------------------------------------------------------


def _check_model(
    model: nn.Module, wrapper: WrapperInfo, level: PrecisionLevel, precisions: ModulePrecisions
) -> None:
    check_frozen(model, level)
    if wrapper.policies:
        check_trained(model, wrapper, level)
        _check_policies(model, wrapper, level)
    was_cast = applied_level(wrapper.inner) is not None
    if was_cast or (level.changes_model and not wrapper.policies):
        _check_cast(wrapper, level)
    check_trained(model, wrapper, level)
    _check_module_precisions(model, wrapper, precisions)
    if wrapper.name == FSDP2:
        _check_units(model)


def check_trained(model: nn.Module, wrapper: WrapperInfo, level: PrecisionLevel) -> None:
    """Refuse trained parameters in half precision, unless the level casts them itself.

    Raises:
        ConfigError: The model has such parameters.
    """
    if level.casts_model and not wrapper.policies:
        return
    for name, param in model.named_parameters():
        if not param.requires_grad or param.dtype not in MASTER_LEVELS:
            continue
        if wrapper.policies:
            raise ConfigError(
                f"{wrapper.name} casts float32 parameters by its own mixed precision, and the "
                f"model trains some in {param.dtype}, first {name}, so no optimizer would step "
                "float32 values. Leave out model.half() or cast_model()."
            )
        raise ConfigError(
            f"{level.name} trains float32 parameters, and the model trains some in {param.dtype}, "
            f"first {name}. Leave out model.half(), or call .float() on their module "
            f"(modules_to_save of peft), or use {MASTER_LEVELS[param.dtype]}, which casts the "
            "model. Frozen parameters, such as the base under adapters, may have any dtype: "
            "requires_grad_(False)."
        )


def _check_cast(wrapper: WrapperInfo, level: PrecisionLevel) -> None:
    """Refuse a model that was not cast before it was wrapped, or was cast for another level."""
    name = wrapper.name
    is_cast = applied_level(wrapper.inner) is not None
    # Masters belong to parameters that stay the same tensors, and FSDP1 replaces its parameters.
    if level.master_weights and name in _POLICY_ARGUMENTS and (not is_cast or name == FSDP1):
        policy = _POLICY_ARGUMENTS[name].format(level.param)
        fix = f"Pass {name} {policy}"
        if is_cast:
            fix = f"Leave out cast_model() and pass {name} {policy}"
        if name == FSDP2:
            fix += ", or call cast_model() before it"
        raise ConfigError(
            f"At {level.name}, {name} casts float32 parameters by its own mixed precision, and it "
            f"was given none. {fix}."
        )
    is_unwrapped = name in (None, DATA_PARALLEL)
    if not is_cast and (level.float8_all_gather or not is_unwrapped):
        change = f"the model to {level.param}"
        if level.linear_recipe is not None:
            recipe = LINEAR_RECIPES[level.linear_recipe]
            change = f"layers to {recipe.label}"
        raise ConfigError(
            f"{level.name} casts {change}, and {name or 'the optimizer'} has its parameters "
            f"already. Call cast_model(model, {level.name!r}) first, then {name or FSDP2}, the "
            "optimizer and initialize."
        )
    check_applied_level(wrapper.inner, level)


# -- FSDP ------------------------------------------------------------------------------------------


def _check_policies(model: nn.Module, wrapper: WrapperInfo, level: PrecisionLevel) -> None:
    """Refuse FSDP's own mixed precision if it contradicts the level."""
    if level.autocasts and wrapper.policies == {(level.compute, level.reduce)}:
        return  # FSDP gathers in the dtype to which the region would cast.
    dtypes = {param_dtype for param_dtype, _ in wrapper.policies}
    if not level.master_weights or dtypes != {level.param}:
        names = ", ".join(map(str, dtypes))
        fitting_level = "bf16-O2"
        if torch.float16 in dtypes:
            fitting_level = MASTER_LEVELS[torch.float16]
        raise ConfigError(
            f"{wrapper.name} computes in {names} over float32 parameters by its own mixed "
            f"precision, and {level.name} computes in {level.compute} with parameters in "
            f"{level.param} and gradients reduced in {level.reduce}. Leave out that setting of "
            f"{wrapper.name}, or use {fitting_level}."
        )
    if wrapper.name == FSDP2:
        _check_output_dtypes(model, level)
    if level.keep_batchnorm_fp32:
        _check_batch_norms(model, wrapper, level)


def _check_batch_norms(model: nn.Module, wrapper: WrapperInfo, level: PrecisionLevel) -> None:
    """Refuse batch norms in a unit that casts them, at a level that keeps them in float32."""
    casting_units = casting_fsdp_unit_by_module(model)
    cast_norms: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or not module.affine:
            continue
        if casting_units[module] is not None:
            cast_norms.append(name)
    if cast_norms:
        raise ConfigError(
            f"{wrapper.name} casts batch norm {cast_norms[0]!r} to {level.param} with the modules "
            f"around it ({len(cast_norms)} in all), and {level.name} keeps batch norms in float32. "
            "Wrap each batch norm by itself first, without mixed precision"
            f"{_override_text(wrapper)}, or pass keep_batchnorm_fp32=False."
        )


def _check_output_dtypes(model: nn.Module, level: PrecisionLevel) -> None:
    """Refuse an inner unit that casts its outputs to another dtype than the outer unit computes in.

    FSDP2 casts the inputs of a unit, and casts nothing between the modules of one unit.
    """
    computing_modules = _computing_module_by_unit(model)
    for unit, outer_unit in _nested_units(model):
        output_dtype = FSDPUnit(unit).output_dtype
        if output_dtype in (None, level.param) or outer_unit not in computing_modules:
            continue
        names = module_names(model)
        unit_name = names[unit]
        outer_module = computing_modules[outer_unit]
        outer_name = names[outer_module]
        raise ConfigError(
            f"fully_shard casts the outputs of {unit_name!r} to {output_dtype} (output_dtype of "
            f"its policy), and {outer_name!r} of the unit around it "
            f"computes in {level.param}, with no cast between the two. Pass output_dtype to the "
            f"root alone, and MixedPrecisionPolicy(param_dtype={level.param}) to every other unit."
        )


def _computing_module_by_unit(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return for each casting unit its first module that computes with floating-point inputs."""
    modules: dict[nn.Module, nn.Module] = {}
    for module, unit in casting_fsdp_unit_by_module(model).items():
        # An embedding has weights, and takes integers.
        if unit is None or isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if next(module.parameters(recurse=False), None) is not None:
            modules.setdefault(unit, module)
    return modules


def _nested_units(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield pairs of a unit and the unit around it."""
    units = fsdp_unit_by_module(model)
    for module, unit in units.items():
        for child in module.children():
            if units[child] is child and unit is not None:
                yield child, unit


def _check_units(model: nn.Module) -> None:
    """Refuse a unit that trains parameters of several dtypes, as its first forward pass would."""
    modules_by_dtype: dict[nn.Module, dict[torch.dtype, nn.Module]] = {}
    for module, unit in fsdp_unit_by_module(model).items():
        if unit is None:
            continue
        modules = modules_by_dtype.setdefault(unit, {})
        for param in module.parameters(recurse=False):
            if param.requires_grad:
                modules[param.dtype] = module
    for modules in modules_by_dtype.values():
        if len(modules) > 1:
            first = next(iter(modules.values()))
            fp32_module = modules.get(torch.float32, first)
            name = module_names(model)[fp32_module]
            dtypes = " and ".join(map(str, modules))
            raise ConfigError(
                f"A unit of fully_shard trains parameters in {dtypes}, and torch supports one "
                "dtype in a unit. Call fully_shard first on the modules that keep their dtype, "
                f"such as {name!r}."
            )


def _check_module_precisions(
    model: nn.Module, wrapper: WrapperInfo, precisions: ModulePrecisions
) -> None:
    """Refuse fp32 modules if FSDP gathers their parameters in half precision.

    FSDP1 replaces weights by views of a flat parameter, which distamp cannot cast. FSDP2's weights
    are cast to float32 in the forward, unless another unit inside of the module casts its inputs.
    """
    units = casting_fsdp_unit_by_module(model)
    surrounding_units = fsdp_unit_by_module(model)
    for module in units:
        precision = precisions.get(module, "")
        if not precision.startswith("fp32") and not is_fp32_module(module):
            continue
        casting_units = {units[submodule] for submodule in module.modules()}
        casting_units.discard(None)
        if wrapper.name == FSDP2:
            casting_units.discard(surrounding_units[module])
        if casting_units:
            name = module_names(model)[module]
            raise ConfigError(
                f"{name!r} is to compute in fp32, and {wrapper.name} "
                "gathers its weights in another dtype. Wrap the module by itself first, as one "
                f"unit and without mixed precision{_override_text(wrapper)}."
            )


def _override_text(wrapper: WrapperInfo) -> str:
    """Return a hint about the second way to keep a module in float32 under FSDP2."""
    if wrapper.name != FSDP2:
        return ""
    return (
        ", or keep its parameters in float32 by param_dtype_override_fn of the policy (torch 2.15 "
        "and newer)"
    )


# -- optimizers ------------------------------------------------------------------------------------


def _check_optimizers(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    level: PrecisionLevel,
) -> None:
    model_params: list[nn.Parameter] = []
    for model in models:
        model_params.extend(model.parameters())
    model_param_ids = set(map(id, model_params))
    stepped_ids: set[int] = set()
    for optimizer in optimizers:
        stepped_ids.update(map(id, params_of(optimizer)))
    trained_params = [param for param in model_params if param.requires_grad]
    trains_unstepped = not stepped_ids.issuperset(map(id, trained_params))
    for number, optimizer in enumerate(optimizers):
        class_name = type(optimizer).__name__
        name = f"optimizer {number} ({class_name})"
        if masters_of(optimizer) is not None:
            raise ConfigError(
                f"{name} has master parameters already, because initialize or "
                "MasterParameters was called with it before. Use the Amp that the first initialize "
                "returned, or make a new model and a new optimizer."
            )
        params = params_of(optimizer)
        unknown_params = [param for param in params if id(param) not in model_param_ids]
        num_unknown = len(unknown_params)
        # An optimizer may step a parameter beside the model, such as a learnable temperature. If
        # no optimizer steps a parameter of the model, its unknown parameters are old ones.
        if num_unknown and (trains_unstepped or num_unknown == len(params)):
            raise ConfigError(
                f"{num_unknown} of the {len(params)} parameters of {name} do not belong to the "
                "model in its present state. A wrapper that shards replaces parameters, so make "
                "the optimizer after it, from model.parameters(), and call initialize before the "
                "first forward pass."
            )
        if level.master_weights:
            check_not_zero_optimizer(optimizer)
        _check_eps(optimizer, level)


def _check_eps(optimizer: torch.optim.Optimizer, level: PrecisionLevel) -> None:
    """Refuse an ``eps`` that is zero in float16 if the optimizer's state is float16."""
    if level.param is not torch.float16 or level.master_weights:
        return
    values: list[Any] = []
    for group in optimizer.param_groups:
        values.extend(tree_leaves(group.get("eps")))  # Adafactor has a tuple.
    nonzero_values = [value for value in values if value]
    eps = min(nonzero_values, default=1)
    if torch.tensor(float(eps), dtype=torch.float16) == 0:
        class_name = type(optimizer).__name__
        raise ConfigError(
            f"{class_name} has eps={eps:g}, which float16 rounds to zero, and "
            f"{level.name} keeps the optimizer's state in float16, so 0 / 0 would make parameters "
            "NaN. Pass eps=1e-3, or use fp16-O2."
        )
