"""One parameter of a model and its master: the same value at two precisions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from distamp.gradients import is_dtensor, local_of

__all__ = ["Pair", "write_back"]

# What wrappers mark a parameter with, and the scaler knows layouts by.
_MARKS = (
    "_fsdp_flattened",
    "_unpadded_unsharded_size",
    "_ddp_ignored",
    "_is_sharded",
    "tensor_model_parallel",
    "shared",
)


@dataclass(eq=False, slots=True)
class Pair:
    """A parameter and its master.

    Args:
        parameter: The model's own, float16 or bfloat16.
        master: float32, of the same shape and, if a DTensor, the same placement.
        writes: What `_writes` was when both last had the same value.
    """

    parameter: Tensor
    master: Tensor
    writes: int

    @classmethod
    def of(cls, parameter: Tensor) -> Pair:
        """Make a master of ``parameter``'s value."""
        master = torch.nn.Parameter(parameter.detach().float())
        for mark in _MARKS:
            if hasattr(parameter, mark):
                setattr(master, mark, getattr(parameter, mark))
        return cls(parameter, master, _writes(parameter))

    def catch_up(self) -> None:
        """Take over what anything else wrote to the parameter since.

        An element that is still its master's rounding keeps the master: weights that were swapped
        out and back, or a checkpoint of the very same step, cost no precision.
        """
        if self.writes == _writes(self.parameter):
            return
        master, parameter = local_of(self.master), local_of(self.parameter)
        same = master.to(parameter.dtype) == parameter
        master.copy_(torch.where(same, master, parameter.float()))
        self.note_written()

    def refresh(self) -> None:
        """Set the master to the parameter's value."""
        local_of(self.master).copy_(local_of(self.parameter))
        self.note_written()

    def note_written(self) -> None:
        """Note that the parameter holds the master's rounding."""
        self.writes = _writes(self.parameter)


@torch.no_grad()
def write_back(pairs: Collection[Pair]) -> None:
    """Round every master into its parameter."""
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for pair in pairs:
        parameter = local_of(pair.parameter)
        parameters, masters = alike.setdefault((parameter.device, parameter.dtype), ([], []))
        parameters.append(parameter)
        masters.append(local_of(pair.master))
    for parameters, masters in alike.values():
        torch._foreach_copy_(parameters, masters)
    for pair in pairs:
        pair.note_written()


def _writes(parameter: Tensor) -> int:
    """Return a number that grows whenever anything writes to ``parameter``, but through .data."""
    if is_dtensor(parameter):
        return parameter._version + parameter.to_local()._version
    return parameter._version
