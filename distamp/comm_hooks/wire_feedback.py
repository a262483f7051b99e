"""Error feedback as pure functions: what rounding took from one exchange, given back in the next.

Residuals are in unscaled units: a loss scale that changes between two exchanges multiplies the
gradients, not what is owed to them. Who keeps them, and takes them back when a step is skipped, is
not decided here.

Source: Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes", 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["compensate", "new_residual"]


def compensate(values: Tensor, residual: Tensor, scale: Tensor | float) -> Tensor:
    """Return ``values`` and what is owed to them.

    Args:
        values: Gradients multiplied by the loss scale, of any floating dtype.
        residual: fp32 of the same shape, unscaled.
        scale: The loss scale that ``values`` were multiplied by.

    Returns:
        A new fp32 tensor.
    """
    return values.to(torch.float32) + residual * scale


def new_residual(owed: Tensor, arrived: Tensor, scale: Tensor | float) -> Tensor:
    """Return what an exchange still owes; overwrites ``owed``.

    An element that did not arrive, because it is inf or NaN, is owed nothing: the others must not
    inherit it.

    Args:
        owed: What ``compensate`` returned.
        arrived: What the others read of it, fp32: decoded, times the divisor.
        scale: The loss scale of both.

    Returns:
        fp32, unscaled.
    """
    owed.sub_(arrived).div_(scale)
    return owed.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
