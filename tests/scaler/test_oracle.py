"""torch.amp.GradScaler is the oracle: the same random calls and faults through both classes.

Compared after every call: the error, the scale, the growth tracker, ``state_dict``, gradients and
parameters, bit for bit. The one documented difference is that our scale stays within its bounds;
where torch's leaves them, torch's is put back to the bound before the next call.
"""

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from distamp import DistGradScaler
from distamp.errors import DistampError
from tests.scaler.matrix.drawn import hold
from tests.scaler.steps import torchs_keys

MIN_SCALE, MAX_SCALE = 2.0**-24, 2.0**127

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    # Without momentum: torch leaves its buffers uninitialised where the first step is skipped.
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}
COEFFICIENTS = [1.0, -0.5, 0.0, 1e-30, 3e38, float("inf"), float("-inf"), float("nan")]

INDEX = st.sampled_from([0, 0, 0, 1])
# Gradients cannot be carried over a change of 2^128 or more.
SCALE = st.sampled_from([2.0**k for k in (-24, -14, -3, 0, 7, 16, 100, 103)] + [3.7, 31622.7])
CALLS = st.one_of(
    st.tuples(
        st.just("backward"),
        INDEX,
        st.lists(st.sampled_from(COEFFICIENTS), min_size=1, max_size=2).map(tuple),
        st.sampled_from(["tensor", "list", "tuple", "nested", "generator"]),
    ),
    st.tuples(st.just("unscale_"), INDEX),
    st.tuples(st.just("step"), INDEX),
    st.tuples(st.just("update")),
    st.tuples(st.just("update"), SCALE, st.sampled_from(["float", "tensor"])),
    st.tuples(st.just("set_growth_factor"), st.sampled_from([2.0, 1.5, 3.0, 1.001])),
    st.tuples(st.just("set_backoff_factor"), st.sampled_from([0.5, 0.9, 0.25, 1e-3])),
    st.tuples(st.just("set_growth_interval"), st.integers(1, 3)),
    st.tuples(st.just("reload")),
    st.tuples(st.just("exchange")),
    st.tuples(st.just("pickle")),
    st.tuples(st.just("zero_grad"), INDEX),
)
# Most programs are iterations, in right and in wrong orders: random calls alone seldom get far.
ORDERS = [
    ["step", "update"],
    ["unscale_", "step", "update"],
    ["unscale_", "unscale_", "step", "update"],
    ["step", "step", "update"],
    ["step", "unscale_", "update"],
    ["step"],
    ["unscale_"],
    ["step", "update", "update"],
]
ITERATION = st.tuples(
    st.sampled_from(COEFFICIENTS[:3] * 4 + COEFFICIENTS),
    st.sampled_from(ORDERS[:2] * 4 + ORDERS),
    INDEX,
    st.sampled_from([[], [], [("reload",)], [("pickle",)], [("exchange",)]]),
).map(
    lambda drawn: [
        ("zero_grad", drawn[2]),
        ("backward", drawn[2], (drawn[0],), "tensor"),
        *[(name, drawn[2]) if name != "update" else (name,) for name in drawn[1]],
        *drawn[3],
    ]
)
PART = st.one_of(ITERATION, ITERATION, CALLS.map(lambda call: [call]))
PROGRAM = st.lists(PART, min_size=2, max_size=12).map(
    lambda parts: list(itertools.chain.from_iterable(parts))
)
SETTINGS = st.fixed_dictionaries(
    {
        "init_scale": SCALE,
        "growth_factor": st.sampled_from([2.0, 1.5, 4.0]),
        "backoff_factor": st.sampled_from([0.5, 0.1]),
        "growth_interval": st.integers(1, 3),
        "enabled": st.sampled_from([True, True, True, False]),
    }
)


class World:
    """One scaler with two optimizers, over parameters of its own."""

    def __init__(self, cls: type, settings: dict[str, Any], kinds: tuple[str, str]) -> None:
        self.scaler = cls("cpu", **settings)
        self.parameters = [
            [torch.nn.Parameter(torch.tensor([1.0, 2.0])), torch.nn.Parameter(torch.tensor([3.0]))]
            for _ in kinds
        ]
        self.optimizers = [
            OPTIMIZERS[kind](ps) for kind, ps in zip(kinds, self.parameters, strict=True)
        ]
        # torch goes on silently, and wrongly, where gradients arrive after unscale_; that we raise
        # there is a test of its own.
        self.unscaled: set[int] = set()

    def call(self, name: str, *args: Any) -> Any:
        own = getattr(self, f"do_{name}", None)
        return (own or getattr(self.scaler, name))(*args)

    def do_backward(self, index: int, coefficients: tuple[float, ...], form: str) -> Any:
        if index in self.unscaled:
            return None
        losses = [
            (parameter * coefficient).sum()
            for parameter, coefficient in zip(self.parameters[index], coefficients, strict=False)
        ]
        structure: Any = {
            "tensor": losses[0],
            "list": losses,
            "tuple": tuple(losses),
            "nested": [losses[0], (losses[-1],)],
            "generator": (loss for loss in losses),
        }[form]
        scaled = self.scaler.scale(structure)
        leaves = tree_leaves(list(scaled) if isinstance(scaled, Iterator) else scaled)
        torch.autograd.backward(leaves)
        # Both come back lazily for a generator, from iterators of different types.
        container = "iterator" if isinstance(scaled, Iterator) else type(scaled).__name__
        return container, [leaf.detach().clone() for leaf in leaves]

    def do_unscale_(self, index: int) -> None:
        self._have_gradients(index)
        self.scaler.unscale_(self.optimizers[index])
        self.unscaled.add(index)

    def do_step(self, index: int) -> Any:
        self._have_gradients(index)
        return self.scaler.step(self.optimizers[index])

    def do_update(self, new_scale: float | None = None, form: str = "float") -> None:
        self.scaler.update(
            torch.tensor(new_scale) if form == "tensor" and new_scale is not None else new_scale
        )
        if self.unscaled:
            self.scaler.scale(torch.ones(()))  # until then ours keeps what is unscaled as it is
        self.unscaled.clear()
        # What is left behind is divided by the scale it was made with here, by the new one there.
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def do_reload(self) -> None:
        self.scaler.load_state_dict(self.scaler.state_dict())

    def do_pickle(self) -> None:
        self.scaler = pickle.loads(pickle.dumps(self.scaler))

    def do_zero_grad(self, index: int) -> None:
        self.optimizers[index].zero_grad()

    def _have_gradients(self, index: int) -> None:
        # Without any gradient torch asserts, where we count a clean step, as another rank may well
        # hold gradients.
        for parameter in self.parameters[index]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def state(self) -> list[Any]:
        scaler = self.scaler
        return [
            scaler.get_scale(),
            scaler._get_growth_tracker(),
            torchs_keys(scaler.state_dict()),
            scaler.is_enabled(),
        ]

    def tensors(self) -> list[torch.Tensor]:
        flat = [p for ps in self.parameters for p in ps]
        return [p.detach() for p in flat] + [p.grad for p in flat if p.grad is not None]


def _outcome(world: World, call: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        return world.call(*call), None
    except Exception as error:
        return None, error


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _run(settings: dict[str, Any], kinds: tuple[str, str], program: list[Any]) -> None:
    ours = World(DistGradScaler, settings, kinds)
    torchs = World(torch.amp.GradScaler, settings, kinds)
    for call in program:
        if call[0] == "exchange":
            a, b = ours.scaler.state_dict(), torchs.scaler.state_dict()
            if a:
                ours.scaler.load_state_dict(b)
                torchs.scaler.load_state_dict(a)
        else:
            our_result, our_error = _outcome(ours, call)
            result, error = _outcome(torchs, call)
            assert (our_error is None) == (error is None), (
                f"ours: {our_error!r}, torch's: {error!r}"
            )
            if our_error is not None:
                assert isinstance(our_error, type(error)), "it would not be caught as torch's"
                assert isinstance(our_error, DistampError)
                assert str(error) in str(our_error)
            assert _equal(our_result, result), (call, our_result, result)
        # What the documented bounds prevent in ours is undone there.
        if torchs.scaler.is_enabled() and not MIN_SCALE <= torchs.scaler.get_scale() <= MAX_SCALE:
            torchs.scaler._scale.clamp_(MIN_SCALE, MAX_SCALE)
        assert ours.state() == torchs.state(), call
        assert _equal(ours.tensors(), torchs.tensors()), (call, ours.tensors(), torchs.tensors())


KIND = st.sampled_from(list(OPTIMIZERS))


MANY = [
    pytest.param(2500, part, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
    for part in range(8)
]


@pytest.mark.parametrize(("draws", "seed"), [pytest.param(200, None, id="few"), *MANY])
def test_random_calls_do_what_torch_does(draws, seed):
    hold(_run, draws, seed, SETTINGS, st.tuples(KIND, KIND), PROGRAM)
