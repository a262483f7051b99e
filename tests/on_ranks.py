"""A test whose body runs on every rank of a pool, and asserts there.

    @on_ranks(2)
    @pytest.mark.parametrize("wire", ["fp16", "int8"])
    def test_something(wire):
        assert dist.get_world_size() == 2

Its parameters and fixtures go along, so they have to be picklable. The first rank whose assertion
fails is told with its local names.
"""

import importlib
import inspect
import reprlib
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["on_devices", "on_ranks"]


def on_devices(size: int | str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test, as `on_ranks`: each rank has a simulated device."""
    return on_ranks(size, "sim_ranks")


def on_ranks(
    size: int | str, pools: str = "ranks"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test.

    Args:
        size: How many ranks there are, or the parameter that says so.
        pools: The fixture that has the ranks.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            pool = given.pop(pools)
            world = given[size] if isinstance(size, str) else size
            pool(world).run(_here, body.__module__, body.__name__, given)

        named = inspect.signature(body).parameters.values()
        first = inspect.Parameter(pools, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([first, *named])  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.__dict__ |= body.__dict__ | {"on_rank": body}  # marks, too
        return test

    return decorate


def _here(module: str, name: str, given: dict[str, Any]) -> None:
    try:
        getattr(importlib.import_module(module), name).on_rank(**given)
    except AssertionError as error:
        frame = [*traceback.walk_tb(error.__traceback__)][-1][0]
        values = "\n".join(f"  {key} = {reprlib.repr(it)}" for key, it in frame.f_locals.items())
        raise AssertionError(f"{error}\nwhere\n{values}") from error
