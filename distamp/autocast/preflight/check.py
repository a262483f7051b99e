"""preflight: a model's precision before it runs, with no device, no weights, and what to mend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from distamp.autocast.preflight.attention import stands_in
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
from distamp.autocast.report.recording import Observed
from distamp.autocast.report.rows import OpRow

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
    backward: bool = True,
    measure: bool = True,
) -> Preflight:
    """Show what a step would run in which dtype, with no device and no weights, and what to mend.

    The table of :func:`precision_report`, of a step on fake tensors: shapes and dtypes are real,
    autocast's lists are those of this torch, nothing is computed and nothing allocated, so the
    model may stand on the meta device. Torch has no such thing; ``torch.export`` is nearest.

    Where it differs from the device: of several kernels for one op the device may choose another
    (of the same dtype: fused attention, cuDNN's recurrent layers); the second forward of activation
    checkpointing is shown where autograd itself asks for it; what depends on values ends the
    simulation with a finding. Attributes that the model's own forward sets stay set. It is for one
    thread at a time.

    Args:
        model: On any device. A DataParallel or DistributedDataParallel wrapper is looked through;
            of a model that FSDP has sharded only the settings are checked.
        example_inputs: One tensor, a tuple or list of positional arguments, or a dict of keyword
            arguments. Shapes and dtypes count, values and devices do not.
        device_type: ``"cuda"`` or ``"cpu"``.
        dtype: The region's dtype, ``torch.float16`` or ``torch.bfloat16``.
        loss_fn: Takes the model's output, returns the loss; runs inside the region. None starts
            backward from the output itself.
        optimizers: Checked for epsilons that fp16 cannot hold.
        mixed_precision: FSDP's ``MixedPrecision`` or ``MixedPrecisionPolicy`` that this (not yet
            wrapped) model is to get: the table is that of its parameter and input dtypes.
        backward: Whether to go on through backward.
        measure: Whether to time the model's kinds of op in ``dtype`` on this machine, if it has
            the device: on small tensors, milliseconds each, kept for the process.

    Returns:
        The report and the findings, a :class:`Preflight`.

    Raises:
        TypeError: ``model`` is not a module, or ``dtype`` not a dtype.
        ValueError: ``device_type`` cannot be simulated, or ``dtype`` is not a half type.
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
        findings.append(_sharded(wrapped[0]))
        return _result((), model, device_type, dtype, findings)
    args, kwargs = _arguments(example_inputs)
    job = Job(
        model,
        args,
        kwargs,
        device_type,
        dtype,
        loss_fn=loss_fn,
        param_dtype=getattr(mixed_precision, "param_dtype", None),
        buffer_dtype=getattr(mixed_precision, "buffer_dtype", None),
        cast_inputs=_casts_inputs(mixed_precision),
        backward=backward,
    )
    rows, found = _look(job, measure)
    return _result(rows, model, device_type, dtype, findings + found)


def _look(job: Job, measure: bool) -> tuple[Sequence[OpRow], list[Finding]]:
    """Simulate the step; the rows of its table, and what there is to say of them."""
    risks, mixtures, kinds = Risks(), Mixtures(), Kinds(job.dtype)

    def observe(call: Observed) -> None:
        risks.observe(call)
        mixtures.observe(call)
        kinds.observe(call)

    done = simulate(job, observe)
    findings = done.findings + risks.findings + mixtures.findings()
    findings += _attention(done, job.device_type)
    if measure:
        findings += probe(kinds, job.device_type, job.dtype, backward=job.backward)
    return done.rows, findings


def _result(
    rows: Sequence[OpRow],
    model: nn.Module,
    device_type: str,
    dtype: torch.dtype,
    findings: list[Finding],
) -> Preflight:
    device = f"{device_type}, {str(dtype).removeprefix('torch.')}, simulated"
    return Preflight(PrecisionReport(rows, type(model).__name__, device), in_order(findings))


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


def _optimizers(
    given: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            raise TypeError(f"optimizers must be torch optimizers, got {type(each).__name__}")
    return optimizers


def _unwrap(model: nn.Module) -> nn.Module:
    while isinstance(model, DataParallel | DistributedDataParallel):
        model = model.module
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
    return Finding("info", "not-simulated", name, wrapper, what, fix)


def _attention(done: Simulation, device_type: str) -> list[Finding]:
    """Say where the simulation had to choose an attention kernel, and which."""
    if not stands_in(torch.nn.functional.scaled_dot_product_attention, device_type):
        return []
    functions = ("scaled_dot_product_attention", "multi_head_attention_forward")
    kernels: dict[tuple[str, str], str] = {}
    for row in done.rows:
        if row.function in functions and row.phase == "forward" and not row.cause:
            place = row.module, row.function
            if row.op.startswith("_scaled_dot_product"):
                kernels[place] = "a fused kernel, as a GPU runs it"
            elif row.op in ("bmm", "baddbmm"):
                reference = "torch's reference kernels; on a GPU a fused one may run"
                kernels.setdefault(place, reference)
    fix = "nothing need be wrong; precision_report on the device shows the kernel it chooses"
    return [
        Finding("info", "not-simulated", module, function, f"shown as {name}", fix)
        for (module, function), name in kernels.items()
    ]
