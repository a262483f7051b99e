"""Running a model's step on fake tensors: no weights, no device, every op in its dtype."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from distamp.autocast.preflight.attention import fused_attention, stands_in
from distamp.autocast.preflight.backward import backward_without_device
from distamp.autocast.preflight.device import simulated_device
from distamp.autocast.preflight.finding import Finding
from distamp.autocast.report.attribution import module_names, tensors_in
from distamp.autocast.report.recording import Observed, Recorder
from distamp.autocast.report.rows import OUTSIDE, OpRow

__all__ = ["Job", "Simulation", "simulate"]

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True, slots=True)
class Job:
    """What is simulated: one call of a model under autocast, its loss, and their backward."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device_type: str
    dtype: torch.dtype
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    # What a sharding wrapper would hand the model: parameters, buffers and inputs in these.
    param_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_inputs: bool = False
    backward: bool = True
    # Torch's own engine where it can run; see backward.py.
    own_engine: bool = False


@dataclass(slots=True)
class Simulation:
    """What came of it."""

    rows: tuple[OpRow, ...] = ()
    findings: list[Finding] = field(default_factory=list)


def simulate(job: Job, observe: Callable[[Observed], None]) -> Simulation:
    """Run the job; what fails becomes a finding, and the rows hold what ran until then."""
    done = Simulation()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # A caller under no_grad or inference_mode still wants to see a training step.
    with torch.inference_mode(False), torch.enable_grad(), _quiet():
        _run(job, observe, done, fake)
    return done


def _run(
    job: Job, observe: Callable[[Observed], None], done: Simulation, fake: FakeTensorMode
) -> None:
    with simulated_device(job.device_type), fake:
        tensors, owners = _fake_state(job)
        args = _fake_inputs(job, job.args)
        kwargs = _fake_inputs(job, dict(job.kwargs))
        recorder = Recorder(job.model, observe, owners)
        rescue = _Rescue(recorder, job, done.findings)
        with recorder, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with rescue, _region(job.device_type, job.dtype):
                    with _weight_lists_kept(job.model):
                        output = functional_call(job.model, tensors, args, kwargs)
                    if job.loss_fn is not None:
                        output = job.loss_fn(output)
                _check_loss(job, output, done.findings)
                if job.backward:
                    _backward(job, output, recorder)
            except Exception as error:
                done.findings.append(_failure(job, error, rescue))
        done.rows = recorder.rows()
    done.findings += _inner_regions(job, caught)


def _fake_state(job: Job) -> tuple[dict[str, torch.Tensor], dict[int, str]]:
    """Empty stand-ins for parameters and buffers, and the module that each parameter is of."""
    names = module_names(job.model)
    made: dict[int, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    owners: dict[int, str] = {}
    for prefix, module in job.model.named_modules(remove_duplicate=False):
        held = [(n, t, job.param_dtype) for n, t in module._parameters.items()]
        held += [(n, t, job.buffer_dtype) for n, t in module._buffers.items()]
        for name, tensor, dtype in held:
            if tensor is None:
                continue
            if id(tensor) not in made:
                made[id(tensor)] = _fake_like(tensor, job.device_type, dtype)
                owners[id(made[id(tensor)])] = names[module]
            tensors[f"{prefix}.{name}" if prefix else name] = made[id(tensor)]
    return tensors, owners


def _fake_inputs(job: Job, values: Any) -> Any:
    dtype = job.param_dtype if job.cast_inputs else None

    def fake(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return _fake_like(value, job.device_type, dtype) if is_tensor else value

    return tree_map(fake, values)


def _fake_like(tensor: torch.Tensor, device_type: str, dtype: torch.dtype | None) -> torch.Tensor:
    """An empty tensor of the same shape, strides and place in autograd, on the other device."""
    to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    made = torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=to, device=torch.device(device_type)
    )
    return made.requires_grad_(tensor.requires_grad and tensor.is_floating_point())


@contextmanager
def _region(device_type: str, dtype: torch.dtype, enabled: bool = True) -> Iterator[None]:
    """An autocast region that does not ask whether the device is here, as torch's classes do."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


@contextmanager
def _weight_lists_kept(model: nn.Module) -> Iterator[None]:
    """Give recurrent layers back the lists of weights that functional_call leaves its own in."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    before = [list(layer._flat_weights) for layer in layers]
    try:
        yield
    finally:
        for layer, weights in zip(layers, before, strict=True):
            layer._flat_weights = weights


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing a traceback for each fake kernel that raises; it is a finding."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class _Rescue(TorchFunctionMode):
    """Notes a torch function that raises in the region, and goes on with it in float32."""

    def __init__(self, recorder: Recorder, job: Job, findings: list[Finding]) -> None:
        super().__init__()
        self._recorder = recorder
        self._job = job
        self._findings = findings
        self.last: tuple[str, str] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            if stands_in(func, self._job.device_type):
                with self._recorder.inside("scaled_dot_product_attention"):
                    out = fused_attention(args, kwargs)
                if out is not None:
                    return out
            return func(*args, **kwargs)
        except (*_DATA_DEPENDENT, UnsupportedOperatorException, AssertionError):
            self.last = self._recorder.where()[0], _name(func)
            raise
        except (RuntimeError, NotImplementedError) as error:
            self.last = self._recorder.where()[0], _name(func)
            out = self._in_float32(func, args, kwargs, error)
            what = f"raises under autocast: {_first_line(error)}"
            advice = _advice(_name(func))
            module, op = self.last
            self._findings.append(Finding("error", "autocast-error", module, op, what, advice))
            return out

    def _in_float32(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        halves = (torch.float16, torch.bfloat16)

        def widen(value: Any) -> Any:
            half = isinstance(value, torch.Tensor) and value.dtype in halves
            return value.float() if half else value

        with _region(self._job.device_type, self._job.dtype, enabled=False):
            with self._recorder.paused():
                args, kwargs = tree_map(widen, (args, kwargs))
            try:
                return func(*args, **kwargs)
            except Exception:
                # It is not the precision that is wrong.
                raise error from None


def _backward(job: Job, output: Any, recorder: Recorder) -> None:
    roots = [t for t in tensors_in(output) if t.requires_grad and t.grad_fn is not None]
    roots = [t for t in roots if t.is_floating_point()]
    if not roots:
        return
    with recorder.paused():
        grads = [torch.empty_like(root) for root in roots]
    if job.device_type == "cpu" and not job.own_engine:
        torch.autograd.backward(roots, grads)
    else:
        backward_without_device(roots, grads, recorder)


def _check_loss(job: Job, output: Any, findings: list[Finding]) -> None:
    if job.loss_fn is None:
        return
    for loss in tensors_in(output):
        if loss.dtype == torch.float16:
            what = "the loss is fp16: scaled by 65536, its seed gradient is infinite"
            fix = "end the loss function with .float(), or take the loss outside the region"
            findings.append(Finding("error", "fp16-loss", OUTSIDE, "loss_fn", what, fix))


def _failure(job: Job, error: Exception, rescue: _Rescue) -> Finding:
    module, op = _module_of(job.model, error), "forward"
    if rescue.last is not None and isinstance(error, RuntimeError | AssertionError):
        module, op = rescue.last
    if isinstance(error, _DATA_DEPENDENT):
        what = f"depends on values ({_first_line(error)}): what runs after it was not looked at"
        fix = "nothing need be wrong; use precision_report on a real step"
        return Finding("warning", "not-simulated", module, op, what, fix)
    if _needs_the_device(error):
        what = "needs the device itself, or has no fake kernel in torch: the step was seen to here"
        fix = "nothing need be wrong; use precision_report on a real step"
        return Finding("warning", "not-simulated", module, op, what, fix)
    if "accelerator" in str(error):
        what = "asks autograd for gradients inside the step, which needs the device"
        fix = "nothing need be wrong; use precision_report on a real step"
        return Finding("warning", "not-simulated", module, op, what, fix)
    what = f"stops the step, in float32 too: {type(error).__name__}: {_first_line(error)}"
    fix = "check the example inputs and the devices of tensors the model makes itself"
    return Finding("error", "not-simulated", module, op, what, fix)


def _needs_the_device(error: Exception) -> bool:
    # The last is what a build with CUDA says on a machine without it.
    return isinstance(error, UnsupportedOperatorException | torch.AcceleratorError) or any(
        phrase in str(error) for phrase in ("not compiled with CUDA", "Found no NVIDIA driver")
    )


def _module_of(model: nn.Module, error: Exception) -> str:
    """The innermost module of the model in whose method the error was raised."""
    names = module_names(model)
    found = OUTSIDE
    for frame, _ in traceback.walk_tb(error.__traceback__):
        held = frame.f_locals.get("self")
        if isinstance(held, nn.Module) and held in names:
            found = names[held]
    return found


def _inner_regions(job: Job, caught: list[warnings.WarningMessage]) -> list[Finding]:
    """A region of the model's own that torch switched off because the device is not here."""
    if not any("Disabling autocast" in str(warning.message) for warning in caught):
        return []
    what = (
        f"the model enters an autocast({job.device_type!r}) region of its own, which torch "
        "disables on a machine without the device: its ops are shown in the dtype of their inputs"
    )
    fix = "leave the region to the caller, or run preflight where the device is"
    return [Finding("warning", "not-simulated", "", "autocast", what, fix)]


def _advice(name: str) -> str:
    if "binary_cross_entropy" in name or name == "bce_loss":
        return (
            "return logits and use BCEWithLogitsLoss (binary_cross_entropy_with_logits), which "
            "autocasts safely"
        )
    return "cast its inputs to one dtype, or run it in autocast(enabled=False) on .float() inputs"


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
