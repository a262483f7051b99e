"""What public code does to torch's scaler: loops, subclasses, its inner names.

Each program takes a class and runs on torch's and on ours, to the same values: a few lines of our
own in the manner of the code it names. Trainers of public packages are run in ``tests/trainers``,
random calls in `test_oracle`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from distamp import DistGradScaler
from tests.on_ranks import on_ranks
from tests.scaler.steps import INF, backward, iteration, leaf, sgd, torchs_keys

Class = Any
CPU = torch.device("cpu")


def _made(cls: Class, **settings: Any) -> Any:
    return cls("cpu", **{"init_scale": 1024.0, **settings})


# -- loops -----------------------------------------------------------------------------------------


# Gradients that were handed out are the user's.


def discriminator_then_generator(cls: Class) -> Any:
    """D steps, G's loss is scaled, and one `update` for both: D's gradients stay as they were."""
    scaler = _made(cls, growth_interval=1)
    (d, of_d), (g, of_g) = sgd(), sgd()
    backward(scaler, d, 1.0)
    scaler.unscale_(of_d)
    scaler.step(of_d)
    backward(scaler, g, 1.0)
    scaler.step(of_g)
    kept = d.grad
    scaler.update()
    return [d.grad.item(), kept.item(), d.item(), g.item()]


def a_method_patched_on_the_instance(cls: Class) -> Any:
    """As kohya's sd-scripts have it, to train in float16."""
    scaler, p = _made(cls), leaf(1.0, dtype=torch.float16)
    optimizer, original = torch.optim.SGD([p], lr=1.0), scaler._unscale_grads_

    def patched(optimizer: Any, inv_scale: Tensor, found: Any, _: bool) -> Any:
        return original(optimizer, inv_scale, found, True)

    scaler._unscale_grads_ = patched
    for gradient in (0.25, INF, 0.25):
        iteration(scaler, optimizer, p, gradient, unscale=True)
    return p.item(), scaler.get_scale()


# -- torch's inner names ---------------------------------------------------------------------------

AGAIN: list[Callable[[Any, int], Any]] = [
    lambda records, key: records[key].update(stage=OptState.READY),
    lambda records, key: records.pop(key),
    lambda records, key: records.clear(),
]


def a_record_set_back_to_step_again(cls: Class) -> Any:
    """As SAM does, and trainers of RL that pop it."""
    values = []
    for again in AGAIN:
        scaler, (p, optimizer) = _made(cls), sgd()
        for _ in range(2):
            optimizer.zero_grad()
            backward(scaler, p, 0.25)
            scaler.unscale_(optimizer)
            again(scaler._per_optimizer_states, id(optimizer))
        values.append(iteration(scaler, optimizer, p, 0.25) or p.item())
    return values


def records_that_are_read(cls: Class) -> Any:
    scaler, (p, optimizer), seen = _made(cls), sgd(), []
    for gradient in (0.25, INF):
        optimizer.zero_grad()
        backward(scaler, p, gradient)
        record = scaler._per_optimizer_states[id(optimizer)]
        seen += [record["stage"], scaler._check_inf_per_device(optimizer), p.grad.item()]
        scaler.unscale_(optimizer=optimizer)
        found = scaler._found_inf_per_device(optimizer)
        seen += [record["stage"], found, found is record["found_inf_per_device"]]
        scaler.step(optimizer)
        seen += [record["stage"]]
        scaler.update()
    return seen


def inner_settings(cls: Class) -> Any:
    names = (
        *("init_scale", "init_growth_tracker", "growth_factor", "backoff_factor"),
        *("growth_interval", "enabled", "device", "scale", "growth_tracker"),
    )
    scaler, (p, optimizer), seen = _made(cls, growth_interval=2), sgd(), []
    scaler._lazy_init_scale_growth_tracker(CPU)
    scaler._check_scale_growth_tracker("unscale_")
    scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval = 4.0, 0.25, 1
    for gradient in (0.0, 0.0, INF):
        iteration(scaler, optimizer, p, gradient)
        inner = [getattr(scaler, f"_{name}") for name in names]
        seen += [(type(v), getattr(v, "dtype", None), v) for v in inner]
    scaler.update(4.0)
    scaler.load_state_dict(scaler.state_dict())
    scaler._scale = torch.tensor(8.0)  # which others may hold, too
    p.grad = None
    backward(scaler, p, 0.25)
    return [*seen, scaler._get_scale_async() is scaler._scale, p.grad.item()]


LOOPS: list[Callable[[Class], Any]] = [
    value
    for name, value in list(globals().items())
    if getattr(value, "__module__", "") == __name__ and not name.startswith("_")
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_goes_as_with_torchs_class(loop):
    assert loop(DistGradScaler) == loop(torch.amp.GradScaler)


@on_ranks(2)
def test_flags_that_a_loop_adds_up_skip_once():
    """As FoundationVision/Infinity: of ranks that overflow the sum of flags is 2.0."""
    scaler, (parameter, optimizer) = _made(DistGradScaler), sgd(fused=True)
    for gradient in (0.25, INF, 0.25):
        optimizer.zero_grad()
        backward(scaler, parameter, gradient)
        scaler.unscale_(optimizer)
        for flag in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            dist.all_reduce(flag)
        scaler.step(optimizer)
        scaler.update()
    assert (parameter.item(), scaler.get_scale()) == (0.5, 512.0)


# -- subclasses ------------------------------------------------------------------------------------


def _logs(cls: Class) -> Class:
    """Every override says when it is called, and when it returns."""

    def override(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            log = self.__dict__.setdefault("log", [])
            log.append(f"{name}(")
            try:
                return getattr(cls, name)(self, *args, **kwargs)
            finally:
                log.append(")")

        return method

    names = (
        *("scale", "unscale_", "_unscale_grads_", "_check_inf_per_device", "_maybe_opt_step"),
        *("step", "update", "get_scale", "state_dict"),
    )
    return type("Logs", (cls,), {name: override(name) for name in names})


def _takes_the_step(cls: Class) -> Class:
    class Stepping(cls):
        """As torch_xla's: the step is taken in another way, which returns something."""

        def _maybe_opt_step(self, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            assert state["stage"] is OptState.UNSCALED
            if sum(v.item() for v in state["found_inf_per_device"].values()):
                return "skipped"
            optimizer.step(*args, **kwargs)
            return "stepped"

    return Stepping


def _sees_more(cls: Class) -> Class:
    class Strict(cls):
        """Takes float16, and a gradient above a bound for an overflow."""

        def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found: Any, _: bool) -> Any:
            flags = super()._unscale_grads_(optimizer, inv_scale, found, True)
            for p in optimizer.param_groups[0]["params"]:
                if p.grad is not None and p.grad.abs().max() > 0.5:
                    flags[p.grad.device] = torch.ones(())
            return flags

    return Strict


def _unscales_by_itself(cls: Class) -> Class:
    class Unscales(cls):
        """Does the whole of ``unscale_``, as ShardedGradScaler does."""

        def unscale_(self, optimizer: Any) -> None:
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.UNSCALED:
                raise RuntimeError("unscale_() has already been called")
            inv_scale = self._scale.double().reciprocal().float()
            found_inf = torch.full((), 0.0, device=self._scale.device)
            flags = self._unscale_grads_(optimizer, inv_scale, found_inf, True)
            state.update(found_inf_per_device=flags, stage=OptState.UNSCALED)

    return Unscales


SUBCLASSES = [_logs, _takes_the_step, _sees_more, _unscales_by_itself]
GRADIENTS = ((0.25, 0.25), (0.75, 0.25), (INF, 0.25), (0.25, 0.125), (0.25, 0.125))


def _history(scaler: Any, fused: bool, unscale: bool, overflows: bool = True) -> list[Any]:
    trained = [sgd(fused=fused), sgd(2.0, fused=fused)]
    history: list[Any] = []
    for gradients in GRADIENTS:
        for (parameter, optimizer), gradient in zip(trained, gradients, strict=True):
            optimizer.zero_grad()
            backward(scaler, parameter, gradient if overflows else min(gradient, 0.25))
            if unscale:
                scaler.unscale_(optimizer)
            history.append(scaler.step(optimizer))
        scaler.update()
        history += [parameter.item() for parameter, _ in trained]
    return [*history, torchs_keys(scaler.state_dict()), scaler.__dict__.get("log")]


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("subclass", SUBCLASSES, ids=lambda each: each.__name__)
def test_a_subclass_trains_as_over_torchs_class(subclass, fused, unscale):
    ours, theirs = (
        _history(_made(subclass(cls), growth_interval=2), fused, unscale)
        for cls in (DistGradScaler, torch.amp.GradScaler)
    )
    assert ours == theirs


@on_ranks(2)
@pytest.mark.parametrize("number", range(len(SUBCLASSES)))
def test_ranks_agree_whatever_a_subclass_overrides_and_wherever_it_overflows(number):
    """On a scale that moved as with torch's class in one process, for which all overflow."""
    ends = []
    for cls, overflow_on in (
        (torch.amp.GradScaler, None),
        (DistGradScaler, 0),
        (DistGradScaler, 1),
    ):
        scaler = _made(SUBCLASSES[number](cls), growth_interval=2)
        overflows = overflow_on in (None, dist.get_rank())
        ends.append(_history(scaler, False, number % 2 == 0, overflows)[-2])
    assert ends == ends[:1] * 3
