"""lost_updates: the share of a step's updates that rounding to half precision undoes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from distamp.errors import ConfigError
from distamp.fsdp_params import sharded_params
from distamp.masters import masters_of
from distamp.module_names import module_names
from distamp.optim_utils import (
    describe_optimizer,
    find_closure,
    is_nested_step,
    params_of,
    view_of,
    zero_local_optimizer,
)
from distamp.report.formatting import dtype_abbr, is_norm, text_table
from distamp.report.tensors import local_tensor

__all__ = ["LostUpdates", "lost_updates"]

_HEADINGS = ("module", "class", "measured", "updated", "lost", "share")
_HALF = (torch.float16, torch.bfloat16)
# Attributes of an optimizer that call the optimizer itself, also in a copy of it.
_BOUND = frozenset({"step", "zero_grad", "__getstate__"})
_ADVICE = (
    "Measure the model in float32 before it is cast, or step it with a torch.optim optimizer, with "
    "or without distamp's masters."
)


@dataclass
class ModuleUpdates:
    """The updates of one module.

    Attributes:
        name: The module's name; ``""`` is the model itself.
        kind: Its class name.
        is_norm: Whether its class is a norm.
        values: The tensors that were measured, such as ``"bf16 weights"``.
        update_count: The number of elements with an update that is not zero.
        lost_count: The number of these elements that do not move.
    """

    name: str
    kind: str
    is_norm: bool
    values: str = ""
    update_count: int = 0
    lost_count: int = 0

    @property
    def share(self) -> float:
        """The share of lost updates."""
        return self.lost_count / self.update_count

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the module in a table."""
        name = self.name or "(model)"
        update_count = f"{self.update_count:,}"
        lost_count = f"{self.lost_count:,}"
        share = f"{self.share:.1%}"
        return name, self.kind, self.values, update_count, lost_count, share


class LostUpdates(dict[str, float]):
    """The share of lost updates by module, norms first; ``print`` shows a table.

    Args:
        rows: The updates of each module.
    """

    def __init__(self, rows: Iterable[ModuleUpdates] = ()) -> None:
        self._rows = sorted(rows, key=lambda row: not row.is_norm)
        super().__init__()
        for row in self._rows:
            self[row.name] = row.share

    def __str__(self) -> str:
        update_count = lost_count = 0
        for row in self._rows:
            update_count += row.update_count
            lost_count += row.lost_count
        title = f"{lost_count:,} of {update_count:,} updates are lost, and move no element"
        lines = [title]
        lines += text_table(_HEADINGS, [row.cells() for row in self._rows])
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        modules = {}
        for row in self._rows:
            values = asdict(row)
            values["share"] = row.share
            modules[row.name] = values
        return {"modules": modules}


@torch.no_grad()
def lost_updates(
    step: Callable[[], Any],
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> LostUpdates:
    """Run one step, and return by module the share of updates that half precision weights lose.

    An update is lost if it is not zero, and the weight plus the update is the same weight in half
    precision. The update contains weight decay. An update of exactly 0 does not count.

    - For a float32 model the shares are of weights of ``dtype`` without masters.
    - For a half precision model with masters, split ones too, the shares come from the masters.
    - For a half precision model without masters the shares are of this step. The reference is the
      step of a float32 copy of the optimizer, which needs memory for that copy.

    Of sharded parameters this rank's part counts.

    Args:
        step: A function without arguments that runs forward, backward and optimizer, like the
            training loop.
        model: The model that the step trains.
        optimizers: The optimizer or optimizers whose parameters count. All parameters of the model
            count if it is None.
        dtype: ``torch.bfloat16`` or ``torch.float16``, for parameters that are float32. Parameters
            in half precision count in their own dtype.

    Returns:
        A dict with a share from 0 to 1 for each module that has parameters with an update, norms
        first. ``print`` shows a table, and ``to_dict()`` has the counts.

    Raises:
        TypeError: ``step``, ``model`` or ``optimizers`` is another object.
        ConfigError: The step updated half precision parameters in a way that cannot be measured:
            by masters that are not distamp's, without a ``torch.optim.Optimizer``, with a closure,
            or by an optimizer that cannot be copied.
    """
    if not callable(step) or not isinstance(model, nn.Module):
        raise TypeError(
            "lost_updates takes a function that runs a step, and the model, a torch.nn.Module: got "
            f"{type(step).__name__} and {type(model).__name__}."
        )
    params = [param for param in sharded_params(model.parameters()) if _is_rounded(param)]
    if optimizers is not None:
        counted = set(map(id, _params_of_optimizers(optimizers)))
        params = [param for param in params if id(param) in counted]
    values_before = [_elements(param).clone() for param in params]
    recorder = _UpdateRecorder([param for param in params if param.dtype in _HALF])
    with recorder.record(), torch.enable_grad():
        step()
    losses = list(recorder.losses)
    half_params = []
    for param, old_values in zip(params, values_before, strict=True):
        if param.dtype in _HALF:
            half_params.append((param, old_values))
        else:
            losses.append(_loss_by_rounding(param, old_values, _elements(param), dtype))
    recorder.check_all_measured(half_params)
    return LostUpdates(_updates_by_module(model, losses))


def _params_of_optimizers(optimizers: Any) -> list[Tensor]:
    """Return the parameters of the model that optimizers step."""
    # A wrapper of an optimizer need not be a subclass of torch's.
    if hasattr(optimizers, "step"):
        optimizers = [optimizers]
    params: list[Tensor] = []
    try:
        for optimizer in optimizers:
            params += view_of(optimizer).model_params()
    except (TypeError, AttributeError) as error:
        raise TypeError(
            "optimizers= of lost_updates is an optimizer or several of them, not "
            f"{type(optimizers).__name__}. Pass a dtype by name: dtype=torch.float16."
        ) from error
    return params


class _Loss(NamedTuple):
    """The number of lost updates of a parameter, and of its updates that are not zero.

    Attributes:
        values: As of `ModuleUpdates`.
    """

    param: Tensor
    values: str
    lost_count: int
    update_count: int


def _updates_by_module(model: nn.Module, losses: Sequence[_Loss]) -> list[ModuleUpdates]:
    """Return the updates of each module that has any, in the model's order."""
    losses_by_param: dict[int, list[_Loss]] = {}
    for loss in losses:
        losses_by_param.setdefault(id(loss.param), []).append(loss)
    rows: dict[str, ModuleUpdates] = {}
    for module, name in module_names(model).items():
        row = rows.setdefault(name, ModuleUpdates(name, "", False))
        # A wrapper and its module have one name, and the module's class counts.
        row.kind = type(module).__name__
        row.is_norm = is_norm(module)
        # The optimizer steps shards, although FSDP2 may have gathered the parameters.
        for param in sharded_params(module.parameters(recurse=False)):
            for loss in losses_by_param.get(id(param), ()):
                row.values = loss.values
                row.update_count += loss.update_count
                row.lost_count += loss.lost_count
    rows_with_updates = []
    for row in rows.values():
        if row.update_count:
            rows_with_updates.append(row)
    return rows_with_updates


class _UpdateRecorder:
    """Counts lost updates of half precision parameters, by hooks around optimizer steps.

    Args:
        params: The half precision parameters of the model.

    Attributes:
        losses: The counts of the steps so far.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.losses: list[_Loss] = []
        self._params = {id(param): param for param in params}
        self._measured: set[int] = set()
        self._foreign_optimizers: list[str] = []
        self._failures: list[str] = []
        self._pending: dict[int, Callable[[], list[_Loss]]] = {}
        self._is_copying = False

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record every optimizer step in the block."""
        hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def check_all_measured(self, half_params: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Raise if the update of a half precision parameter is unknown.

        Args:
            half_params: The parameters, with their elements before the step.

        Raises:
            ConfigError: The update of a parameter is unknown.
        """
        if self._failures:
            raise ConfigError(f"lost_updates cannot measure {self._failures[0]}. {_ADVICE}")
        unmeasured = 0
        changed = 0
        for param, old_values in half_params:
            if param.requires_grad and id(param) not in self._measured:
                unmeasured += 1
                changed += not torch.equal(_elements(param), old_values)
        if changed:
            raise ConfigError(
                f"lost_updates cannot measure {changed} half precision parameters, because they "
                f"changed without an optimizer step that holds them or their masters. {_ADVICE}"
            )
        if unmeasured and self._foreign_optimizers:
            raise ConfigError(
                f"lost_updates cannot measure {unmeasured} half precision parameters, because the "
                f"step ran {self._foreign_optimizers[0]}, which are neither parameters of the "
                f"model nor masters that distamp made. {_ADVICE}"
            )

    @torch.no_grad()
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._params or self._is_copying or is_nested_step(optimizer):
            return
        if zero_local_optimizer(optimizer) is not None:
            # The optimizer inside steps and measures this rank's part of the parameters.
            self._measured |= {id(param) for param in params_of(optimizer)}
        elif masters_of(optimizer) is not None:
            self._pending[id(optimizer)] = self._measure_masters(masters_of(optimizer))
        else:
            self._measure_params(optimizer, args, kwargs)

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_nested_step(optimizer) or self._is_copying:
            return
        measure = self._pending.pop(id(optimizer), None)
        if measure is not None:
            self.losses += measure()

    def _measure_masters(self, masters: Any) -> Callable[[], list[_Loss]]:
        """Return a function that measures the step of masters after it."""
        rows = []
        for param, master in masters.pairs():
            if id(param) in self._params:
                self._measured.add(id(param))
                rows.append((param, master, _elements(masters.fp32_value(master)).clone()))

        def measure() -> list[_Loss]:
            losses = []
            for param, master, old_values in rows:
                new_values = _elements(masters.fp32_value(master))
                loss = _loss_by_rounding(param, old_values, new_values, param.dtype)
                rounded_name = dtype_abbr(param.dtype)
                values = f"fp32 masters as {rounded_name}"
                losses.append(_Loss(param, values, loss.lost_count, loss.update_count))
            return losses

        return measure

    def _measure_params(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Step a float32 copy of an optimizer, and compare the step of the optimizer with it."""
        stepped = [param for param in params_of(optimizer) if id(param) in self._params]
        if not stepped:
            self._foreign_optimizers.append(describe_optimizer(optimizer))
            return
        self._measured |= {id(param) for param in stepped}
        if find_closure(args[1:], kwargs) is not None:
            self._failures.append(f"{describe_optimizer(optimizer)}, whose step has a closure")
            return
        values_before = [_elements(param).clone() for param in stepped]
        self._is_copying = True
        try:
            updates = _updates_in_float32(optimizer, stepped)
        except Exception as error:
            message = str(error).rstrip(".")
            self._failures.append(
                f"{describe_optimizer(optimizer)}, because a float32 copy of it raised "
                f"{type(error).__name__}: {message}"
            )
            return
        finally:
            self._is_copying = False

        def measure() -> list[_Loss]:
            losses = []
            for param, old_values, update in zip(stepped, values_before, updates, strict=True):
                is_updated = update != 0
                is_lost = is_updated & (_elements(param) == old_values)
                values = f"{dtype_abbr(param.dtype)} weights"
                losses.append(_Loss(param, values, int(is_lost.sum()), int(is_updated.sum())))
            return losses

        self._pending[id(optimizer)] = measure


def _updates_in_float32(optimizer: torch.optim.Optimizer, stepped: list[Tensor]) -> list[Tensor]:
    """Step a float32 copy of an optimizer; return the updates of these parameters."""
    copies: dict[int, Any] = {}
    for param in params_of(optimizer):
        values = _to_float32(param.detach().clone())
        param_copy = nn.Parameter(values, requires_grad=param.requires_grad)
        if param.grad is not None:
            param_copy.grad = _to_float32(param.grad.detach().clone())
        copies[id(param)] = param_copy
    memo = dict(copies)
    optimizer_copy = copy.deepcopy(optimizer, memo)
    attributes = vars(optimizer_copy)
    for name, value in vars(optimizer).items():
        if name not in attributes and name not in _BOUND:
            # Subclasses and scalers set attributes that torch's __getstate__ leaves out.
            attributes[name] = copy.deepcopy(value, memo)
    for state in optimizer_copy.state.values():
        if isinstance(state, dict):
            _widen_state(state)
    values_before = [_elements(copies[id(param)]).clone() for param in stepped]
    with _restore_random_states():
        type(optimizer_copy).step(optimizer_copy)
    updates = []
    for param, old_values in zip(stepped, values_before, strict=True):
        updates.append(_elements(copies[id(param)]) - old_values)
    return updates


def _widen_state(state: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            state[name] = _to_float32(value)


@contextmanager
def _restore_random_states() -> Iterator[None]:
    """Restore random states at the end, because an optimizer may round stochastically."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = []
    device_type = "cuda"
    if accelerator is not None:
        devices = [torch.accelerator.current_device_index()]
        device_type = accelerator.type
    with torch.random.fork_rng(devices, device_type=device_type):
        yield


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _is_rounded(param: Tensor) -> bool:
    return param.is_floating_point() or param.is_complex()


def _elements(tensor: Tensor) -> Tensor:
    """Return the real elements of this rank's part of a tensor."""
    local = local_tensor(tensor)
    return torch.view_as_real(local) if local.is_complex() else local


def _loss_by_rounding(
    param: Tensor, old_values: Tensor, new_values: Tensor, dtype: torch.dtype
) -> _Loss:
    """Return the number of updates of a parameter that rounding to ``dtype`` undoes."""
    weight = old_values.to(dtype)
    update = new_values.double() - old_values.double()
    is_updated = update != 0
    is_lost = is_updated & ((weight.double() + update).to(dtype) == weight)
    weight_name = dtype_abbr(param.dtype)
    rounded_name = dtype_abbr(dtype)
    values = f"{weight_name} weights as {rounded_name}"
    return _Loss(param, values, int(is_lost.sum()), int(is_updated.sum()))
