"""torch.amp.GradScaler is the oracle: the same random calls and faults through both classes.

Error, scale, growth tracker, ``state_dict``, gradients and parameters are compared after every
call, bit for bit. One difference is documented: the scale of distamp stays within its bounds.
If torch's scale leaves them, the test puts it back to the bound before the next call.
"""

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from distamp import DistGradScaler
from distamp.errors import DistampError
from tests.scaler.matrix.drawn import hold
from tests.scaler.steps import torchs_keys

MIN_SCALE = 2.0**-24
MAX_SCALE = 2.0**127

# -- the optimizers --------------------------------------------------------------------------------

Params = list[torch.nn.Parameter]


def sgd(params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)


def sgd_foreach(params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, foreach=True)


def sgd_fused(params: Params) -> torch.optim.Optimizer:
    # torch leaves momentum buffers uninitialised if the first step is skipped.
    return torch.optim.SGD(params, lr=0.1, momentum=0.0, fused=True)


def adam(params: Params) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1, foreach=False)


def adamw_fused(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, fused=True)


def adagrad_fused(params: Params) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.1, fused=True)


MakeOptimizer = Callable[[Params], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": sgd,
    "SGD foreach": sgd_foreach,
    "SGD fused": sgd_fused,
    "Adam": adam,
    "AdamW fused": adamw_fused,
    "Adagrad fused": adagrad_fused,
}

# -- random programs -------------------------------------------------------------------------------

# A call is the name of a method with its arguments.
Call = tuple[Any, ...]

INDEX = st.sampled_from([0, 0, 0, 1])
KIND = st.sampled_from(list(OPTIMIZERS))
# Gradients cannot be carried over a change of 2^128 or more.
EXPONENTS = (-24, -14, -3, 0, 7, 16, 100, 103)
POWERS_OF_TWO = [2.0**exponent for exponent in EXPONENTS]
INEXACT_SCALES = [3.7, 31622.7]
SCALE = st.sampled_from(POWERS_OF_TWO + INEXACT_SCALES)

ORDINARY_GRADIENTS = [1.0, -0.5, 0.0]
EXTREME_GRADIENTS = [1e-30, 3e38, float("inf"), float("-inf"), float("nan")]
ALL_GRADIENTS = ORDINARY_GRADIENTS + EXTREME_GRADIENTS

# A loss for the first parameter of an optimizer, or for both, and the structure that scale() gets.
LOSS_GRADIENTS = st.lists(st.sampled_from(ALL_GRADIENTS), min_size=1, max_size=2).map(tuple)
STRUCTURE = st.sampled_from(["tensor", "list", "tuple", "nested", "generator"])

GROWTH_FACTOR = st.sampled_from([2.0, 1.5, 3.0, 1.001])
BACKOFF_FACTOR = st.sampled_from([0.5, 0.9, 0.25, 1e-3])
GROWTH_INTERVAL = st.integers(1, 3)
SCALE_TYPE = st.sampled_from(["float", "tensor"])
BACKWARD = st.tuples(st.just("backward"), INDEX, LOSS_GRADIENTS, STRUCTURE)
UNSCALE = st.tuples(st.just("unscale_"), INDEX)
STEP = st.tuples(st.just("step"), INDEX)
UPDATE = st.tuples(st.just("update"))
UPDATE_TO_A_SCALE = st.tuples(st.just("update"), SCALE, SCALE_TYPE)
SET_GROWTH_FACTOR = st.tuples(st.just("set_growth_factor"), GROWTH_FACTOR)
SET_BACKOFF_FACTOR = st.tuples(st.just("set_backoff_factor"), BACKOFF_FACTOR)
SET_GROWTH_INTERVAL = st.tuples(st.just("set_growth_interval"), GROWTH_INTERVAL)
RELOAD = st.tuples(st.just("reload"))
EXCHANGE = st.tuples(st.just("exchange"))
PICKLE = st.tuples(st.just("pickle"))
ZERO_GRAD = st.tuples(st.just("zero_grad"), INDEX)
ANY_CALL = st.one_of(
    BACKWARD,
    UNSCALE,
    STEP,
    UPDATE,
    UPDATE_TO_A_SCALE,
    SET_GROWTH_FACTOR,
    SET_BACKOFF_FACTOR,
    SET_GROWTH_INTERVAL,
    RELOAD,
    EXCHANGE,
    PICKLE,
    ZERO_GRAD,
)

# Most parts of a program are iterations, because random calls alone seldom get far.
RIGHT_ORDERS = [["step", "update"], ["unscale_", "step", "update"]]
WRONG_ORDERS = [
    ["unscale_", "unscale_", "step", "update"],
    ["step", "step", "update"],
    ["step", "unscale_", "update"],
    ["step"],
    ["unscale_"],
    ["step", "update", "update"],
]
GRADIENT = st.sampled_from(ORDINARY_GRADIENTS * 4 + ALL_GRADIENTS)
ORDER = st.sampled_from(RIGHT_ORDERS * 4 + RIGHT_ORDERS + WRONG_ORDERS)
NO_CALL: list[Call] = []
LAST_CALL = st.sampled_from([NO_CALL, NO_CALL, [("reload",)], [("pickle",)], [("exchange",)]])


def calls_of_an_iteration(draw: tuple[float, list[str], int, list[Call]]) -> list[Call]:
    """Return the calls of one iteration: backward, calls of the scaler, and perhaps another."""
    gradient, order, index, last_call = draw
    calls: list[Call] = [("zero_grad", index), ("backward", index, (gradient,), "tensor")]
    for name in order:
        has_index = name != "update"
        calls.append((name, index) if has_index else (name,))
    return calls + last_call


def a_single_call(call: Call) -> list[Call]:
    return [call]


def concatenate(parts: list[list[Call]]) -> list[Call]:
    calls: list[Call] = []
    for part in parts:
        calls += part
    return calls


ITERATION = st.tuples(GRADIENT, ORDER, INDEX, LAST_CALL).map(calls_of_an_iteration)
PART = st.one_of(ITERATION, ITERATION, ANY_CALL.map(a_single_call))
PROGRAM = st.lists(PART, min_size=2, max_size=12).map(concatenate)
FIRST_GROWTH_FACTOR = st.sampled_from([2.0, 1.5, 4.0])
FIRST_BACKOFF_FACTOR = st.sampled_from([0.5, 0.1])
MOSTLY_ENABLED = st.sampled_from([True, True, True, False])
SETTINGS = st.fixed_dictionaries(
    {
        "init_scale": SCALE,
        "growth_factor": FIRST_GROWTH_FACTOR,
        "backoff_factor": FIRST_BACKOFF_FACTOR,
        "growth_interval": GROWTH_INTERVAL,
        "enabled": MOSTLY_ENABLED,
    }
)


# -- a program through one class -------------------------------------------------------------------


class World:
    """One scaler with two optimizers, and with parameters that no other world has.

    Args:
        cls: The scaler's class.
        settings: Its settings.
        kinds: A key of `OPTIMIZERS` for each optimizer.
    """

    def __init__(self, cls: type, settings: dict[str, Any], kinds: tuple[str, str]) -> None:
        self.scaler = cls("cpu", **settings)
        self.parameters: list[Params] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        for kind in kinds:
            pair = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
            single = torch.nn.Parameter(torch.tensor([3.0]))
            self.parameters.append([pair, single])
            self.optimizers.append(OPTIMIZERS[kind]([pair, single]))
        # If gradients arrive after unscale_, torch goes on without an error and is wrong. Another
        # test shows that distamp raises then.
        self.unscaled: set[int] = set()

    def call(self, call: Call) -> Any:
        """Make a call of this world, or of its scaler."""
        name, *arguments = call
        method = getattr(self, f"do_{name}", None)
        if method is None:
            method = getattr(self.scaler, name)
        return method(*arguments)

    def do_backward(self, index: int, gradients: tuple[float, ...], structure: str) -> Any:
        """Run a backward pass of losses with these gradients; return the scaled losses."""
        if index in self.unscaled:
            return None
        losses: list[torch.Tensor] = []
        for parameter, gradient in zip(self.parameters[index], gradients, strict=False):
            losses.append((parameter * gradient).sum())
        scaled = self.scaler.scale(as_structure(losses, structure))
        is_lazy = isinstance(scaled, Iterator)
        if is_lazy:
            scaled = list(scaled)
        leaves = tree_leaves(scaled)
        torch.autograd.backward(leaves)
        # The scaled losses of a generator are lazy in both classes, with iterators of two types.
        container = "iterator" if is_lazy else type(scaled).__name__
        values = [leaf.detach().clone() for leaf in leaves]
        return container, values

    def do_unscale_(self, index: int) -> None:
        self._add_missing_gradients(index)
        self.scaler.unscale_(self.optimizers[index])
        self.unscaled.add(index)

    def do_step(self, index: int) -> Any:
        self._add_missing_gradients(index)
        return self.scaler.step(self.optimizers[index])

    def do_update(self, new_scale: float | None = None, scale_type: str = "float") -> None:
        if new_scale is not None and scale_type == "tensor":
            self.scaler.update(torch.tensor(new_scale))
        else:
            self.scaler.update(new_scale)
        if self.unscaled:
            # Before the next scale(), a DistGradScaler keeps unscaled gradients as they are.
            self.scaler.scale(torch.ones(()))
        self.unscaled.clear()
        # A DistGradScaler divides older gradients by the scale of their backward pass, and torch's
        # scaler by the new scale.
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def do_reload(self) -> None:
        state = self.scaler.state_dict()
        self.scaler.load_state_dict(state)

    def do_pickle(self) -> None:
        pickled = pickle.dumps(self.scaler)
        self.scaler = pickle.loads(pickled)

    def do_zero_grad(self, index: int) -> None:
        self.optimizers[index].zero_grad()

    def _add_missing_gradients(self, index: int) -> None:
        """Add zeros, because torch's scaler asserts without any gradient.

        A DistGradScaler counts a clean step then, because another rank may hold gradients.
        """
        for parameter in self.parameters[index]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def state(self) -> list[Any]:
        """Return the state of the scaler."""
        scale = self.scaler.get_scale()
        tracker = self.scaler._get_growth_tracker()
        state = torchs_keys(self.scaler.state_dict())
        return [scale, tracker, state, self.scaler.is_enabled()]

    def tensors(self) -> list[torch.Tensor]:
        """Return all parameters and then all gradients."""
        params = self.parameters[0] + self.parameters[1]
        values = [param.detach() for param in params]
        gradients = [param.grad for param in params if param.grad is not None]
        return values + gradients


def as_structure(losses: list[torch.Tensor], structure: str) -> Any:
    """Return losses in a structure that scale() takes."""
    if structure == "tensor":
        return losses[0]
    if structure == "tuple":
        return tuple(losses)
    if structure == "nested":
        return [losses[0], (losses[-1],)]
    if structure == "generator":
        return (loss for loss in losses)
    return losses


# -- the comparison --------------------------------------------------------------------------------


def compare(settings: dict[str, Any], kinds: tuple[str, str], program: list[Call]) -> None:
    """Run a program through both classes; assert after every call that they are equal."""
    distamps = World(DistGradScaler, settings, kinds)
    torchs = World(torch.amp.GradScaler, settings, kinds)
    for call in program:
        if call == ("exchange",):
            exchange_states(distamps, torchs)
        else:
            compare_call(distamps, torchs, call)
        keep_torchs_scale_within_bounds(torchs)
        assert distamps.state() == torchs.state(), call
        pair = distamps.tensors(), torchs.tensors()
        assert is_equal(*pair), (call, *pair)


def exchange_states(distamps: World, torchs: World) -> None:
    """Exchange the states of both scalers; a disabled scaler has none."""
    distamps_state = distamps.scaler.state_dict()
    torchs_state = torchs.scaler.state_dict()
    if distamps_state:
        distamps.scaler.load_state_dict(torchs_state)
        torchs.scaler.load_state_dict(distamps_state)


def compare_call(distamps: World, torchs: World, call: Call) -> None:
    """Make a call in both worlds; assert that both return the same or raise the same."""
    result, error = result_or_error(distamps, call)
    torchs_result, torchs_error = result_or_error(torchs, call)
    errors = f"distamp's: {error!r}, torch's: {torchs_error!r}"
    if torchs_error is None:
        assert error is None, errors
    else:
        assert error is not None, errors
        assert isinstance(error, type(torchs_error)), "it would not be caught as torch's"
        assert isinstance(error, DistampError)
        assert str(torchs_error) in str(error)
    assert is_equal(result, torchs_result), (call, result, torchs_result)


def result_or_error(world: World, call: Call) -> tuple[Any, Exception | None]:
    try:
        return world.call(call), None
    except Exception as error:
        return None, error


def keep_torchs_scale_within_bounds(torchs: World) -> None:
    """Clamp the scale of torch's scaler, as a DistGradScaler does."""
    if torchs.scaler.is_enabled():
        scale = torchs.scaler.get_scale()
        is_within = MIN_SCALE <= scale <= MAX_SCALE
        if not is_within:
            torchs.scaler._scale.clamp_(MIN_SCALE, MAX_SCALE)


def is_equal(value: Any, expected: Any) -> bool:
    """Compare bit for bit, except that all NaN are equal."""
    if isinstance(value, torch.Tensor):
        if value.dtype != expected.dtype:
            return False
        return torch.equal(value.nan_to_num(7.0), expected.nan_to_num(7.0))
    if isinstance(value, list | tuple):
        if len(value) != len(expected):
            return False
        return all(map(is_equal, value, expected))
    return bool(value == expected)


PAIR_OF_KINDS = st.tuples(KIND, KIND)


def test_random_programs_do_what_torch_does():
    hold(compare, 8, None, SETTINGS, PAIR_OF_KINDS, PROGRAM)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(8))
def test_twenty_thousand_random_programs_do_what_torch_does(seed):
    hold(compare, 2500, seed, SETTINGS, PAIR_OF_KINDS, PROGRAM)
