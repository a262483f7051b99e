"""preflight: a model's precision before it runs, with no device, no weights, and what to mend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distamp.autocast.preflight.device import SIMULATED
from distamp.autocast.preflight.finding import Finding, in_order
from distamp.autocast.preflight.mixed import Mixtures
from distamp.autocast.preflight.probe import Kinds, probe
from distamp.autocast.preflight.result import Preflight
from distamp.autocast.preflight.risks import Risks
from distamp.autocast.preflight.settings import (
    check_model,
    check_optimizers,
    check_policy,
    policies_of,
)
from distamp.autocast.preflight.simulate import Job, Simulation, simulate
from distamp.autocast.report import PrecisionReport
from distamp.autocast.report.attribution import module_names
from distamp.autocast.report.recording import Observed

__all__ = ["preflight"]


def preflight(
    model: nn.Module,
    example_inputs: Any,
    device_type: str = "cuda",
    dtype: torch.dtype = torch.float16,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    mixed_precision: Any = None,
    measure: bool = True,
    allow_unfinished: bool = False,
) -> Preflight:
    """Show what a step would run in which dtype, with no device and no weights, and what to mend.

    The table of :func:`precision_report`, of a step on fake tensors: shapes and dtypes are real,
    autocast's lists are those of this torch, no activation is computed and no weight allocated, so
    the model may stand on the meta device. Torch has no such thing; ``torch.export`` is nearest.

    Control flow may depend on values. Those that follow from the example inputs, the buffers and
    constants (masks, lengths) are worked out on the CPU; where others decide (a router that
    chooses experts), made-up ones do, and a finding says where.

    The model is as before afterwards, however the call ends: parameters, buffers, gradients,
    attributes and random number generators. It is for one thread at a time.

    Where it differs from the device: of several kernels for one op the device may choose another
    of the same dtype (cuDNN's, for instance). What functions of the model's modules keep outside
    of it, such as a ``functools.lru_cache``, keeps fake tensors.

    Args:
        model: On any device. A wrapper by DataParallel, DistributedDataParallel or torch.compile
            is looked through; of a model that FSDP has sharded only the settings are checked.
        example_inputs: One tensor, a tuple or list of positional arguments, or a dict of keyword
            arguments. Shapes and dtypes count, devices do not; values do for masks, lengths and
            the like, and stand in as ones on the meta device.
        device_type: ``"cuda"`` or ``"cpu"``.
        dtype: The region's dtype, ``torch.float16`` or ``torch.bfloat16``.
        loss_fn: Takes the model's output, returns the loss; runs inside the region. Real tensors
            it uses, such as labels, are taken to be on the device.
        optimizers: Checked for epsilons that fp16 cannot hold.
        mixed_precision: FSDP's ``MixedPrecision`` or ``MixedPrecisionPolicy`` that this (not yet
            wrapped) model is to get: the table is that of its parameter and input dtypes.
        measure: Whether to time the model's kinds of op in ``dtype`` on this machine, if it has
            the device: on small tensors, milliseconds each, kept for the process.
        allow_unfinished: Makes what stops the simulation a warning instead of an error, unless it
            would stop a float32 step on the device too.

    Returns:
        The report, the findings, and how far the step came, a :class:`Preflight`.

    Raises:
        TypeError: ``model`` is not a module or a scripted one, or ``dtype`` not a dtype.
        ValueError: ``device_type`` cannot be simulated, ``dtype`` is not a half type, or the model
            has parameters without a shape (lazy modules) or that are not plain dense tensors.
        RuntimeError: This build of torch cannot simulate the device.
    """
    optimizers = _optimizers(optimizers)
    _check_arguments(model, device_type, dtype)
    model = _unwrap(model)
    findings = check_model(model, dtype) + check_optimizers(model, optimizers)
    wrapped = policies_of(model)
    own = [] if mixed_precision is None else [("", type(mixed_precision).__name__, mixed_precision)]
    for name, wrapper, policy in (*wrapped, *own):
        findings += check_policy(name, wrapper, policy, dtype)
    if wrapped:
        done = Simulation(findings=[_sharded(wrapped[0])])
    else:
        _check_tensors(model)
        job = _job(model, example_inputs, device_type, dtype, loss_fn, mixed_precision)
        done = _look(job, measure)
    return _result(model, device_type, dtype, findings, done, allow_unfinished)


def _job(
    model: nn.Module,
    example_inputs: Any,
    device_type: str,
    dtype: torch.dtype,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    mixed_precision: Any,
) -> Job:
    args, kwargs = _arguments(example_inputs)
    return Job(
        model,
        args,
        kwargs,
        device_type,
        dtype,
        loss_fn=loss_fn,
        param_dtype=getattr(mixed_precision, "param_dtype", None),
        buffer_dtype=getattr(mixed_precision, "buffer_dtype", None),
        cast_inputs=_casts_inputs(mixed_precision),
    )


def _result(
    model: nn.Module,
    device_type: str,
    dtype: torch.dtype,
    findings: list[Finding],
    done: Simulation,
    allow_unfinished: bool,
) -> Preflight:
    """What was found in the settings and in the simulation, together."""
    findings = findings + done.findings
    if allow_unfinished:
        findings = [
            replace(f, severity="warning") if f.rule == "not-simulated" else f for f in findings
        ]
    ran, left = _visited(model, done)
    if done.forward:
        findings += _unused(model, left)
    device = f"{device_type}, {str(dtype).removeprefix('torch.')}, simulated"
    return Preflight(
        report=PrecisionReport(done.rows, type(model).__name__, device),
        findings=in_order(findings),
        forward=done.forward,
        visited=ran,
        not_visited=left,
    )


def _look(job: Job, measure: bool) -> Simulation:
    """Simulate the step, and add what there is to say of its ops."""
    risks, mixtures, kinds = Risks(), Mixtures(), Kinds(job.dtype)

    def observe(call: Observed) -> None:
        risks.observe(call)
        mixtures.observe(call)
        kinds.observe(call)

    done = simulate(job, observe)
    done.findings += risks.findings + mixtures.findings()
    if measure:
        done.findings += probe(kinds, job.device_type, job.dtype)
    return done


def _unused(model: nn.Module, names: tuple[str, ...]) -> list[Finding]:
    """Parameters that no op took, in modules whose forward did not run."""
    left = {name: module for module, name in module_names(model).items() if name in names}
    what = "has parameters, but took no part in the step: its precision is not known"
    fix = "nothing need be wrong, if it is meant to stay unused with such inputs"
    return [
        Finding("info", "not-visited", name, type(module).__name__, what, fix)
        for name, module in left.items()
        if any(True for _ in module.parameters(recurse=False))
    ]


def _visited(model: nn.Module, done: Simulation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of modules that took part in forward, and of those that did not."""
    named = module_names(model)
    # A container such as ModuleList has no forward to run, or one that is not called.
    above = {name[:at] for name in done.visited for at, char in enumerate(name) if char == "."}
    containers = {
        name
        for module, name in named.items()
        if type(module).forward is nn.Module.forward or (name in above and not module._parameters)
    } - done.visited
    names = [name for name in dict.fromkeys(named.values()) if name not in containers]
    ran = tuple(name for name in names if name in done.visited)
    return ran, tuple(name for name in names if name not in done.visited)


def _check_arguments(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"preflight takes the model, a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    allowed = ["cpu", *SIMULATED]
    if device_type not in allowed:
        plain = str(device_type).split(":")[0]
        hint = f"; did you mean {plain!r}?" if plain in allowed else ""
        raise ValueError(
            f"device_type must be one of {', '.join(allowed)}, got {device_type!r}{hint}"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, got {dtype}")


def _check_tensors(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{name or 'the model'} is a scripted module; script it afterwards")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet: run a lazy model forward once before preflight"
            )
        sharded: bool = is_traceable_wrapper_subclass(tensor)
        if sharded:
            raise ValueError(
                f"{name} is a {type(tensor).__name__}; give preflight the model before its tensors "
                "are sharded or quantized"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(
                f"{name} is {tensor.layout}, {tensor.dtype}; preflight simulates dense parameters "
                "and buffers alone"
            )


def _optimizers(
    given: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            raise TypeError(f"optimizers must be torch optimizers, got {type(each).__name__}")
    return optimizers


def _unwrap(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":
            # torch.compile's; to import its class is slow.
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), example_inputs
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _casts_inputs(policy: Any) -> bool:
    """FSDP1's root casts by one flag, FSDP2's by another; either means the model's inputs."""
    flags = ("cast_forward_inputs", "cast_root_forward_inputs")
    return any(getattr(policy, flag, False) for flag in flags)


def _sharded(wrapped: tuple[str, str, Any]) -> Finding:
    name, wrapper, _ = wrapped
    what = f"{wrapper} has sharded the model: its settings were checked, its ops were not"
    fix = "give preflight the model before it is wrapped, and mixed_precision= the policy"
    return Finding("error", "not-simulated", name, wrapper, what, fix)
