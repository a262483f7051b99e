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

from distamp.comm_hooks.formats import BLOCK, Feedback, Places, Source, WireFormat
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


def encode(wire: WireFormat, source: Source, out: Tensor, feedback: Feedback | None = None) -> None:
    """Do as `formats.encode`."""
    fed = feedback or (source.values, source.values)
    arguments = (*_given(source), *fed, *_views(wire, out, source.places.numel))
    known = constants(wire, writes=True, fed=feedback is not None)
    _launch(encode_kernel, arguments, source.places.rows, source.places.numel, known)


def sum_encode(
    wire: WireFormat,
    source: Source,
    given: Tensor,
    out: Tensor,
    feedback: Feedback | None = None,
) -> None:
    """Do as `formats.sum_encode`."""
    numel = source.places.numel
    read = (*_given(source), *_views(wire, given, numel), len(given))
    fed = feedback or (given, given)
    arguments = (*read, *fed, *_views(wire, out.view(1, -1), numel))
    known = constants(wire, writes=True, fed=feedback is not None)
    _launch(sum_encode_kernel, arguments, 1, numel, known)


def sum_rows(wire: WireFormat, source: Source, given: Tensor, out: Tensor) -> None:
    """Do as `formats.sum_rows`."""
    numel = source.places.numel
    read = (*_given(source), *_views(wire, given, numel), len(given))
    _launch(sum_kernel, (*read, out, out.numel()), 1, numel, constants(wire, writes=False))


def decode(wire: WireFormat, given: Tensor, places: Places, out: Tensor) -> None:
    """Do as `formats.decode`."""
    arguments = (*_views(wire, given, places.numel), places.table(out.device), out)
    _launch(decode_kernel, arguments, places.rows, places.numel, constants(wire, writes=False))


def constants(wire: WireFormat, *, writes: bool, fed: bool = False) -> dict[str, Any]:
    """Return what is known when a kernel is compiled."""
    known: dict[str, Any] = {"KIND": _KINDS[wire.payload], "BLOCKS_": BLOCKS}
    return {**known, "TOP": wire.top, "LIMIT": wire.limit, "FED": fed} if writes else known


def _launch(
    kernel: Any, arguments: tuple[Any, ...], rows: int, numel: int, known: dict[str, Any]
) -> None:
    """Call a kernel for all blocks of so many rows."""
    count, blocks = rows * numel // BLOCK, numel // BLOCK
    options = {} if type(kernel).__name__ == "InterpretedFunction" else OPTIONS
    if count:
        kernel[(triton.cdiv(count, BLOCKS),)](*arguments, count, blocks, **known, **options)


def _given(source: Source) -> tuple[Any, ...]:
    """Return a source as kernels take it."""
    values, others, places, own, inverse = source
    table = places.table(values.device)
    return values, others, len(others), others.stride(0), inverse, table, own


def _views(wire: WireFormat, rows: Tensor, numel: int) -> tuple[Any, ...]:
    """Return units and payloads of rows as kernels take them, each with its stride."""
    units, payload = wire.views(rows, numel)
    payload = payload.flatten(1)
    if wire.payload is torch.bfloat16:
        payload = payload.view(torch.int16)
    # Units that a format does not have are not read.
    units = units.view(torch.int16) if wire.top else payload
    return units, units.stride(0), payload, payload.stride(0)
