"""Looking at a model's precision before it runs: no device, no weights, and what to mend."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from distamp.autocast.preflight_attention import stands_in
from distamp.autocast.preflight_device import SIMULATED
from distamp.autocast.preflight_finding import Finding, as_lines, in_order
from distamp.autocast.preflight_mixed import Mixtures
from distamp.autocast.preflight_probe import Kinds, probe
from distamp.autocast.preflight_risks import Risks
from distamp.autocast.preflight_settings import (
    check_model,
    check_optimizers,
    check_policy,
    policies_of,
)
from distamp.autocast.preflight_simulate import Job, Simulation, simulate
from distamp.autocast.report import PrecisionReport
from distamp.autocast.report_recording import Observed

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Preflight", "preflight"]


@dataclass(frozen=True, slots=True)
class Preflight:
    """What :func:`preflight` found out.

    Attributes:
        report: The table, as of a real step.
        findings: What to mend, the worst first.
    """

    report: PrecisionReport
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that will stop the step or spoil its numbers."""
        return tuple(f for f in self.findings if f.severity == "error")

    def __str__(self) -> str:
        return "\n".join([str(self.report), "", "findings", *as_lines(self.findings)])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        colours = {"ERROR": "bold red", "WARNING": "yellow", "info": "cyan"}
        parts: list[Any] = [self.report.__rich__(), Text("\nfindings", style="bold")]
        for line in as_lines(self.findings):
            first = line.split(" ", 1)[0]
            parts.append(Text(line, style=colours.get(first, "")))
        return Group(*parts)

    def to_dict(self) -> dict[str, Any]:
        """Table and findings as JSON types."""
        findings = [finding.to_dict() for finding in self.findings]
        return {"findings": findings, "report": self.report.to_dict()}

    def to_json(self, path: str | PathLike[str]) -> None:
        """Write table and findings to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")


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
    short = str(dtype).removeprefix("torch.")
    device = f"{device_type}, {short}, simulated"
    findings = check_model(model, dtype) + check_optimizers(model, optimizers)
    wrapped = policies_of(model)
    for name, wrapper, policy in wrapped:
        findings += check_policy(name, wrapper, policy, dtype)
    if mixed_precision is not None:
        findings += check_policy("", type(mixed_precision).__name__, mixed_precision, dtype)
    if wrapped:
        findings.append(_sharded(wrapped[0]))
        return Preflight(PrecisionReport([], type(model).__name__, device), in_order(findings))
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
    risks, mixtures, kinds = Risks(), Mixtures(), Kinds(dtype)

    def observe(call: Observed) -> None:
        risks.observe(call)
        mixtures.observe(call)
        kinds.observe(call)

    done = simulate(job, observe)
    findings += done.findings + risks.findings + mixtures.findings()
    findings += _attention(done, device_type)
    if measure:
        findings += probe(kinds, device_type, dtype, backward=backward)
    return Preflight(PrecisionReport(done.rows, type(model).__name__, device), in_order(findings))


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
