"""A float32 value as its bfloat16 rounding and a 16-bit remainder: exact, in the bytes of one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from distamp.masters.blocks import blocks

__all__ = ["Row", "join", "split"]

#: A float32 value, a bfloat16 weight and an int16 remainder, of one shape, device and layout.
Row = tuple[Tensor, Tensor, Tensor]


def split(rows: Iterable[Row]) -> None:
    """Write each finite value into its weight, rounded half away from zero, and its remainder.

    The remainder is the lower half of the value's bits, as a signed number. The weight's bits are
    the upper half, one higher where that number is negative. To nearest even, a tie that is rounded
    down would have a remainder of 32768, which 16 bits do not hold. So ties are broken first, by
    the lowest bit, which changes no other rounding, and makes inf NaN. The values are used up.

    Args:
        rows: All on one device.

    Source: ``store_param_remainders`` of NVIDIA Apex's DistributedFusedAdam, which keeps masters as
    bfloat16 parameters and 16 bits too.
    """
    for values, weights, remainders in blocks(rows):
        bits = [value.view(torch.int32) for value in values]
        torch._foreach_copy_(remainders, bits)
        for each in bits:
            each.bitwise_or_(1)
        torch._foreach_copy_(weights, values)


def join(rows: Iterable[Row]) -> None:
    """Write each value, to the bit, from its weight and its remainder.

    Args:
        rows: As for `split`.
    """
    for values, weights, remainders in blocks(rows):
        torch._foreach_copy_(values, weights)
        torch._foreach_add_([value.view(torch.int32) for value in values], remainders)
