"""The arithmetic of `formats` as Triton kernels: each of its functions in one launch.

Sums are added up in the same order and nothing is contracted to fused multiply-adds, so results are
those of `formats` on a host to the bit; Triton's interpreter runs them there. Imported where Triton
is, which comes with torch's builds for CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from distamp.comm_hooks.formats import BLOCK, Feedback, Places, WireFormat
from distamp.comm_hooks.kernel_code import (
    decode_kernel,
    encode_kernel,
    sum_encode_kernel,
    sum_kernel,
)

__all__ = ["constants", "decode", "encode", "sum_encode", "sum_rows"]

# Blocks of 256 that one program writes or reads.
BLOCKS = 8
# Products and sums as torch has them, each rounded by itself.
OPTIONS = {"enable_fp_fusion": False}
_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.int8: 2}


def encode(
    wire: WireFormat,
    values: Tensor,
    others: Tensor,
    places: Places,
    out: Tensor,
    inverse: float,
    feedback: Feedback | None = None,
) -> None:
    """Do as `formats.encode`."""
    given = (values, others, len(others), others.stride(0), inverse, places.table(values.device))
    fed = feedback or (values, values)
    written = _views(wire, out, places.numel)
    _launch(encode_kernel, wire, places.rows, places.numel, *given, *fed, *written, feedback)


def sum_encode(
    wire: WireFormat, given: Tensor, numel: int, out: Tensor, feedback: Feedback | None = None
) -> None:
    """Do as `formats.sum_encode`."""
    read = (*_views(wire, given, numel), len(given))
    fed = feedback or (given, given)
    _launch(sum_encode_kernel, wire, 1, numel, *read, *fed, *_views(wire, out, numel), feedback)


def sum_rows(wire: WireFormat, given: Tensor, places: Places, out: Tensor) -> None:
    """Do as `formats.sum_rows`."""
    read = (*_views(wire, given, places.numel), len(given))
    _launch(sum_kernel, wire, 1, places.numel, *read, places.table(out.device), out)


def decode(wire: WireFormat, given: Tensor, places: Places, out: Tensor) -> None:
    """Do as `formats.decode`."""
    read = _views(wire, given, places.numel)
    _launch(decode_kernel, wire, places.rows, places.numel, *read, places.table(out.device), out)


def constants(wire: WireFormat, *, writes: bool, fed: bool = False) -> dict[str, Any]:
    """Return what is known when a kernel is compiled."""
    known: dict[str, Any] = {"KIND": _KINDS[wire.payload], "BLOCKS_": BLOCKS}
    return {**known, "TOP": wire.top, "LIMIT": wire.limit, "FED": fed} if writes else known


def _launch(kernel: Any, wire: WireFormat, rows: int, numel: int, *arguments: Any) -> None:
    writes = kernel in (encode_kernel, sum_encode_kernel)
    if writes:
        *arguments, feedback = arguments  # type: ignore[assignment]
    count, blocks = rows * numel // BLOCK, numel // BLOCK
    fed = writes and feedback is not None
    options = {} if type(kernel).__name__ == "InterpretedFunction" else OPTIONS
    if count:
        kernel[(triton.cdiv(count, BLOCKS),)](
            *arguments, count, blocks, **constants(wire, writes=writes, fed=fed), **options
        )


def _views(wire: WireFormat, rows: Tensor, numel: int) -> tuple[Any, ...]:
    """Return units and payloads of rows as kernels take them, each with its stride."""
    units, payload = wire.views(rows, numel)
    payload = payload.flatten(1)
    if wire.payload is torch.bfloat16:
        payload = payload.view(torch.int16)
    # Units that a format does not have are not read.
    units = units.view(torch.int16) if wire.top else payload
    return units, units.stride(0), payload, payload.stride(0)
