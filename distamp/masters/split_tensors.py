"""Float32 values that are stored as bfloat16 weights and 16-bit remainders without any loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from distamp.masters.chunks import iter_chunks

__all__ = ["SplitTensors", "join_fp32", "split_fp32"]

#: A float32 value, a bfloat16 weight and an int16 remainder, of one shape, device and layout.
SplitTensors: TypeAlias = tuple[Tensor, Tensor, Tensor]


def split_fp32(tensors: Iterable[SplitTensors]) -> None:
    """Write each finite value into its weight, rounded half away from zero, and its remainder.

    The remainder is the lower half of the value's bits as a signed integer. The weight's bits are
    the upper half, plus one if the remainder is negative. Rounding to nearest even would round some
    ties down, with a remainder of 32768, which int16 cannot hold. So the lowest bit is set first:
    it breaks ties, changes no other rounding, and turns inf into NaN. The values are overwritten.

    Args:
        tensors: Values to read, with weights and remainders to write, all on one device.

    Source: ``store_param_remainders`` of NVIDIA Apex's DistributedFusedAdam also stores masters as
    bfloat16 parameters and 16 bits.
    """
    for values, weights, remainders in iter_chunks(tensors):
        value_bits = [value.view(torch.int32) for value in values]
        torch._foreach_copy_(remainders, value_bits)
        for bits in value_bits:
            bits.bitwise_or_(1)
        torch._foreach_copy_(weights, values)


def join_fp32(tensors: Iterable[SplitTensors]) -> None:
    """Write each value, bit-identical, from its weight and its remainder.

    Args:
        tensors: Values to write, with weights and remainders to read, all on one device.
    """
    for values, weights, remainders in iter_chunks(tensors):
        torch._foreach_copy_(values, weights)
        value_bits = [value.view(torch.int32) for value in values]
        torch._foreach_add_(value_bits, remainders)
