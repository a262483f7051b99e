"""A half-precision parameter of the model with its fp32 master."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from distamp.grads import is_dtensor, to_local
from distamp.masters.split_tensors import SplitTensors

__all__ = ["MasterPair", "Versions"]

#: The version counters of a tensor and, if it is a DTensor, of its local tensor.
Versions: TypeAlias = tuple[int, int]

_version_of = operator.attrgetter("_version")


@dataclass(eq=False, slots=True)
class MasterPair:
    """A parameter of the model and its master.

    Attributes:
        param: float16 or bfloat16.
        master: float32, of the same shape.
        remainder: int16, the bits of this rank's master that rounding cut off. None if the master
            has storage for its values.
        param_versions: The counters of ``param`` when it last was its rounded master. Writes
            through ``.data`` are not counted.
        master_versions: The counters of ``master`` at that time.
        was_compared: Whether a step has compared ``param`` with its master yet.
        grad_freed: Whether a cast freed a dense gradient of ``param``, and no ``zero_grad()`` has
            set it to None since. torch's ``zero_grad(set_to_none=False)`` would find that gradient
            and leave zeros.
    """

    param: Tensor
    master: Tensor
    remainder: Tensor | None = None
    param_versions: Versions = (0, 0)
    master_versions: Versions = (0, 0)
    was_compared: bool = False
    grad_freed: bool = False

    @property
    def split_tensors(self) -> SplitTensors:
        """The local tensors of a split master, as `split_fp32` and `join_fp32` take them."""
        assert self.remainder is not None
        return to_local(self.master), to_local(self.param), self.remainder

    def current_versions(self) -> tuple[Versions, Versions]:
        """Return the version counters of ``param`` and of ``master``."""
        param, master = self.param, self.master
        # Every step reads the counters of every pair, so a plain tensor is not converted.
        if not is_dtensor(param):
            return (_version_of(param), 0), (_version_of(master), 0)
        param_versions = (_version_of(param), _version_of(to_local(param)))
        master_versions = (_version_of(master), _version_of(to_local(master)))
        return param_versions, master_versions

    def save_versions(self) -> None:
        """Save the version counters, because ``param`` is its rounded master now."""
        self.param_versions, self.master_versions = self.current_versions()
        self.was_compared = True

    def master_was_written(self) -> bool:
        """Return whether code wrote to ``master`` since `save_versions`."""
        _, master_versions = self.current_versions()
        return master_versions != self.master_versions

    def only_master_was_written(self) -> bool:
        """Return whether code wrote to ``master``, and not to ``param``, since `save_versions`."""
        param_versions, master_versions = self.current_versions()
        return param_versions == self.param_versions and master_versions != self.master_versions

    def pull_external_writes(self) -> None:
        """Copy to the master the elements of ``param`` that code outside of the optimizer wrote.

        An element that still is its rounded master keeps the master. So weights that were swapped
        out and back, or a checkpoint of the very same step, cost no precision.

        Version counters miss collectives, and writes to the local tensor of a DTensor (``dcp.load``
        in place). So before the first step, and always if ``param`` is a DTensor, the values are
        compared, unless the master was written to.
        """
        param_versions, master_versions = self.current_versions()
        if param_versions == self.param_versions:
            counters_suffice = self.was_compared and not is_dtensor(self.param)
            if counters_suffice or master_versions != self.master_versions:
                return
        if self.remainder is None:
            value, weight = to_local(self.master), to_local(self.param)
            is_rounded = value.to(weight.dtype) == weight
            torch.where(is_rounded, value, weight, out=value)
        else:
            # The written elements are unknown, so remainders stay. No float32 value rounds to zero
            # with a negative remainder, so such a weight was written.
            weight = to_local(self.param)
            self.remainder.masked_fill_((weight == 0) & (self.remainder < 0), 0)
        self.save_versions()

    def reset_master(self) -> None:
        """Set the master to the value of ``param``, without the bits that rounding cut off."""
        if self.remainder is None:
            to_local(self.master).copy_(to_local(self.param))
        else:
            self.remainder.zero_()
        self.save_versions()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of ``param`` and its master, as ``Optimizer.zero_grad`` does.

        With ``set_to_none=False``, ``param`` keeps zeros if it has a gradient, or had a gradient
        that a cast freed. So a layer that the next loss leaves out still decays and follows its
        momentum.
        """
        grad = self.param.grad
        if set_to_none:
            self.param.grad = None
            self.grad_freed = False
        elif grad is not None:
            if grad.grad_fn is not None:
                grad.detach_()
            else:
                grad.requires_grad_(False)
            grad.zero_()
        elif self.grad_freed:
            self.param.grad = torch.zeros_like(self.param)
        self.master.grad = None

    @property
    def stored_values(self) -> Tensor:
        """The local tensor that stores the master between steps, in addition to ``param``."""
        return to_local(self.master) if self.remainder is None else self.remainder

    @property
    def nbytes(self) -> int:
        """Bytes of the master between steps on this rank, in addition to ``param``."""
        return self.stored_values.nbytes
