"""Settings that conflict before anything runs: parameters, optimizers, FSDP's mixed precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from distamp.autocast.preflight.finding import Finding
from distamp.autocast.preflight.risks import FP16_ZERO
from distamp.autocast.report.attribution import module_names

__all__ = ["check_model", "check_optimizers", "check_policy", "policies_of"]

_HALF = (torch.float16, torch.bfloat16)


def check_model(model: nn.Module, dtype: torch.dtype) -> list[Finding]:
    """Half types that differ among the parameters, or from the region's."""
    found: dict[torch.dtype, tuple[str, str]] = {}
    for module, name in module_names(model).items():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype in _HALF:
                found.setdefault(parameter.dtype, (name, parameter_name))
    findings = []
    for other, (module_name, parameter_name) in found.items():
        if other != dtype and dtype in _HALF:
            what = (
                f"parameters such as {parameter_name} are {_short(other)}, the region computes in "
                f"{_short(dtype)}: two half types in one step"
            )
            fix = f"use one: autocast(dtype={other}), or parameters in float32"
            findings.append(Finding("error", "mixed-half", module_name, "parameters", what, fix))
    if len(found) == 2 and not findings:
        (module_name, _), _ = found.values()
        what, fix = "float16 and bfloat16 parameters in one model", "use one half type"
        findings.append(Finding("error", "mixed-half", module_name, "parameters", what, fix))
    return findings


def check_optimizers(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> list[Finding]:
    """Epsilons that are 0 in fp16, and fp16 parameters that an optimizer updates by themselves."""
    names = {id(p): name for name, p in model.named_parameters()}
    findings = []
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            fp16 = [p for p in group["params"] if p.dtype == torch.float16]
            if not fp16:
                continue
            example = names.get(id(fp16[0]), f"group {number}, parameter 0")
            module = example.rpartition(".")[0]
            eps = group.get("eps")
            if isinstance(eps, float) and 0 < eps < FP16_ZERO:
                what = (
                    f"eps={eps:g} of group {number} is 0 in fp16 ({len(fp16)} fp16 parameters, "
                    f"such as {example}): where a squared gradient underflows it divides by 0"
                )
                fix = "keep the parameters, or a master copy of them, in float32"
                findings.append(Finding("error", "optimizer-epsilon", module, kind, what, fix))
            what = (
                f"updates {len(fp16)} fp16 parameters of group {number} in place, such as "
                f"{example}: updates below 1/2048 of a weight are lost"
            )
            fix = "keep parameters in float32 under autocast, or use fp32 master parameters"
            findings.append(Finding("warning", "fp16-parameters", module, kind, what, fix))
    return findings


def policies_of(model: nn.Module) -> list[tuple[str, str, Any]]:
    """(module, wrapper's class, policy) of each part that FSDP wraps; None if it has no policy."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    found = []
    for module, name in module_names(model).items():
        if isinstance(module, FullyShardedDataParallel):
            found.append((name, "FullyShardedDataParallel", module.mixed_precision))
        elif isinstance(module, FSDPModule):
            policy = getattr(module._get_fsdp_state(), "_mp_policy", None)
            found.append((name, "fully_shard", policy))
    return found


def check_policy(module: str, wrapper: str, policy: Any, dtype: torch.dtype) -> list[Finding]:
    """Where autocast and FSDP's ``MixedPrecision`` or ``MixedPrecisionPolicy`` both set dtypes."""
    findings: list[Finding] = []

    def note(severity: str, what: str, fix: str) -> None:
        findings.append(Finding(severity, "fsdp-precision", module, wrapper, what, fix))

    param_dtype = getattr(policy, "param_dtype", None)
    reduce_dtype = getattr(policy, "reduce_dtype", None) or param_dtype
    buffer_dtype = getattr(policy, "buffer_dtype", None)
    if param_dtype in _HALF and dtype in _HALF:
        if param_dtype != dtype:
            note(
                "error",
                f"param_dtype={_short(param_dtype)}, but autocast computes in {_short(dtype)}: "
                "every weight is rounded twice, and both types' limits hold",
                f"set param_dtype=None (autocast casts) or {dtype}",
            )
        else:
            note(
                "warning",
                f"FSDP hands out {_short(dtype)} parameters, so ops that autocast runs in float32 "
                "(norms, softmax, losses) start from weights already rounded",
                "set param_dtype=None under autocast, or use the policy without autocast",
            )
    if reduce_dtype == torch.float16:
        note(
            "warning",
            "gradients are added over ranks in float16: scaled gradients overflow in the sum",
            "set reduce_dtype=torch.float32, or torch.bfloat16 for its range",
        )
    if buffer_dtype in _HALF:
        note(
            "warning",
            f"buffers are kept in {_short(buffer_dtype)}: running statistics of BatchNorm stop "
            "moving once a step is below half a unit in the last place",
            "set buffer_dtype=None or torch.float32",
        )
    return findings


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
