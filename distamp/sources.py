"""Where an optimizer's gradients come from: its parameters, or what stands in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distamp.gradients import local_gradients, unscale
from distamp.optimizers import inner_optimizer, parameters_of

__all__ = ["GradientSource", "set_source", "source_of"]

_ATTRIBUTE = "_distamp_gradients"


class GradientSource:
    """The gradients of an optimizer that steps its own parameters, or a share of them.

    fp32 masters are another one: they override what differs.

    Args:
        optimizer: Holds the parameters.
    """

    #: Whether gradients are converted to float32 on the way, so that float16 ones are welcome.
    has_masters = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._holds = optimizer

    def filled(self) -> list[Tensor]:
        """Return the tensors whose ``.grad`` a backward pass fills."""
        return parameters_of(self._holds)

    def stepped(self) -> list[Tensor]:
        """Return the tensors that the optimizer steps on this rank."""
        return parameters_of(self._holds)

    def watched(self) -> list[Tensor]:
        """Return every tensor whose ``.grad`` may be a gradient of this optimizer."""
        return parameters_of(self._holds)

    def share(self) -> list[Tensor] | None:
        """Return the parameters whose gradients count on this rank, if a wrapper splits them.

        ZeroRedundancyOptimizer and OSS hold all parameters and give each rank's inner optimizer a
        part; under ShardedDataParallel only that part's gradients are reduced.
        """
        inner = inner_optimizer(self._holds)
        if inner is None:
            return None
        share = parameters_of(inner)
        return share if len(share) < len(parameters_of(self._holds)) else None

    def in_place_of(self, parameters: list[Tensor]) -> list[Tensor]:
        """Return what is stepped on this rank for ``parameters``."""
        return parameters

    def parameter_of(self, tensor: Tensor) -> Tensor | None:
        """Return the model's parameter behind ``tensor``, if that is another one."""
        return None

    def stand_in_of(self, parameter: Tensor) -> Tensor | None:
        """Return what is stepped in place of a model's parameter, if that is another one."""
        return None

    def unscale(self, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> list[Tensor]:
        """Multiply the gradients by ``inv_scale``; return one flag for each device of theirs."""
        # By torch.no_grad(), four calls of Python, a small model's check would take a tenth longer.
        recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            gradients = local_gradients(self.filled(), self._holds)
            return unscale(gradients, inv_scale, found_inf, allow_fp16=allow_fp16)
        finally:
            torch._C._set_grad_enabled(recording)

    def before_backward(self) -> None:
        """Prepare for a backward pass that fills gradients."""

    def receive(self) -> None:
        """Take the gradients as they are, where no scaler unscales them."""

    def write_back(self) -> None:
        """Write what was stepped into the model."""

    def finish_step(self) -> None:
        """Note that the gradients are used up, by a step or a skipped one."""


def set_source(optimizer: torch.optim.Optimizer, source: GradientSource) -> None:
    """Let `source_of` find ``source``; it belongs to the optimizer, and goes with it."""
    setattr(optimizer, _ATTRIBUTE, source)


def source_of(optimizer: Any) -> GradientSource:
    """Return where the gradients of an optimizer, or of the one it wraps, come from."""
    found: GradientSource | None = getattr(optimizer, _ATTRIBUTE, None)
    if found is not None:
        return found
    inner = inner_optimizer(optimizer)
    found = None if inner is None else getattr(inner, _ATTRIBUTE, None)
    return GradientSource(optimizer) if found is None else found
