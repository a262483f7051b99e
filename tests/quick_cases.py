"""Parameters for pytest: ``make test`` runs the quick ones, ``make test-all`` runs them all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["quick_cases"]


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
