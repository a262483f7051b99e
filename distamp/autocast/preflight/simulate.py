"""Running a model's forward pass on fake tensors: no weights, no device, every op in its dtype."""

from __future__ import annotations

import copy
import logging
import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from distamp.autocast.preflight.device import simulated_device
from distamp.autocast.preflight.finding import Finding
from distamp.autocast.preflight.packed import with_lengths
from distamp.autocast.preflight.swap import modules_of, swapped
from distamp.autocast.preflight.values import Values
from distamp.autocast.report.attribution import module_names
from distamp.autocast.report.recording import Observed, Recorder
from distamp.autocast.report.rows import OUTSIDE, OpRow

__all__ = ["Job", "Simulation", "simulate"]

_NOT_SIMULATED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
# A loop that ends when the data says so may never end; this many made-up decisions in a module do.
_MOST_DECISIONS = 5000
_ARRAYS: frozenset[Any] = frozenset((torch.Tensor.numpy, torch.Tensor.__array__))


@dataclass(frozen=True, slots=True)
class Job:
    """What is simulated: one call of a model under autocast, and its loss."""

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


@dataclass(slots=True)
class Simulation:
    """What came of it: the rows of what ran, and how far it came."""

    rows: tuple[OpRow, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    forward: bool = False
    # Names of modules whose forward ran, or whose parameters and buffers an op took.
    visited: set[str] = field(default_factory=set)


def simulate(job: Job, observe: Callable[[Observed], None]) -> Simulation:
    """Run the job; what fails becomes a finding, and the rows hold what ran until then."""
    done = Simulation()
    # A caller under no_grad or inference_mode still wants to see a training step.
    with torch.inference_mode(False), torch.enable_grad(), _generators_kept(), _quiet():
        _Step(job, observe, done).run()
    return done


class _Step:
    """One simulation."""

    def __init__(self, job: Job, observe: Callable[[Observed], None], done: Simulation) -> None:
        self.job = job
        self.done = done
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        # A loss may have weights too.
        self._models = [job.model, *modules_of(job.loss_fn)]
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._owners: dict[int, str] = {}
        self.recorder = Recorder(job.model, self._observe(observe), self._owners)
        self.values = Values(self._fake_mode, self._stand_ins, self._made_up)
        self._functions = _Functions(self)
        self._decisions: Counter[str] = Counter()

    def run(self) -> None:
        job, done = self.job, self.done
        with simulated_device(job.device_type), _eager(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with self._fake_mode:
                self._fake_state()
                args, kwargs = self._fake_inputs((job.args, dict(job.kwargs)))
                with (
                    self.values,
                    swapped(self._models, dict(self._stand_ins)),
                    self.recorder,
                ):
                    try:
                        self._forward(args, kwargs)
                    except Exception as error:
                        done.findings.append(self._failure(error))
        done.rows = self.recorder.rows()
        done.visited |= self.recorder.entered

    # -- fake tensors

    def _fake_state(self) -> None:
        """Empty stand-ins for parameters and buffers, and the module that each is of."""
        job, names = self.job, module_names(self.job.model)
        for module in (each for model in self._models for each in model.modules()):
            name = names.get(module, OUTSIDE)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is None or id(tensor) in self._stand_ins:
                    continue
                parameter = isinstance(tensor, nn.Parameter)
                made = self._fake_like(tensor, job.param_dtype if parameter else job.buffer_dtype)
                if parameter:
                    made = nn.Parameter(made, tensor.requires_grad)
                # Frameworks mark parameters with attributes of their own.
                vars(made).update(vars(tensor))
                self._stand_ins[id(tensor)] = made
                self._owners[id(made)] = name

    def _fake_inputs(self, values: Any) -> Any:
        dtype = self.job.param_dtype if self.job.cast_inputs else None

        def fake(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self._fake_like(value, dtype)
            # A batch that is an object of its own; BatchEncoding is one.
            if isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
                value = copy.copy(value)
                vars(value).update(tree_map(fake, vars(value)))
            return value

        return tree_map(fake, values)

    def _fake_like(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """A tensor of the same shape, strides and place in autograd, on the other device."""
        to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=to, device=torch.device(self.job.device_type)
        )
        self.values.load(made, tensor)
        return made.requires_grad_(tensor.requires_grad)

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor that stands for one of the model's or its inputs'; others are kept."""
        return self._stand_ins.get(id(tensor), tensor)

    # -- the step

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        job = self.job
        with self._functions:
            with torch.autocast(job.device_type, job.dtype):
                output = job.model(*args, **kwargs)
                self.values.device = torch.device(job.device_type)
                output = _loss_in(output) if job.loss_fn is None else job.loss_fn(output)
            self.done.forward = True
            if isinstance(output, torch.Tensor) and not output.dim():
                self._check_loss(output)

    def _check_loss(self, loss: torch.Tensor) -> None:
        if loss.dtype == torch.float16:
            what = "the loss is fp16: scaled by 65536, its seed gradient is infinite"
            fix = "end the loss function with .float(), or take the loss outside the region"
            self._note("fp16-loss", OUTSIDE, "loss_fn", what, fix)

    # -- what is found

    def _observe(self, observe: Callable[[Observed], None]) -> Callable[[Observed], None]:
        def observed(call: Observed) -> None:
            owners = (self._owners.get(id(t)) for t in call.inputs)
            self.done.visited.update(name for name in owners if name is not None)
            observe(call)

        return observed

    def _note(
        self, rule: str, module: str, op: str, what: str, fix: str, severity: str = "error"
    ) -> None:
        self.done.findings.append(Finding(severity, rule, module, op, what, fix))

    def _made_up(self) -> None:
        what = "the way taken depends on values that were made up, such as which expert is chosen"
        fix = "nothing need be wrong; precision_report on a real step shows the way that data takes"
        module, op = self.recorder.where()
        self._decisions[module] += 1
        if self._decisions[module] > _MOST_DECISIONS:
            raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
        if not any(f.rule == "made-up-values" and f.module == module for f in self.done.findings):
            self._note("made-up-values", module, op, what, fix, severity="info")

    def _failure(self, error: Exception) -> Finding:
        phase = "forward" if self.values.device is None else "loss_fn"
        place = _module_of(self.job.model, error), phase
        if self._functions.failed is not None and isinstance(error, RuntimeError | AssertionError):
            place = self._functions.failed
        rule = "not-simulated"
        fix = "use precision_report on a real step, or allow_unfinished=True to pass without it"
        if isinstance(error, _NOT_SIMULATED[:2]):
            what = f"depends on values that cannot be made up ({_first_line(error)})"
        elif _needs_the_device(error):
            what = "needs the device itself, or has no fake kernel in torch"
        else:
            rule = "step-fails"
            what = f"stops the step, in float32 too: {type(error).__name__}: {_first_line(error)}"
            fix = "check the example inputs and the devices of tensors the model makes itself"
        return Finding("error", rule, *place, f"{what}; what follows was not run", fix)


class _Functions(TorchFunctionMode):
    """Notes a torch function that raises in the region, and goes on with it in float32."""

    def __init__(self, step: _Step) -> None:
        super().__init__()
        self._step = step
        self.failed: tuple[str, str] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # A parameter that the model keeps where swapped does not look, in a tuple say: autocast
        # must not find it on its own device.
        args, kwargs = tree_map_only(torch.Tensor, self._step.stand_in, (args, kwargs or {}))
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, (args[0], "cuda", *args[2:])
        if func is torch.Tensor.to:
            args = (args[0], *map(_numbered, args[1:]))
        if "device" in kwargs:
            kwargs = kwargs | {"device": _numbered(kwargs["device"])}
        if func is torch.Tensor.__format__ and not args[0].dim():
            return format(args[0].item(), args[1])
        failures: tuple[type[Exception], ...] = (RuntimeError, NotImplementedError)
        if func in _ARRAYS and args[0].device.type == "cpu":
            func, args, kwargs = self._step.values.array, args[:1], {}
            failures = (TypeError,)  # NumPy has no bfloat16.
        else:
            func, args = with_lengths(func, args, self._step.values.real)
        try:
            return func(*args, **kwargs)
        except (*_NOT_SIMULATED, AssertionError):
            self._failed_in(func)
            raise
        except failures as error:
            where = self._failed_in(func)
            out = self._in_float32(func, args, kwargs, error)
            what = f"raises under autocast: {_first_line(error)}"
            self._step._note("autocast-error", *where, what, _advice(_name(func)))
            self.failed = None
            return out

    def _failed_in(self, func: Any) -> tuple[str, str]:
        self.failed = self._step.recorder.where()[0], _name(func)
        return self.failed

    def _in_float32(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        halves = (torch.float16, torch.bfloat16)

        def widen(value: Any) -> Any:
            half = isinstance(value, torch.Tensor) and value.dtype in halves
            return value.float() if half else value

        with torch.autocast(self._step.job.device_type, enabled=False):
            with self._step.recorder.paused():
                args, kwargs = tree_map(widen, (args, kwargs))
            try:
                return func(*args, **kwargs)
            except Exception:
                # It is not the precision that is wrong.
                raise error from None


def _numbered(device: Any) -> Any:
    """``"cuda"`` as ``cuda:0``: torch would ask the device for its number."""
    if type(device) is int:
        return torch.device("cuda", device)
    if isinstance(device, str | torch.device) and str(device) == "cuda":
        return torch.device("cuda", 0)
    return device


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave torch's, Python's and NumPy's random numbers where they were."""
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)


@contextmanager
def _eager() -> Iterator[None]:
    """Run compiled modules and functions uncompiled, if there can be any."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing a traceback for each fake kernel that raises; it is a finding."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _loss_in(output: Any) -> Any:
    """The loss, where a model that was given labels returns it among its outputs."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) and not loss.dim() else output


def _needs_the_device(error: Exception) -> bool:
    # The last is what a build with CUDA says on a machine without it.
    return isinstance(error, UnsupportedOperatorException | torch.AcceleratorError) or any(
        phrase in str(error)
        for phrase in ("not compiled with CUDA", "Found no NVIDIA driver", "accelerator")
    )


def _module_of(model: nn.Module, error: Exception) -> str:
    """The innermost module of the model in whose method the error was raised."""
    names = module_names(model)
    found = OUTSIDE
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            found = names[owner]
    return found


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
