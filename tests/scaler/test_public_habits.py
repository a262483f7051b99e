"""Programs in the manner of public code: training loops, subclasses, private names of torch.

Each program receives a class of scalers. It must return the same values with our class as with
torch's. ``tests/trainers`` runs the trainers of public packages, and `test_oracle` random calls.
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

ScalerClass = Any
CPU = torch.device("cpu")


def make_scaler(scaler_class: ScalerClass, **settings: Any) -> Any:
    return scaler_class("cpu", init_scale=1024.0, **settings)


# -- loops -----------------------------------------------------------------------------------------


def discriminator_then_generator(scaler_class: ScalerClass) -> list[float]:
    """Step D, scale the loss of G, and call `update` once.

    D's unscaled gradients belong to the user, so neither `scale` nor `update` changes them.
    """
    scaler = make_scaler(scaler_class, growth_interval=1)
    discriminator, discriminator_optimizer = sgd()
    generator, generator_optimizer = sgd()
    backward(scaler, discriminator, 1.0)
    scaler.unscale_(discriminator_optimizer)
    scaler.step(discriminator_optimizer)
    backward(scaler, generator, 1.0)
    scaler.step(generator_optimizer)
    gradient: Any = discriminator.grad
    scaler.update()
    current_gradient: Any = discriminator.grad
    return [
        current_gradient.item(),
        gradient.item(),
        discriminator.item(),
        generator.item(),
    ]


def method_patched_on_the_instance(scaler_class: ScalerClass) -> tuple[float, float]:
    """Allow float16 gradients as kohya's sd-scripts do."""
    scaler = make_scaler(scaler_class)
    parameter = leaf(1.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    unscale_grads = scaler._unscale_grads_

    def patched(optimizer: Any, inv_scale: Tensor, found_inf: Any, allow_fp16: bool) -> Any:
        return unscale_grads(optimizer, inv_scale, found_inf, True)

    scaler._unscale_grads_ = patched
    for gradient in (0.25, INF, 0.25):
        iteration(scaler, optimizer, parameter, gradient, unscale=True)
    return parameter.item(), scaler.get_scale()


# -- private names of torch ------------------------------------------------------------------------

ResetRecord = Callable[[Any, int], None]


def set_stage_to_ready(records: Any, key: int) -> None:
    records[key].update(stage=OptState.READY)


def pop_record(records: Any, key: int) -> None:
    records.pop(key)


def clear_records(records: Any, key: int) -> None:
    records.clear()


def unscale_after_reset(scaler_class: ScalerClass, reset: ResetRecord) -> float:
    """Unscale twice in an iteration, with the record of the optimizer reset in between."""
    scaler = make_scaler(scaler_class)
    parameter, optimizer = sgd()
    for _ in range(2):
        optimizer.zero_grad()
        backward(scaler, parameter, 0.25)
        scaler.unscale_(optimizer)
        reset(scaler._per_optimizer_states, id(optimizer))
    iteration(scaler, optimizer, parameter, 0.25)
    return parameter.item()


def stage_set_back_to_ready(scaler_class: ScalerClass) -> float:
    """Step twice in an iteration as SAM does."""
    return unscale_after_reset(scaler_class, set_stage_to_ready)


def record_popped(scaler_class: ScalerClass) -> float:
    """Step twice in an iteration as some trainers of RL do."""
    return unscale_after_reset(scaler_class, pop_record)


def records_cleared(scaler_class: ScalerClass) -> float:
    return unscale_after_reset(scaler_class, clear_records)


def records_read(scaler_class: ScalerClass) -> list[Any]:
    scaler = make_scaler(scaler_class)
    parameter, optimizer = sgd()
    history: list[Any] = []
    for gradient in (0.25, INF):
        optimizer.zero_grad()
        backward(scaler, parameter, gradient)
        record = scaler._per_optimizer_states[id(optimizer)]
        history.append(record["stage"])
        history.append(scaler._check_inf_per_device(optimizer))
        scaled_gradient: Any = parameter.grad
        history.append(scaled_gradient.item())

        scaler.unscale_(optimizer=optimizer)
        flags = scaler._found_inf_per_device(optimizer)
        history.append(record["stage"])
        history.append(flags)
        history.append(flags is record["found_inf_per_device"])

        scaler.step(optimizer)
        history.append(record["stage"])
        scaler.update()
    return history


PRIVATE_SETTINGS = [
    "_init_scale",
    "_init_growth_tracker",
    "_growth_factor",
    "_backoff_factor",
    "_growth_interval",
    "_enabled",
    "_device",
    "_scale",
    "_growth_tracker",
]


def private_settings_read_and_written(scaler_class: ScalerClass) -> list[Any]:
    scaler = make_scaler(scaler_class, growth_interval=2)
    parameter, optimizer = sgd()
    scaler._lazy_init_scale_growth_tracker(CPU)
    scaler._check_scale_growth_tracker("unscale_")
    scaler._growth_factor = 4.0
    scaler._backoff_factor = 0.25
    scaler._growth_interval = 1
    history: list[Any] = []
    for gradient in (0.0, 0.0, INF):
        iteration(scaler, optimizer, parameter, gradient)
        for name in PRIVATE_SETTINGS:
            value = getattr(scaler, name)
            history.append(type(value))
            history.append(getattr(value, "dtype", None))
            history.append(value)
    return history


def private_scale_replaced(scaler_class: ScalerClass) -> list[Any]:
    """Assign a tensor to `_scale`, as code does that shares one scale between scalers."""
    scaler = make_scaler(scaler_class, growth_interval=2)
    parameter, optimizer = sgd()
    iteration(scaler, optimizer, parameter, 0.0)
    scaler.update(4.0)
    scaler.load_state_dict(scaler.state_dict())
    scaler._scale = torch.tensor(8.0)
    parameter.grad = None
    backward(scaler, parameter, 0.25)
    scaled_gradient: Any = parameter.grad
    return [scaler._get_scale_async() is scaler._scale, scaled_gradient.item()]


PROGRAMS: list[Callable[[ScalerClass], Any]] = [
    discriminator_then_generator,
    method_patched_on_the_instance,
    stage_set_back_to_ready,
    record_popped,
    records_cleared,
    records_read,
    private_settings_read_and_written,
    private_scale_replaced,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_returns_the_same_values_as_with_torchs_class(program):
    assert program(DistGradScaler) == program(torch.amp.GradScaler)


@on_ranks(2)
def test_flags_that_a_loop_adds_up_skip_once():
    """FoundationVision/Infinity sums the flags of all ranks, to 2.0 where both overflow."""
    scaler = make_scaler(DistGradScaler)
    parameter, optimizer = sgd(fused=True)
    for gradient in (0.25, INF, 0.25):
        optimizer.zero_grad()
        backward(scaler, parameter, gradient)
        scaler.unscale_(optimizer)
        record = scaler._per_optimizer_states[id(optimizer)]
        for flag in record["found_inf_per_device"].values():
            dist.all_reduce(flag)
        scaler.step(optimizer)
        scaler.update()
    assert parameter.item() == 0.5
    assert scaler.get_scale() == 512.0


# -- subclasses ------------------------------------------------------------------------------------

LOGGED_METHODS = [
    "scale",
    "unscale_",
    "_unscale_grads_",
    "_check_inf_per_device",
    "_maybe_opt_step",
    "step",
    "update",
    "get_scale",
    "state_dict",
]


def log_calls(scaler_class: ScalerClass, name: str) -> Any:
    """Return an override of a method that logs when the method is called and when it returns."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        log = self.__dict__.setdefault("log", [])
        log.append(f"{name}(")
        try:
            return getattr(scaler_class, name)(self, *args, **kwargs)
        finally:
            log.append(")")

    return method


def logging_subclass(scaler_class: ScalerClass) -> ScalerClass:
    overrides = {name: log_calls(scaler_class, name) for name in LOGGED_METHODS}
    return type("Logging", (scaler_class,), overrides)


def stepping_subclass(scaler_class: ScalerClass) -> ScalerClass:
    class Stepping(scaler_class):
        """Steps in another way and returns a value, as torch_xla's scaler does."""

        def _maybe_opt_step(self, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            assert state["stage"] is OptState.UNSCALED
            flags = state["found_inf_per_device"].values()
            if any(flag.item() for flag in flags):
                return "skipped"
            optimizer.step(*args, **kwargs)
            return "stepped"

    return Stepping


def strict_subclass(scaler_class: ScalerClass) -> ScalerClass:
    class Strict(scaler_class):
        """Allows float16, and treats a gradient above 0.5 as an overflow."""

        def _unscale_grads_(
            self, optimizer: Any, inv_scale: Tensor, found_inf: Any, allow_fp16: bool
        ) -> Any:
            flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
            for parameter in optimizer.param_groups[0]["params"]:
                grad = parameter.grad
                if grad is not None and grad.abs().max() > 0.5:
                    flags[grad.device] = torch.ones(())
            return flags

    return Strict


def unscaling_subclass(scaler_class: ScalerClass) -> ScalerClass:
    class Unscaling(scaler_class):
        """Replaces all of ``unscale_``, as ShardedGradScaler does."""

        def unscale_(self, optimizer: Any) -> None:
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.UNSCALED:
                raise RuntimeError("unscale_() has already been called")
            inv_scale = self._scale.double().reciprocal().float()
            found_inf = torch.full((), 0.0, device=self._scale.device)
            flags = self._unscale_grads_(optimizer, inv_scale, found_inf, True)
            state.update(found_inf_per_device=flags, stage=OptState.UNSCALED)

    return Unscaling


SUBCLASSES = [logging_subclass, stepping_subclass, strict_subclass, unscaling_subclass]
# The gradients of two parameters in five iterations. A strict subclass skips 0.75.
GRADIENTS = [(0.25, 0.25), (0.75, 0.25), (INF, 0.25), (0.25, 0.125), (0.25, 0.125)]


def train(
    scaler: Any, *, fused: bool = False, unscale: bool = False, overflows: bool = True
) -> list[Any]:
    """Step two optimizers in each iteration; return their results, parameters, state and log.

    Args:
        scaler: The scaler of both optimizers.
        fused: Whether the optimizers are fused.
        unscale: Whether the loop calls ``unscale_``.
        overflows: Whether gradients above 0.25 occur.
    """
    first, first_optimizer = sgd(fused=fused)
    second, second_optimizer = sgd(2.0, fused=fused)
    history: list[Any] = []
    for first_gradient, second_gradient in GRADIENTS:
        if not overflows:
            first_gradient = min(first_gradient, 0.25)
        first_optimizer.zero_grad()
        backward(scaler, first, first_gradient)
        if unscale:
            scaler.unscale_(first_optimizer)
        history.append(scaler.step(first_optimizer))

        second_optimizer.zero_grad()
        backward(scaler, second, second_gradient)
        if unscale:
            scaler.unscale_(second_optimizer)
        history.append(scaler.step(second_optimizer))

        scaler.update()
        history.append(first.item())
        history.append(second.item())
    state = torchs_keys(scaler.state_dict())
    log = scaler.__dict__.get("log")
    return [*history, state, log]


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("subclass", SUBCLASSES, ids=lambda subclass: subclass.__name__)
def test_a_subclass_trains_as_over_torchs_class(subclass, fused, unscale):
    scaler = make_scaler(subclass(DistGradScaler), growth_interval=2)
    reference = make_scaler(subclass(torch.amp.GradScaler), growth_interval=2)
    history = train(scaler, fused=fused, unscale=unscale)
    expected = train(reference, fused=fused, unscale=unscale)
    assert history == expected


@on_ranks(2)
@pytest.mark.parametrize("overflowing_rank", [0, 1])
@pytest.mark.parametrize(
    ("subclass", "unscale"),
    [
        (logging_subclass, True),
        (stepping_subclass, False),
        (strict_subclass, True),
        (unscaling_subclass, False),
    ],
    ids=["logging", "stepping", "strict", "unscaling"],
)
def test_a_subclass_skips_on_every_rank_an_overflow_of_one_rank(
    subclass, unscale, overflowing_rank
):
    """The state is that of torch's class in one process with the same overflows."""
    reference = make_scaler(subclass(torch.amp.GradScaler), growth_interval=2)
    expected_state = train(reference, unscale=unscale)[-2]
    scaler = make_scaler(subclass(DistGradScaler), growth_interval=2)
    overflows = dist.get_rank() == overflowing_rank
    state = train(scaler, unscale=unscale, overflows=overflows)[-2]
    assert state == expected_state
