"""Damaged states raise a clear error and leave the object unchanged, or they load and work.

A state is damaged in one place: a value of a wrong type, shape or range, or a key that is missing.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from distamp import DistampError, DistGradScaler, comm_hooks, initialize
from distamp.scaler import HysteresisLossScale
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.scaler.steps import iteration, sgd

pytestmark = pytest.mark.filterwarnings("ignore")
CLEAR = (DistampError, ValueError, TypeError)
NUMBERS: list[Any] = [True, -1, 0, 2**70, float("nan"), float("inf"), -0.0, 1j]
TENSORS: list[Any] = [
    torch.tensor(float("nan")),
    torch.zeros(3),
    torch.zeros(0),
    torch.zeros(2, 2, dtype=torch.complex64),
    torch.tensor(7, dtype=torch.int64),
]
WRONG: list[Any] = [
    *(None, "65536", b"\x00", [], [1, 2, 3], {}, {"scale": 1.0}, object()),
    *NUMBERS,
    *TENSORS,
]
MISSING = "missing"


@dataclass
class Subject:
    """An object that loads a state.

    Attributes:
        load: Its ``load_state_dict``.
        changed: Functions that return the states which loading can change.
        works: A use of the object, which raises if the object is broken.
        state: A valid state.
    """

    load: Callable[[Any], None]
    changed: list[Callable[[], Any]]
    works: Callable[[], None]
    state: Any = None

    def __post_init__(self) -> None:
        self.works()
        self.state = self.load.__self__.state_dict()  # type: ignore[attr-defined]

    def snapshot(self) -> Any:
        """Return a copy of the states, with tensors as lists that ``==`` can compare."""
        states = [read() for read in self.changed]
        return copy.deepcopy(tree_map_only(Tensor, lambda it: (it.dtype, it.tolist()), states))


def scaler(**settings: Any) -> Subject:
    grad_scaler, (weight, optimizer) = DistGradScaler("cpu", **settings), sgd(1.0, lr=0.1)
    works = functools.partial(iteration, grad_scaler, optimizer, weight, 1.0)
    return Subject(grad_scaler.load_state_dict, [grad_scaler.state_dict], works)


def amp() -> Subject:
    model = nn.Linear(3, 2)
    handle = initialize(model, torch.optim.SGD(model.parameters(), 0.1), "fp16-O2")

    def step() -> None:
        handle.zero_grad()
        handle.backward(handle.model(torch.ones(1, 3).half()).float().sum())
        handle.step()

    (masters,) = handle.masters
    # The handle loads the scale first, so the scale may change before an error.
    return Subject(handle.load_state_dict, [masters.state_dict, model.state_dict], step)


def hook() -> Subject:
    model = nn.parallel.DistributedDataParallel(nn.Linear(5, 3))
    hook_state = comm_hooks.register_comm_hook(model, "int8")
    return Subject(
        hook_state.load_state_dict,
        [hook_state.state_dict],
        lambda: model(torch.ones(2, 5)).sum().backward(),
    )


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "scaler": scaler,
    "hysteresis": lambda: scaler(loss_scale=HysteresisLossScale(hysteresis=2)),
    "amp": amp,
}


def paths(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of the state itself, and the path of each value in it."""
    yield path
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from paths(value, (*path, key))


def damaged(state: dict[str, Any], path: tuple[Any, ...], wrong_value: Any) -> Any:
    """Return a copy with a wrong value at a path, or without the key if it is ``MISSING``."""
    if not path:
        return wrong_value
    changed = copy.deepcopy(state)
    *parents, last = path
    inner: Any = changed
    for key in parents:
        inner = inner[key]
    inner[last] = wrong_value
    if wrong_value is MISSING:
        del inner[last]
    return changed


def loads_or_refuses(subject: Subject, state: Any) -> bool:
    """Load a state; return whether it loaded.

    An error must have a message and leave the object unchanged.
    """
    snapshot, refusal = subject.snapshot(), None
    try:
        subject.load(state)
    except CLEAR as error:
        refusal = str(error)
    assert refusal != "", "an error without a message"
    assert refusal is None or subject.snapshot() == snapshot, f"changed, then {refusal}"
    return refusal is None


def damage(make: Callable[[], Subject]) -> tuple[int, list[str]]:
    """Load damaged states; return the number of refused ones, and the faults."""
    refused, faults, subject = 0, [], make()
    for path, wrong_value in itertools.product(paths(subject.state), [MISSING, *WRONG]):
        try:
            if not loads_or_refuses(subject, damaged(subject.state, path, wrong_value)):
                refused += 1
                continue
            assert path or wrong_value == {}, "it is no state"
            subject.works()
        except Exception as error:
            # torch raises a RuntimeError for the empty state of a disabled scaler.
            is_torchs_refusal = isinstance(error, RuntimeError) and wrong_value == {}
            if path or not is_torchs_refusal:
                message = f"{path} = {wrong_value!r}: {type(error).__name__}: {error}"
                faults.append(message[:300])
        subject = make()
    return refused, faults


@pytest.mark.parametrize("name", quick_cases(SUBJECTS, quick=["scaler", "hysteresis"]))
def test_a_value_of_the_wrong_kind_is_refused_or_works(name: str) -> None:
    refused, faults = damage(SUBJECTS[name])
    assert faults == []
    assert refused > 20


@on_ranks(1)
def test_a_damaged_state_of_a_hook_is_refused_or_works() -> None:
    assert damage(hook)[1] == []
