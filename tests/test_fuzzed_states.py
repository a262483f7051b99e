"""Damaged states: a clear error, and the object is as it was.

A state is damaged in one place: a value of a wrong type, shape or range, or a key that is missing.
What loads must leave an object that works.
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
    """Something that loads: how, everything that loading could have changed, and a use of it."""

    load: Callable[[Any], None]
    changed: list[Callable[[], Any]]
    works: Callable[[], None]
    state: Any = None

    def __post_init__(self) -> None:
        self.works()
        self.state = self.load.__self__.state_dict()  # type: ignore[attr-defined]

    def seen(self) -> Any:
        """A copy of what could have changed, in which tensors can be compared."""
        states = [read() for read in self.changed]
        return copy.deepcopy(tree_map_only(Tensor, lambda it: (it.dtype, it.tolist()), states))


def scaler(**settings: Any) -> Subject:
    made, (weight, optimizer) = DistGradScaler("cpu", **settings), sgd(1.0, lr=0.1)
    works = functools.partial(iteration, made, optimizer, weight, 1.0)
    return Subject(made.load_state_dict, [made.state_dict], works)


def amp() -> Subject:
    model = nn.Linear(3, 2)
    made = initialize(model, torch.optim.SGD(model.parameters(), 0.1), "fp16-O2")

    def step() -> None:
        made.zero_grad()
        made.backward(made.model(torch.ones(1, 3).half()).float().sum())
        made.step()

    (masters,) = made.masters
    # The scale is loaded first.
    return Subject(made.load_state_dict, [masters.state_dict, model.state_dict], step)


def hook() -> Subject:
    model = nn.parallel.DistributedDataParallel(nn.Linear(5, 3))
    made = comm_hooks.register_comm_hook(model, "int8")
    return Subject(
        made.load_state_dict,
        [made.state_dict],
        lambda: model(torch.ones(2, 5)).sum().backward(),
    )


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "scaler": scaler,
    "hysteresis": lambda: scaler(loss_scale=HysteresisLossScale(hysteresis=2)),
    "amp": amp,
}


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a nested state that can be replaced, and to the whole."""
    yield path
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from places(value, (*path, key))


def damaged(state: dict[str, Any], path: tuple[Any, ...], how: Any) -> Any:
    """A copy with another value at ``path``, or without it."""
    if not path:
        return how
    changed = copy.deepcopy(state)
    *parents, last = path
    inner: Any = changed
    for each in parents:
        inner = inner[each]
    inner[last] = how
    if how is MISSING:
        del inner[last]
    return changed


def loads_or_refuses(subject: Subject, state: Any) -> bool:
    """Whether it loaded; an error must be a clear one, after which all is as it was."""
    before, refusal = subject.seen(), None
    try:
        subject.load(state)
    except CLEAR as error:
        refusal = str(error)
    assert refusal != "", "an error without a message"
    assert refusal is None or subject.seen() == before, f"changed, then {refusal}"
    return refusal is None


def damage(make: Callable[[], Subject]) -> tuple[int, list[str]]:
    """How many damaged states were refused, and what went wrong with any."""
    refused, faults, subject = 0, [], make()
    for path, how in itertools.product(places(subject.state), [MISSING, *WRONG]):
        try:
            if not loads_or_refuses(subject, damaged(subject.state, path, how)):
                refused += 1
                continue
            assert path or how == {}, "it is no state"
            subject.works()
        except Exception as error:
            # So torch refuses the empty state of a scaler that was not enabled.
            if path or how != {} or not isinstance(error, RuntimeError):
                faults.append(f"{path} = {how!r}: {type(error).__name__}: {error}"[:300])
        subject = make()
    return refused, faults


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_value_of_the_wrong_kind_is_refused_or_works(name: str) -> None:
    refused, faults = damage(SUBJECTS[name])
    assert faults == []
    assert refused > 20


@on_ranks(1)
def test_a_damaged_state_of_a_hook_is_refused_or_works() -> None:
    assert damage(hook)[1] == []
