"""Error feedback as pure functions: what rounding took from one exchange, given back in the next.

Residuals are in unscaled units: a loss scale that changes between two exchanges multiplies the
gradients, not the residuals. Who keeps them, and takes them back when a step is skipped, is not
decided here.

Source: Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes", 2019.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Feedback", "compensate", "new_residual"]


class Feedback(NamedTuple):
    """What rounding took from the same elements before; for one row, or rows without gaps.

    Args:
        residual: fp32, 1-D, unscaled, as many elements as the rows have; None for nothing.
        scale: The loss scale that the values were multiplied by.
    """

    residual: Tensor | None
    scale: Tensor | float


def compensate(values: Tensor, residual: Tensor | None, scale: Tensor | float) -> Tensor:
    """Return ``values`` and what rounding took before, as a new fp32 tensor.

    Residuals are in unscaled units: a loss scale that changes between two exchanges multiplies the
    gradients, not the residuals.

    Args:
        values: Gradients multiplied by the loss scale, of any floating dtype.
        residual: fp32 of the same shape, unscaled; None for nothing.
        scale: The loss scale that ``values`` were multiplied by.

    Source: Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error
    Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019.
    """
    if residual is None:
        return values.to(torch.float32, copy=True)
    return values.to(torch.float32) + residual * scale


def new_residual(compensated: Tensor, arrived: Tensor, scale: Tensor | float) -> Tensor:
    """Return what rounding took of ``compensated``, which is overwritten; fp32, unscaled.

    An element that did not arrive, because it is inf or NaN, leaves no residual: later exchanges
    must not inherit it.

    Args:
        compensated: What ``compensate`` returned.
        arrived: What the others read of it, fp32: decoded, times the divisor.
        scale: The loss scale of both.
    """
    compensated.sub_(arrived).div_(scale)
    return compensated.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
