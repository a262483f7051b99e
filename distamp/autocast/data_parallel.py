"""DataParallel whose replicas compute in their caller's autocast state.

torch's carries over whether CUDA autocast is on, and nothing else: an outer bfloat16 region
computes in float16 in two replicas and in bfloat16 in one, which runs in the caller's own thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from distamp.autocast.state import AutocastState, propagate

__all__ = ["DataParallel", "parallel_apply"]

_M = TypeVar("_M", bound=nn.Module)


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Any] | None = None,
) -> list[Any]:
    """Call each module with its inputs, in a thread each, all in the caller's autocast state.

    As :func:`torch.nn.parallel.parallel_apply`, which carries over only whether autocast is on, and
    needs an accelerator as it does.

    Args:
        modules: What to call.
        inputs: For each module its positional arguments, or one argument.
        kwargs_tup: For each module its keyword arguments; None is none.
        devices: For each module its device; None takes that of its inputs.

    Returns:
        What the modules returned, in their order.
    """
    state = AutocastState.capture()
    bound: Any = [propagate(module, state) for module in modules]
    given: Any = devices
    return nn.parallel.parallel_apply(bound, inputs, kwargs_tup, given)


class DataParallel(nn.DataParallel[_M]):
    """A :class:`torch.nn.DataParallel` whose replicas compute in the caller's autocast state.

    torch's gives replicas whether autocast is on, and neither the dtype nor the cache flag nor op
    lists. Where there is no accelerator the module itself is called, as in torch's.
    """

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call the replicas in the caller's autocast state."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])
