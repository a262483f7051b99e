"""`DataParallel` with replicas that compute in the autocast state of their caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from distamp.autocast.autocast_state import AutocastState

__all__ = ["DataParallel"]

_M = TypeVar("_M", bound=nn.Module)


class DataParallel(nn.DataParallel[_M]):
    """A :class:`torch.nn.DataParallel` with replicas in the autocast state of the caller.

    torch gives replicas autocast's on or off, and neither the dtype nor the cache flag nor op
    lists. In a bfloat16 region, two replicas of torch's compute in float16, and a single one in
    bfloat16, because it runs in the thread of the caller. Without an accelerator the module itself
    is called, as in torch.
    """

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call the replicas in the caller's autocast state."""
        state = AutocastState.capture()
        bound = [state.wrap(replica) for replica in replicas]
        return super().parallel_apply(bound, inputs, kwargs)  # type: ignore[arg-type]
