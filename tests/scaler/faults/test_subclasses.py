"""Frameworks subclass the scaler: their overrides are called where torch's class calls them.

torch.amp.GradScaler is the reference throughout: one class is written over both bases.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from distamp import DistGradScaler
from tests.ranks import RankPool
from tests.scaler.steps import INF, backward, leaf

WATCHED = (
    "scale",
    "unscale_",
    "_unscale_grads_",
    "_check_inf_per_device",
    "_maybe_opt_step",
    "step",
    "update",
    "get_scale",
    "state_dict",
)


def _logged(base: type[Any], log: list[str]) -> Any:
    """A subclass of ``base`` that overrides every watched method and says when it is called."""

    def override(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            log.append(f"{name}(")
            try:
                return getattr(base, name)(self, *args, **kwargs)
            finally:
                log.append(f"){name}")

        return method

    return type(f"Logged{base.__name__}", (base,), {name: override(name) for name in WATCHED})


def _calls(base: type[Any], fused: bool, how: str, gradients: tuple[float, ...]) -> list[Any]:
    log: list[Any] = []
    scaler = _logged(base, log)("cpu", init_scale=1024.0)
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    for gradient in gradients:
        optimizer.zero_grad()
        backward(scaler, parameter, gradient)
        if how == "unscale":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        log.append(parameter.item())
    log.append(scaler.get_scale())
    log.append(scaler.state_dict())
    return log


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("how", ["step", "unscale"])
@pytest.mark.parametrize("gradients", [(0.25, 0.25), (0.25, INF, 0.25)], ids=["clean", "overflow"])
def test_every_override_is_called_where_torch_calls_it(
    fused: bool, how: str, gradients: tuple[float, ...]
) -> None:
    ours = _calls(DistGradScaler, fused, how, gradients)
    assert ours == _calls(torch.amp.GradScaler, fused, how, gradients)


PATCHED = ("unscale_", "_unscale_grads_", "_check_inf_per_device", "_maybe_opt_step")


def _noting(log: list[Any], name: str, original: Any) -> Any:
    def noting(*args: Any) -> Any:
        log.append(name)
        return original(*args)

    return noting


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("where", ["class", "object"])
def test_what_is_patched_in_is_called_where_torch_calls_it(where: str, fused: bool) -> None:
    logs = []
    for base in (torch.amp.GradScaler, DistGradScaler):
        log: list[Any] = []
        scaler = base("cpu", init_scale=1024.0)
        parameter = leaf(1.0)
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
        with contextlib.ExitStack() as stack:
            target: Any = base if where == "class" else scaler
            for name in PATCHED:
                noting = _noting(log, name, getattr(target, name))
                stack.enter_context(mock.patch.object(target, name, noting))
            for gradient in (0.25, INF, 0.25):
                optimizer.zero_grad()
                backward(scaler, parameter, gradient)
                scaler.step(optimizer)
                scaler.update()
        logs.append([*log, parameter.item(), scaler.get_scale()])
    assert logs[0] == logs[1]
    assert len(logs[1]) > 5


# -- what an override does counts ------------------------------------------------------------------


def _takes_step_itself(base: type[Any]) -> Any:
    class Stepping(base):  # type: ignore[misc]
        """As torch_xla's: the step is taken in another way, which returns something."""

        def _maybe_opt_step(
            self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Any:
            assert optimizer_state["stage"] is OptState.UNSCALED
            if sum(v.item() for v in optimizer_state["found_inf_per_device"].values()):
                return "skipped"
            optimizer.step(*args, **kwargs)
            return "stepped"

    return Stepping("cpu", init_scale=1024.0)


def _sees_more(base: type[Any]) -> Any:
    class Strict(base):  # type: ignore[misc]
        """Counts a gradient above a bound as an overflow, too."""

        def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, *rest: Any) -> Any:
            found = super()._unscale_grads_(optimizer, inv_scale, *rest)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None and p.grad.abs().max() > 0.5:
                        found[p.grad.device] = torch.ones(())
            return found

    return Strict("cpu", init_scale=1024.0)


def _unscales_by_itself(base: type[Any]) -> Any:
    class Own(base):  # type: ignore[misc]
        """Does the whole of ``unscale_``, as ShardedGradScaler does."""

        def unscale_(self, optimizer: Any) -> None:
            if not self._enabled:
                return
            self._check_scale_growth_tracker("unscale_")
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.UNSCALED:
                raise RuntimeError("unscale_() has already been called")
            inv_scale = self._scale.double().reciprocal().float()
            found_inf = torch.full((1,), 0.0, device=self._scale.device)
            state["found_inf_per_device"] = self._unscale_grads_(
                optimizer, inv_scale, found_inf, True
            )
            state["stage"] = OptState.UNSCALED

    return Own("cpu", init_scale=1024.0)


def _updates_as_sharded(base: type[Any]) -> Any:
    class Sharded(base):  # type: ignore[misc]
        """Ends ``update`` as ShardedGradScaler's and torch's own do."""

        def update(self, new_scale: Any = None) -> None:
            if not self._enabled:
                return
            scale, tracker = self._check_scale_growth_tracker("update")
            found = [
                found_inf.to(device=scale.device, non_blocking=True)
                for state in self._per_optimizer_states.values()
                for found_inf in state["found_inf_per_device"].values()
            ]
            assert len(found) > 0, "No inf checks were recorded prior to update."
            combined = found[0].clone()
            for each in found[1:]:
                combined += each
            torch._amp_update_scale_(
                scale,
                tracker,
                combined,
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
            )
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    return Sharded("cpu", init_scale=1024.0, growth_interval=2)


def _history(scaler: Any, fused: bool = False, unscale: bool = False) -> list[Any]:
    parameters = [leaf(1.0), leaf(2.0)]
    optimizers = [torch.optim.SGD([p], lr=1.0, fused=fused) for p in parameters]
    history: list[Any] = []
    for gradients in ((0.25, 0.25), (0.75, 0.25), (INF, 0.25), (0.25, 0.125), (0.25, 0.125)):
        returned = []
        for parameter, optimizer, gradient in zip(parameters, optimizers, gradients, strict=True):
            optimizer.zero_grad()
            backward(scaler, parameter, gradient)
            if unscale:
                scaler.unscale_(optimizer)
            returned.append(scaler.step(optimizer))
        scaler.update()
        history += [returned, [p.item() for p in parameters], scaler.get_scale()]
    return history


MADE = [_takes_step_itself, _sees_more, _unscales_by_itself, _updates_as_sharded]


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_subclass_trains_as_it_does_over_torchs_class(
    made: Any, unscale: bool, fused: bool
) -> None:
    theirs = made(torch.amp.GradScaler)
    if fused and made is _unscales_by_itself and unscale:
        pytest.skip("torch's fused optimizers refuse a flag of shape (1,)")
    expected = _history(theirs, fused, unscale)
    assert _history(made(DistGradScaler), fused, unscale) == expected


def _subclass_on_ranks(number: int, overflow_on: int) -> Any:
    scaler = MADE[number](DistGradScaler)
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for step in range(3):
        optimizer.zero_grad()
        overflows = step == 1 and dist.get_rank() == overflow_on
        backward(scaler, parameter, INF if overflows else 0.25)
        scaler.step(optimizer)
        scaler.update()
    return parameter.item(), scaler.get_scale()


@pytest.mark.parametrize("number", range(len(MADE)), ids=lambda n: MADE[n].__name__)
@pytest.mark.parametrize("overflow_on", [0, 1])
def test_ranks_agree_whatever_a_subclass_overrides(
    pair: RankPool, number: int, overflow_on: int
) -> None:
    assert pair.run(_subclass_on_ranks, number, overflow_on) == [(0.5, 512.0)] * 2


# -- _unscale_grads_ that has nothing to say -------------------------------------------------------


class _NothingToSay(DistGradScaler):
    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        super()._unscale_grads_(*args, **kwargs)
        return {}


def _nothing_to_say() -> Any:
    scaler = _NothingToSay("cpu", init_scale=1024.0)
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for unscale in (False, True):
        optimizer.zero_grad()
        backward(scaler, parameter, 0.25)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return parameter.item(), scaler.get_scale()


def test_unscale_grads_may_return_no_flags() -> None:
    assert _nothing_to_say() == (0.5, 1024.0)


# -- optimizers whose step takes the scaler --------------------------------------------------------


class _Scaling(torch.optim.SGD):
    """What `_step_supports_amp_scaling` promised before there was ``grad_scale``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self._step_supports_amp_scaling = True
        self.seen: list[Any] = []


class _AsksTheScaler(_Scaling):
    """Skips by what the scaler says of inf, and counts its calls."""

    def step(self, closure: Any = None, *, grad_scaler: Any) -> Any:
        found = sum(each.item() for each in grad_scaler._check_inf_per_device(self).values())
        self.seen.append(found)
        if found:
            return "skipped inside"
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.div_(grad_scaler._get_scale_async())
        super().step()
        return "stepped"


class _UnscalesItself(_Scaling):
    """The same, through ``unscale_``."""

    def step(self, closure: Any = None, *, grad_scaler: Any) -> Any:
        grad_scaler.unscale_(self)
        found = sum(each.item() for each in grad_scaler._found_inf_per_device(self).values())
        self.seen.append(found)
        return "skipped inside" if found else super().step()


class _LooksAtItsGradients(_Scaling):
    """Asks the scaler for the scale alone."""

    def step(self, closure: Any = None, *, grad_scaler: Any) -> Any:
        (parameter,) = self.param_groups[0]["params"]
        finite = bool(parameter.grad.isfinite().all())
        self.seen.append(float(not finite))
        if not finite:
            return "skipped inside"
        parameter.grad.div_(grad_scaler.get_scale())
        super().step()
        return "stepped"


_TAKE_THE_SCALER = [_AsksTheScaler, _UnscalesItself, _LooksAtItsGradients]


def _steps_of(scaler: Any, kind: type[_Scaling], overflows: bool) -> Any:
    """Three steps, of which the middle one overflows on some rank."""
    parameter = leaf(1.0)
    optimizer = kind([parameter])
    results = []
    for gradient in (0.25, INF if overflows else 0.25, 0.25):
        optimizer.zero_grad()
        backward(scaler, parameter, gradient)
        with pytest.warns(FutureWarning, match="stop passing itself"):
            results.append(scaler.step(optimizer))
        scaler.update()
    return optimizer.seen, results, parameter.item(), scaler.state_dict()


@pytest.mark.parametrize("kind", _TAKE_THE_SCALER)
def test_an_optimizer_that_takes_the_scaler_is_called_on_an_overflow_as_in_torch(
    kind: type[_Scaling],
) -> None:
    seen, results, value, state = _steps_of(DistGradScaler("cpu", init_scale=4.0), kind, True)
    if kind is _LooksAtItsGradients:
        # It asks for no check, which torch's `update` refuses.
        assert (results, value) == (["stepped", "skipped inside", "stepped"], 0.5)
    else:
        torchs = _steps_of(torch.amp.GradScaler("cpu", init_scale=4.0), kind, True)
        assert (seen, results, value, state) == torchs
    assert seen == [0.0, 1.0, 0.0]


def _steps_where_rank_0_overflows(kind: type[_Scaling]) -> Any:
    scaler = DistGradScaler("cpu", init_scale=4.0)
    return _steps_of(scaler, kind, dist.get_rank() == 0)


@pytest.mark.parametrize("kind", _TAKE_THE_SCALER)
def test_it_steps_on_no_rank_where_another_overflowed(pair: RankPool, kind: type[_Scaling]) -> None:
    """Whatever it looks at: on several ranks it is not called."""
    for seen, results, value, state in pair.run(_steps_where_rank_0_overflows, kind):
        assert (seen, value, state["scale"]) == ([0.0, 0.0], 0.5, 2.0)
        assert results[1] is None
