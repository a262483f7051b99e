"""preflight: the precision report of a forward pass on a device that need not be present.

Shapes and dtypes are real, but nothing is computed and no memory is taken. A torch without the
device can only make fake tensors of the CPU, which follow the op lists of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.module_tracker import ModuleTracker

from distamp.autocast.op_kernels import autocast_key
from distamp.autocast.op_lists import OpLists
from distamp.autocast.region import autocast
from distamp.errors import ConfigError
from distamp.precision_level import LevelLike, PrecisionLevel
from distamp.report.findings import FP16_LOSS, Finding, Findings
from distamp.report.formatting import JsonResult
from distamp.report.precision_report import PrecisionReport, precision_report

__all__ = ["Preflight", "preflight"]

_CPU = torch.device("cpu")
_AutocastState = tuple[bool, torch.dtype]


@dataclass(frozen=True, slots=True)
class Preflight(JsonResult):
    """The result of :func:`preflight`.

    Attributes:
        report: The ops up to the end or the failure of the forward pass and of ``loss_fn``.
        findings: The places to correct, as of :meth:`PrecisionReport.findings`; an error means
            that the forward pass failed.
    """

    report: PrecisionReport
    findings: Findings

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of severity error."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def __str__(self) -> str:
        return f"{self.report}\n\n{self.findings}"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        return {**self.findings.to_dict(), "report": self.report.to_dict()}


def preflight(
    model: nn.Module,
    example_inputs: Any,
    device_type: str = "cuda",
    level: LevelLike = "fp16",
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
) -> Preflight:
    """Show the dtypes of a forward pass on a device that need not be present.

    The result has the table of :func:`precision_report`, of fake tensors. The model may be on the
    meta device. If a forward pass decides by values that it computed, these values are 0: a
    comparison is False, an index is the first (a router sends every token to the first experts).
    An error that ends the pass, such as an error in code that needs the device itself, is a
    finding of severity error. If a device has several kernels for one op, the table shows the
    CPU's. The model is unchanged afterwards, and the op lists that preflight sets for CPU tensors
    are removed when it returns.

    Args:
        model: The model, on any device, also on the meta device.
        example_inputs: One tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments. Only shapes and dtypes of floating point tensors count. Values of masks,
            lengths and other integers count.
        device_type: ``"cuda"``, ``"cpu"`` or another device type for which this torch has
            autocast.
        level: A level with an autocast region: ``"fp16"``, ``"bf16"``, or a dtype.
        loss_fn: A function from the model's output to the loss, which runs inside the region.

    Returns:
        The report and the findings, a :class:`Preflight`.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: This torch has no autocast for ``device_type``, or ``level`` casts no ops one
            by one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"preflight() takes the model, a torch.nn.Module, not {type(model).__name__}."
        )
    autocast_key(device_type)
    dtype = _region_dtype(level)
    op_lists = None if device_type == "cpu" else _op_lists_for_cpu(device_type)
    fakes = _FakeOnCPU(model, example_inputs, device_type, dtype)
    findings: list[Finding] = []
    with (
        _restore_modules(model),
        _pretend_autocast(device_type, dtype),
        torch.random.fork_rng(devices=()),
        autocast("cpu", dtype, ops=op_lists),
        precision_report(model) as report,
        ModuleTracker() as modules,
        fakes,
    ):
        try:
            output = _call_with_fakes(model, example_inputs, fakes)
            if loss_fn is not None:
                findings += _check_loss(loss_fn(output), fakes)
        except Exception as error:
            findings.append(_failure(error, modules, fakes))
    dtype_name = str(dtype).removeprefix("torch.")
    device = f"{device_type}, {dtype_name}, simulated"
    complete = PrecisionReport(report.rows, report.model, device, report.settings)
    findings += _refused_ops(complete, device_type)
    findings += complete.findings()
    return Preflight(complete, Findings(findings))


def _region_dtype(level: LevelLike) -> torch.dtype:
    """Return the dtype of a level's autocast region."""
    level = PrecisionLevel.from_name(level)
    if not level.autocasts or level.linear_recipe is not None:
        raise ConfigError(
            f"preflight() shows the casts of an autocast region, and {level.name} is not one of "
            "its levels. Pass level='fp16' or level='bf16'."
        )
    return level.compute


def _call_with_fakes(model: nn.Module, example_inputs: Any, fakes: _FakeOnCPU) -> Any:
    """Run the forward pass with the fakes of its inputs."""
    if isinstance(example_inputs, Mapping) and example_inputs:
        return model(**fakes.substitute(dict(example_inputs)))
    if isinstance(example_inputs, tuple | list):
        return model(*fakes.substitute(tuple(example_inputs)))
    return model(fakes.substitute(example_inputs))


def _check_loss(loss: Any, fakes: _FakeOnCPU) -> list[Finding]:
    if isinstance(loss, Tensor) and loss.dtype is torch.float16:
        return [replace(FP16_LOSS, op=fakes.function)]
    return []


def _failure(error: Exception, modules: ModuleTracker, fakes: _FakeOnCPU) -> Finding:
    """Return an error that ended the forward pass as a finding."""
    lines = str(error).strip().splitlines() or [""]
    innermost = max(modules.parents - {"Global"}, key=len, default="")
    _, _, module = innermost.partition(".")
    return Finding(
        "error",
        "fails",
        module,
        fakes.function,
        f"stops here: {type(error).__name__}: {lines[0]}",
        "use precision_report on a real step, if this only fails with fake tensors",
    )


def _op_lists_for_cpu(device_type: str) -> OpLists:
    """Return op lists that cast CPU tensors like tensors of another device type."""
    op_lists = OpLists.of_torch(device_type)
    cpu_ops = OpLists.of_torch("cpu").by_op().keys()
    return replace(op_lists, unlisted=cpu_ops - op_lists.by_op().keys())


def _refused_ops(report: PrecisionReport, device_type: str) -> list[Finding]:
    """Return findings for ops that torch refuses in every region except the CPU's."""
    findings = []
    for row in report.rows:
        if row.op == "binary_cross_entropy" and device_type != "cpu":
            message = f"raises in a region of {device_type}: its fp16 gradients overflow"
            fix = "return logits and use binary_cross_entropy_with_logits (BCEWithLogitsLoss)"
            findings.append(Finding("error", "forbidden", row.module, row.op, message, fix))
    return findings


class _FakeOnCPU(TorchFunctionMode):
    """Function mode that passes fake tensors of the CPU instead of some tensors.

    All fakes are floating point. Results of real tensors, such as masks and lengths, stay real and
    decide as they would on the device. Results of fakes that are not floating point are 0.

    Args:
        model: The model; its parameters and buffers get fakes.
        inputs: The inputs; tensors that are floating point or on the meta device get fakes.
        device_type: The device type; regions of it inside the model have an effect.
        dtype: The dtype of the region around the model.

    Attributes:
        function: The name of the last torch function.
    """

    def __init__(self, model: nn.Module, inputs: Any, device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.function = ""
        self._device_type = device_type
        self._region: _AutocastState = (True, dtype)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes: dict[int, Tensor] = {}
        self._add_fakes(tensor for tensor in _tensors(inputs) if _has_fake(tensor))
        self._add_fakes(model.parameters())
        self._add_fakes(model.buffers())

    def _add_fakes(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            # A sparse or nested tensor has no strides for a fake, so it stays real.
            if tensor.layout is torch.strided and not tensor.is_nested:
                source = tensor if _is_floating(tensor) else tensor.clone()
                self._fakes[id(tensor)] = self._fake(source)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        # Reading an attribute of a tensor is a torch function, too.
        if not name.startswith("__"):
            self.function = name
        args, kwargs = self.substitute((args, kwargs or {}))
        if func is Tensor.cuda:
            func, args = Tensor.cpu, args[:1]
        elif func is Tensor.to:
            args = tuple(_CPU if isinstance(arg, str | torch.device) else arg for arg in args)
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        if not any(isinstance(tensor, FakeTensor) for tensor in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        try:
            with self._mode, self._region_of_device():
                output = func(*args, **kwargs)
        except RuntimeError:
            # The op has no fake kernel, or its fake kernel needs values.
            args, kwargs = tree_map_only(FakeTensor, _zeros, (args, kwargs))
            output = func(*args, **kwargs)
        return tree_map_only(Tensor, self._fake, output)

    @contextmanager
    def _region_of_device(self) -> Iterator[None]:
        """Apply a region that the model opened for the device to CPU tensors."""
        state = _autocast_state(self._device_type)
        if state == self._region:
            yield
            return
        enabled, dtype = state
        with torch.autocast("cpu", dtype, enabled=enabled):
            yield

    def substitute(self, values: Any) -> Any:
        """Return nested values with fakes instead of their tensors."""
        return tree_map_only(Tensor, lambda tensor: self._fakes.get(id(tensor), tensor), values)

    def _fake(self, tensor: Tensor) -> Tensor:
        """Return a fake of a floating point tensor, and zeros for integers without values."""
        if not _is_floating(tensor):
            has_values = not isinstance(tensor, FakeTensor) and not tensor.is_meta
            return tensor if has_values else _zeros(tensor)
        if isinstance(tensor, FakeTensor):
            return tensor
        with _disable_current_modes(), self._mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def _pretend_autocast(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Switch autocast on for an absent device, so that the model's regions of it have an effect."""
    enabled_before, dtype_before = _autocast_state(device_type)
    # Without its device, a region of torch switches itself off by these functions.
    with (
        mock.patch.object(
            torch.cuda.amp.common, "amp_definitely_not_available", return_value=False
        ),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
    ):
        try:
            _set_autocast_state(device_type, True, dtype)
            yield
        finally:
            _set_autocast_state(device_type, enabled_before, dtype_before)


def _autocast_state(device_type: str) -> _AutocastState:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _set_autocast_state(device_type: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _has_fake(tensor: Tensor) -> bool:
    return _is_floating(tensor) or tensor.is_meta


def _zeros(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


@contextmanager
def _restore_modules(model: nn.Module) -> Iterator[None]:
    """Restore every attribute and buffer that the forward pass assigns to a module."""
    saved = []
    for module in model.modules():
        attributes = dict(vars(module))
        saved.append((module, attributes, dict(attributes["_buffers"])))
    try:
        yield
    finally:
        for module, attributes, buffers in saved:
            vars(module).clear()
            vars(module).update(attributes)
            attributes["_buffers"].clear()
            attributes["_buffers"].update(buffers)
