"""Parameters for pytest: ``make test`` runs the quick ones, ``make test-all`` runs them all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["is_in_sample", "quick_cases"]


def quick_cases(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return a parameter for each value; a value that is not in `quick` is marked slow.

    Args:
        values: The values of one parameter, or a tuple for each case of several parameters.
        quick: The values that ``make test`` runs.
    """
    params = []
    quick_left = list(quick)
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        if value in quick_left:
            quick_left.remove(value)
            params.append(pytest.param(*arguments))
        else:
            params.append(pytest.param(*arguments, marks=pytest.mark.slow))
    assert not quick_left, f"no such cases: {quick_left}"
    return params


def is_in_sample(case: Any) -> bool:
    """Return whether ``make test`` runs a case of a test with the mark ``sampled``.

    The sample is the diagonal of the product of all parametrizations. It has each value of every
    parameter, and as many cases as the longest parametrization.

    Args:
        case: An item of pytest.
    """
    positions = []
    lengths = []
    for mark in case.iter_markers("parametrize"):
        names, values = mark.args
        first_name = names.split(",")[0] if isinstance(names, str) else names[0]
        positions.append(case.callspec.indices[first_name])
        lengths.append(len(values))
    for number in range(max(lengths)):
        if positions == [number % length for length in lengths]:
            return True
    return False
