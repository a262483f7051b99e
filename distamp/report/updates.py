"""Measuring which updates of a step half precision weights lose, because rounding undoes them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    zero_local_optimizer,
)
from distamp.report.following import local_of

__all__ = ["lost_updates"]

_HALF = (torch.float16, torch.bfloat16)
# Attributes of an optimizer instance that call the optimizer itself, also in a copy of it.
_BOUND = frozenset({"step", "zero_grad", "__getstate__"})


@torch.no_grad()
def lost_updates(
    step: Callable[[], Any], model: nn.Module, dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Run one step, and return by module the share of updates that half precision weights lose.

    An update is lost if it is not zero, and adding it to the weight in half precision gives the
    same weight. An update of exactly 0 does not count.

    - Of a float32 model it measures what weights of ``dtype`` without masters would lose.
    - Of a half precision model with masters, split ones too, it does the same from the masters.
    - Of a half precision model without masters it measures what the step lost. The reference is
      the step of a float32 copy of the optimizer, which needs memory for that copy.

    Parameters that are sharded count with this rank's part.

    Args:
        step: Takes nothing; runs forward, backward and optimizer, as the loop does.
        model: That it trains.
        dtype: ``torch.bfloat16`` or ``torch.float16``, for parameters that are float32. Parameters
            in half precision count in their own dtype.

    Returns:
        A share from 0 to 1 for each module that has parameters with an update.

    Raises:
        ConfigError: The step updated half precision parameters in a way that cannot be measured:
            by masters that distamp does not know, without a ``torch.optim.Optimizer``, with a
            closure, or by an optimizer that cannot be copied.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for module, name in module_names(model).items():
        # Shards, which the optimizer steps, although FSDP2 may have parameters gathered.
        for parameter in sharded_params(module.parameters(recurse=False)):
            names[id(parameter)].append(name)
    parameters = [each for each in sharded_params(model.parameters()) if _has_rounding(each)]
    before = [(each, _elements(each).clone()) for each in parameters]
    recorder = _UpdateRecorder([each for each in parameters if each.dtype in _HALF])
    with recorder.recording(), torch.enable_grad():
        step()
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    measured = recorder.lost
    for parameter, old in before:
        if parameter.dtype not in _HALF:
            measured.append((parameter, *_count_rounded_away(old, _elements(parameter), dtype)))
    recorder.raise_if_unmeasured([(p, old) for p, old in before if p.dtype in _HALF])
    for tensor, lost, updated in measured:
        for name in names[id(tensor)]:
            counts[name][0] += lost
            counts[name][1] += updated
    # Modules in the order of the model.
    ordered = [name for name in dict.fromkeys(module_names(model).values()) if name in counts]
    return {name: counts[name][0] / counts[name][1] for name in ordered if counts[name][1]}


class _UpdateRecorder:
    """Counts lost updates of half precision parameters, by hooks around optimizer steps.

    Args:
        parameters: The half precision parameters of the model.

    Attributes:
        lost: Parameter, number of lost updates, and number of updates that are not zero.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self.lost: list[tuple[Tensor, int, int]] = []
        self._parameters = {id(each): each for each in parameters}
        self._covered: set[int] = set()
        self._foreign: list[str] = []
        self._failures: list[str] = []
        self._pending: dict[int, Callable[[], None]] = {}
        self._is_copying = False

    @contextmanager
    def recording(self) -> Iterator[None]:
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

    def raise_if_unmeasured(self, before: list[tuple[Tensor, Tensor]]) -> None:
        """Raise for half precision parameters whose update is unknown.

        Args:
            before: The parameters, with their elements before the step.

        Raises:
            ConfigError: There are some.
        """
        advice = (
            "Measure the model in float32 before it is cast, or step it with a torch.optim "
            "optimizer, with or without distamp's masters."
        )
        if self._failures:
            raise ConfigError(f"lost_updates cannot measure {self._failures[0]}. {advice}")
        unknown = [(p, old) for p, old in before if p.requires_grad and id(p) not in self._covered]
        moved = [p for p, old in unknown if not torch.equal(_elements(p), old)]
        if moved:
            raise ConfigError(
                f"lost_updates cannot measure {len(moved)} half precision parameters, because "
                f"they changed without an optimizer step that holds them or their masters. {advice}"
            )
        if unknown and self._foreign:
            raise ConfigError(
                f"lost_updates cannot measure {len(unknown)} half precision parameters, because "
                f"the step ran {self._foreign[0]}, which are neither parameters of the model nor "
                f"masters that distamp made. {advice}"
            )

    @torch.no_grad()
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._parameters or self._is_copying or is_nested_step(optimizer):
            return
        if zero_local_optimizer(optimizer) is not None:
            # Each rank measures its share, which the optimizer inside steps, and receives the rest.
            self._covered |= {id(parameter) for parameter in params_of(optimizer)}
            return
        masters = masters_of(optimizer)
        if masters is not None:
            rows = [
                (parameter, master, _elements(masters.fp32_value(master)).clone())
                for parameter, master in masters.pairs()
                if id(parameter) in self._parameters
            ]
            self._covered |= {id(parameter) for parameter, *_ in rows}

            def count() -> None:
                for parameter, master, old in rows:
                    new = _elements(masters.fp32_value(master))
                    counted = _count_rounded_away(old, new, parameter.dtype)
                    self.lost.append((parameter, *counted))

            self._pending[id(optimizer)] = count
            return
        stepped = [p for p in params_of(optimizer) if id(p) in self._parameters]
        if not stepped:
            self._foreign.append(describe_optimizer(optimizer))
            return
        self._covered |= {id(parameter) for parameter in stepped}
        if find_closure(args[1:], kwargs) is not None:
            self._failures.append(f"{describe_optimizer(optimizer)}, whose step has a closure")
            return
        old = [_elements(parameter).clone() for parameter in stepped]
        self._is_copying = True
        try:
            updates = _updates_in_float32(optimizer, stepped)
        except Exception as error:
            self._failures.append(
                f"{describe_optimizer(optimizer)}, because a float32 copy of it raised "
                f"{type(error).__name__}: {str(error).rstrip('.')}"
            )
            return
        finally:
            self._is_copying = False

        def compare() -> None:
            for parameter, before, update in zip(stepped, old, updates, strict=True):
                updated = update != 0
                stayed = _elements(parameter) == before
                self.lost.append((parameter, int((updated & stayed).sum()), int(updated.sum())))

        self._pending[id(optimizer)] = compare

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_nested_step(optimizer) and not self._is_copying:
            self._pending.pop(id(optimizer), lambda: None)()


def _updates_in_float32(optimizer: torch.optim.Optimizer, stepped: list[Tensor]) -> list[Tensor]:
    """Step a float32 copy of an optimizer; return the update of each of these parameters."""
    copies: dict[int, Tensor] = {}
    for parameter in params_of(optimizer):
        wide = _widened(parameter.detach().clone())
        copies[id(parameter)] = nn.Parameter(wide, requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            copies[id(parameter)].grad = _widened(parameter.grad.detach().clone())
    memo: dict[int, Any] = {**copies}
    optimizer_copy = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name not in vars(optimizer_copy) and name not in _BOUND:
            # Subclasses and scalers keep attributes that torch's __getstate__ leaves out.
            vars(optimizer_copy)[name] = copy.deepcopy(value, memo)
    for state in optimizer_copy.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and value.dim():
                state[key] = _widened(value)
    before = {id(p): _elements(copies[id(p)]).clone() for p in stepped}
    with _random_states_kept():
        type(optimizer_copy).step(optimizer_copy)
    return [_elements(copies[id(p)]) - before[id(p)] for p in stepped]


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore random states at the end: an optimizer may round stochastically."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        devices, device_type = [], "cuda"
    else:
        devices, device_type = [torch.accelerator.current_device_index()], accelerator.type
    with torch.random.fork_rng(devices, device_type=device_type):
        yield


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _has_rounding(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _elements(tensor: Tensor) -> Tensor:
    """Return the real elements of this rank's part of a tensor."""
    local = local_of(tensor)
    return torch.view_as_real(local) if local.is_complex() else local


def _count_rounded_away(old: Tensor, new: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return how many updates rounding to ``dtype`` undoes, and how many are not zero."""
    weight = old.to(dtype)
    update = new.double() - old.double()
    rounded = (weight.double() + update).to(dtype)
    updated = update != 0
    return int((updated & (rounded == weight)).sum()), int(updated.sum())
