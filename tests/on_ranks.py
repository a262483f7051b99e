"""Decorators that run the body of a test, with its assertions, on every rank of a pool.

    @on_ranks(2)
    @pytest.mark.parametrize("wire", ["fp16", "int8"])
    def test_something(wire):
        assert dist.get_world_size() == 2

Parameters and fixtures are sent to the ranks, so they have to be picklable. The error of a failed
assertion has the local variables of the rank.
"""

import importlib
import inspect
import reprlib
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["on_devices", "on_ranks"]


def on_devices(size: int | str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test as `on_ranks` does; each rank has a simulated device."""
    return on_ranks(size, "sim_ranks")


def on_ranks(
    size: int | str, pools: str = "ranks"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test.

    Args:
        size: The number of ranks, or the name of the parameter with the number.
        pools: The fixture with the pools.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**arguments: Any) -> None:
            pool = arguments.pop(pools)
            world_size = arguments[size] if isinstance(size, str) else size
            pool(world_size).run(_run_on_rank, body.__module__, body.__name__, arguments)

        fixture = inspect.Parameter(pools, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(body).parameters.values()
        signature = inspect.Signature([fixture, *parameters])
        test.__signature__ = signature  # type: ignore[attr-defined]
        test.__name__ = body.__name__
        test.__doc__ = body.__doc__
        test.__module__ = body.__module__
        # The attributes of the body include the marks of pytest.
        test.__dict__.update(body.__dict__)
        test.__dict__["on_rank"] = body
        return test

    return decorate


def _run_on_rank(module_name: str, test_name: str, arguments: dict[str, Any]) -> None:
    """Run the body of a test on this rank; add local variables to a failed assertion."""
    module = importlib.import_module(module_name)
    body = getattr(module, test_name).on_rank
    try:
        body(**arguments)
    except AssertionError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        lines = [str(error), "where"]
        for variable, value in frames[-1].f_locals.items():
            lines.append(f"  {variable} = {reprlib.repr(value)}")
        raise AssertionError("\n".join(lines)) from error
