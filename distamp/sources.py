"""Where an optimizer's gradients come from: its parameters, or what stands in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distamp.gradients import local_gradients, unscale, without_grad
from distamp.optimizers import innermost, parameters_of, unwrapped

__all__ = ["GradientSource", "set_source", "source_of"]

_ATTRIBUTE = "_distamp_gradients"


class GradientSource:
    """The gradients of an optimizer that steps its own parameters, or this rank's share of them.

    fp32 masters are another one: they override what differs. A source is asked and never told,
    but for what it stands in with, by another rank.

    Args:
        optimizer: Holds the parameters.
        inner: Steps them, or this rank's share of them.
    """

    #: Whether gradients become float32 as they are unscaled: float16 ones are welcome then, and a
    #: fused kernel must not unscale by itself.
    casts = False
    #: Whether a wrapper gives each rank another share of the parameters; one rank may have all.
    part = False

    def __init__(self, optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
        self._holds, self._steps = optimizer, inner
        self.part = inner is not optimizer and getattr(optimizer, "world_size", 2) > 1

    def parameters(self) -> list[Tensor]:
        """Return the tensors whose ``.grad`` a backward pass fills."""
        return parameters_of(self._holds)

    def has_grads(self) -> bool:
        """Return whether this rank has a gradient of the optimizer, before or after `unscale`."""
        if any(parameter.grad is not None for parameter in self.parameters()):
            return True
        return any(stepped.grad is not None for _, stepped in self.stepped())

    def stepped(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter of the model that is stepped on this rank, and what is stepped.

        The same tensor twice where nothing stands in its place. After `unscale` the unscaled
        gradient is the second's. ZeroRedundancyOptimizer and OSS hold all parameters, and an
        optimizer over this rank's share.
        """
        stepped = parameters_of(self._steps)
        return list(zip(stepped, stepped, strict=True))

    def value(self, stepped: Tensor) -> Tensor:
        """Return what is stepped, as it is between steps; where it has no storage, a copy."""
        return stepped.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return what stands in the place of parameters: nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on another rank, whose parameters are the same."""

    @without_grad
    def unscale(
        self, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply the gradients by ``inv_scale``; return one flag for each device of theirs."""
        gradients = local_gradients(parameters_of(self._holds))
        return unscale(gradients, inv_scale, found_inf, allow_fp16=allow_fp16)


def set_source(optimizer: torch.optim.Optimizer, source: GradientSource) -> None:
    """Let `source_of` find ``source``; it belongs to the optimizer, and goes with it."""
    setattr(optimizer, _ATTRIBUTE, source)


def source_of(optimizer: Any) -> GradientSource:
    """Return where the gradients of an optimizer, or of the one it wraps, come from."""
    inner = innermost(optimizer)
    holder = optimizer if inner is optimizer else unwrapped(optimizer)
    found: GradientSource | None = getattr(holder, _ATTRIBUTE, getattr(inner, _ATTRIBUTE, None))
    return GradientSource(holder, inner) if found is None else found
