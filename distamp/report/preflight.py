"""preflight: the precision report of a forward pass on a device that is not here.

Shapes and dtypes are real, nothing is computed and no memory is taken. The tensors are fake ones of
the CPU, as a torch without the device can make no others, and follow the other device's op lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
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
from distamp.report.recording import precision_report
from distamp.report.rows import PrecisionReport, Written

__all__ = ["Preflight", "preflight"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Preflight(Written):
    """The result of :func:`preflight`.

    Attributes:
        report: What ran until the forward pass, and ``loss_fn``, ended or failed.
        findings: The places to correct, as of :meth:`PrecisionReport.findings`; an error means
            that the forward pass failed.
    """

    report: PrecisionReport
    findings: Findings

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of severity error."""
        return tuple(each for each in self.findings if each.severity == "error")

    def __str__(self) -> str:
        return f"{self.report}\n\n{self.findings}"

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return {"findings": [*map(asdict, self.findings)], "report": self.report.to_dict()}


def preflight(
    model: nn.Module,
    example_inputs: Any,
    device_type: str = "cuda",
    level: LevelLike = "fp16",
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
) -> Preflight:
    """Show the dtypes of a forward pass on a device that need not be present.

    The table of :func:`precision_report`, of fake tensors; the model may stand on the meta device.
    What a forward pass decides by values that it computed it decides by 0: a comparison is False,
    an index the first (a router sends every token to the first experts). What stops the pass, such
    as code that asks for the device itself, is an error among the findings. Where a device has
    several kernels for one op, the CPU's are shown. The model is as before afterwards.
    The op lists of another device, which it sets for CPU tensors, are removed when it returns.

    Args:
        model: On any device, the meta device too.
        example_inputs: One tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments. Of floating point tensors only shapes and dtypes count, of masks, lengths and
            the like values do.
        device_type: ``"cuda"``, ``"cpu"`` or another that this torch has autocast for.
        level: A level whose autocast region is shown: ``"fp16"``, ``"bf16"``, or the dtype of one.
        loss_fn: Takes the model's output, returns the loss; runs inside the region.

    Returns:
        The report and the findings, a :class:`Preflight`.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: This torch has no autocast for ``device_type``, or ``level`` casts no ops one
            by one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"preflight takes the model, a torch.nn.Module, got {type(model).__name__}")
    autocast_key(device_type)
    level = PrecisionLevel.from_name(level)
    if not level.autocasts or level.linear_recipe is not None:
        raise ConfigError(
            f"preflight() shows the casts of an autocast region, and {level.name} is not one of "
            "its levels. Pass level='fp16' or level='bf16'."
        )
    dtype = level.compute
    kwargs = example_inputs if isinstance(example_inputs, Mapping) else {}
    args = example_inputs if isinstance(example_inputs, tuple | list) else (example_inputs,)
    args = () if kwargs else args
    lists = None if device_type == "cpu" else _lists_of(device_type)
    found: tuple[Finding, ...] = ()
    fakes = _FakeOnCPU(model, example_inputs, device_type, dtype)
    with (
        _left_alone(model),
        _region_there(device_type, dtype),
        torch.random.fork_rng(devices=()),
        autocast("cpu", dtype, ops=lists),
        precision_report(model) as report,
        ModuleTracker() as running,
        fakes,
    ):
        try:
            output = model(*fakes.fakes_of(tuple(args)), **fakes.fakes_of(dict(kwargs)))
            loss = None if loss_fn is None else loss_fn(output)
            if isinstance(loss, Tensor) and loss.dtype is torch.float16:
                found = (replace(FP16_LOSS, op=fakes.function),)
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            what = f"stops here: {type(error).__name__}: {first}"
            fix = "use precision_report on a real step, if this only fails with fake tensors"
            at = max(running.parents - {"Global"}, key=len, default="").partition(".")[2]
            found = (Finding("error", "fails", at, fakes.function, what, fix),)
    about = f"{device_type}, {str(dtype).removeprefix('torch.')}, simulated"
    done = PrecisionReport(report.rows, report.model, about, report.settings)
    return Preflight(done, Findings((*found, *_forbidden(done, device_type), *done.findings())))


def _lists_of(device_type: str) -> OpLists:
    """Return op lists that cast CPU tensors like tensors of another device type."""
    lists, cpus = OpLists.of_torch(device_type), OpLists.of_torch("cpu")
    return replace(lists, unlisted=cpus.by_op().keys() - lists.by_op().keys())


def _forbidden(report: PrecisionReport, device_type: str) -> Iterator[Finding]:
    """Return findings for ops that torch refuses in every region except the CPU's."""
    for row in report.rows:
        if row.op == "binary_cross_entropy" and device_type != "cpu":
            what = f"raises in a region of {device_type}: its fp16 gradients overflow"
            fix = "return logits and use binary_cross_entropy_with_logits (BCEWithLogitsLoss)"
            yield Finding("error", "forbidden", row.module, row.op, what, fix)


class _FakeOnCPU(TorchFunctionMode):
    """Has torch functions take the fakes of some tensors in their place.

    Fakes are floating point. What is computed of real tensors alone, such as masks and lengths,
    stays real and decides as it would on the device; what fakes are compared or sorted to is 0.

    Args:
        model: Its parameters and buffers get fakes.
        inputs: So do its floating point inputs, and those on the meta device.
        device_type: Whose regions, opened in the model by name, are followed.
        dtype: Of the region around.
    """

    def __init__(self, model: nn.Module, inputs: Any, device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self._device_type = device_type
        self._region = (True, dtype)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.function = ""
        given = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
        replaced = [each for each in given if _floating(each) or each.is_meta]
        replaced += [*model.parameters(), *model.buffers()]
        # A fake has strides, which a sparse or nested tensor lacks: it stays real.
        replaced = [each for each in replaced if each.layout is torch.strided]
        replaced = [each for each in replaced if not each.is_nested]
        self._fakes = {
            id(each): self._fake(each if _floating(each) else each.clone()) for each in replaced
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.function = getattr(func, "__name__", "")
        args, kwargs = self.fakes_of((args, kwargs or {}))
        if func is Tensor.cuda:
            func, args = Tensor.cpu, args[:1]
        elif func is Tensor.to:
            args = tuple(_CPU if isinstance(each, str | torch.device) else each for each in args)
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        if not any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        try:
            with self._mode, self._as_there():
                out = func(*args, **kwargs)
        except RuntimeError:
            # It has no fake kernel, or one that would have to know values.
            args, kwargs = tree_map_only(FakeTensor, _zeros, (args, kwargs))
            out = func(*args, **kwargs)
        return tree_map_only(Tensor, self._fake, out)

    def _as_there(self) -> AbstractContextManager[Any]:
        """Regions that the model left or switched off for the other device, on the CPU."""
        on, dtype = _state(self._device_type)
        if (on, dtype) == self._region:
            return nullcontext()
        return torch.autocast("cpu", dtype, enabled=on)

    def fakes_of(self, values: Any) -> Any:
        """The same values with fakes in the place of what they stand for."""
        return tree_map_only(Tensor, lambda each: self._fakes.get(id(each), each), values)

    def _fake(self, tensor: Tensor) -> Tensor:
        """A fake of a floating point tensor; of another one zeros, if its values are unknown."""
        unknown = isinstance(tensor, FakeTensor) or tensor.is_meta
        if not _floating(tensor):
            return _zeros(tensor) if unknown else tensor
        if isinstance(tensor, FakeTensor):
            return tensor
        with _disable_current_modes(), self._mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            return made.requires_grad_(tensor.requires_grad)


@contextmanager
def _region_there(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Switch autocast on for a device that is not here, so that code can switch it off by name."""
    before = _state(device_type)
    # torch's own regions ask these whether there is such a device, and switch themselves off.
    with (
        mock.patch.object(
            torch.cuda.amp.common, "amp_definitely_not_available", return_value=False
        ),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
    ):
        try:
            _set_state(device_type, True, dtype)
            yield
        finally:
            _set_state(device_type, *before)


def _state(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _set_state(device_type: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)


def _floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _zeros(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Put every module's attributes and buffers back, whatever forward assigned."""
    kept = [(each, dict(vars(each)), dict(vars(each)["_buffers"])) for each in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            vars(module).clear()
            vars(module).update(attributes)
            attributes["_buffers"].clear()
            attributes["_buffers"].update(buffers)
