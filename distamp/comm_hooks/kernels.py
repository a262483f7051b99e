"""The arithmetic of the wire formats as Triton kernels: each function of `reference` in one launch.

Sums are added up in the order of the wires, and nothing is contracted to fused multiply-adds, so
that results are those of `reference` on a host to the bit; Triton's interpreter runs them there
(``tests/comm_hooks/test_kernels.py``).

Imported where Triton is, and a device to run it: it comes with torch's builds for CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from distamp.comm_hooks.blocks import EXPONENT_BITS, FP32_MAX, least_unit
from distamp.comm_hooks.error_feedback import Feedback
from distamp.comm_hooks.kernel_code import (
    decode_kernel,
    encode_kernel,
    sum_encode_kernel,
    sum_kernel,
)
from distamp.comm_hooks.rows import BLOCK, Rows

if TYPE_CHECKING:
    from distamp.comm_hooks.wire import WireFormat

__all__ = ["NAME", "decode_rows", "encode_rows", "sum_encode_rows", "sum_rows"]

NAME = "Triton kernels"

# Blocks that one program writes or reads.
BLOCKS = 8

# Products and sums as torch has them, each rounded by itself.
OPTIONS = {"enable_fp_fusion": False}

# KIND of `kernel_code`.
_INTEGER, _FP16, _FP8, _PLAIN_BF16, _PLAIN_FP16 = range(5)


# -- the functions of `reference` -------------------------------------------------------------


def encode_rows(
    wire: WireFormat,
    values: Tensor,
    out: Tensor,
    rows: Rows,
    *,
    divisor: float = 1.0,
    head: Tensor | None = None,
    feedback: Feedback | None = None,
) -> Tensor | None:
    """Do as `reference.encode_rows`, in one launch."""
    left, fed = _fed_back(feedback, rows.total, values)
    _launch(
        encode_kernel,
        rows,
        (values, rows.start, rows.stride, rows.length, rows.total),
        (*fed, 1 / divisor, divisor, least_unit(divisor) << EXPONENT_BITS, *_head(head, values)),
        _views(wire, out, rows),
        wire,
        writes=True,
        BEFORE=feedback is not None and feedback.residual is not None,
        FED_BACK=feedback is not None,
        HEAD=head is not None,
    )
    return left


def decode_rows(wire: WireFormat, wires: Tensor, values: Tensor, rows: Rows) -> None:
    """Do as `reference.decode_rows`, in one launch."""
    views = _views(wire, wires, rows)
    place = (values, rows.start, rows.stride, rows.length, rows.total)
    _launch(decode_kernel, rows, (*views, *place), (), (), wire)


def sum_rows(wire: WireFormat, wires: Tensor, total: Tensor, rows: Rows) -> None:
    """Do as `reference.sum_rows` on a host, in one launch."""
    views = _views(wire, wires, rows)
    _launch(sum_kernel, rows, (*views, len(wires), total, rows.length, rows.total), (), (), wire)


def sum_encode_rows(
    wire: WireFormat,
    wires: Tensor,
    out: Tensor,
    rows: Rows,
    *,
    head: Tensor | None = None,
    feedback: Feedback | None = None,
) -> Tensor | None:
    """Do as `reference.sum_encode_rows` on a host, in one launch."""
    left, fed = _fed_back(feedback, rows.total, wires)
    _launch(
        sum_encode_kernel,
        rows,
        (*_views(wire, wires, rows), len(wires), rows.length, rows.total),
        (*fed, least_unit(1.0) << EXPONENT_BITS, *_head(head, wires)),
        _views(wire, out, rows),
        wire,
        writes=True,
        BEFORE=feedback is not None and feedback.residual is not None,
        FED_BACK=feedback is not None,
        HEAD=head is not None,
    )
    return left


def _launch(
    kernel: Any,
    rows: Rows,
    place: tuple[Any, ...],
    numbers: tuple[Any, ...],
    views: tuple[Any, ...],
    wire: WireFormat,
    *,
    writes: bool = False,
    **flags: bool,
) -> None:
    """Run a kernel over all blocks of some rows."""
    blocks = -(-rows.length // BLOCK)
    count = blocks * rows.count
    if not count:
        return
    split = rows.splits is not None and wire.block > 1
    kernel[(triton.cdiv(count, BLOCKS),)](
        *place,
        blocks,
        count,
        *numbers,
        *views,
        *_tables(rows, place),
        **({} if _interpreted(kernel) else OPTIONS),
        **constants(wire, split=split, writes=writes, **flags),
    )


def constants(wire: WireFormat, *, split: bool, writes: bool, **flags: bool) -> dict[str, Any]:
    """Return what is known of a launch when its kernel is compiled.

    Args:
        wire: The format.
        split: Whether some of its blocks are split.
        writes: Whether wires are written, and not only read.
        flags: Of kernels that write: BEFORE, FED_BACK, HEAD.
    """
    known = {"KIND": _kind(wire), "TOP": wire.top, "SPLIT": split, "BLOCKS_": BLOCKS}
    if not writes:
        return known
    return {
        **known,
        **flags,
        "SHIFT": max(0, wire.top.bit_length() - 2) << EXPONENT_BITS,
        "LIMIT": wire.limit if wire.block > 1 else FP32_MAX,
        "LARGEST": float(wire.top) if wire.is_integer else wire.top / 2,
    }


def _interpreted(kernel: Any) -> bool:
    return type(kernel).__name__ == "InterpretedFunction"


def _kind(wire: WireFormat) -> int:
    if wire.block == 1:
        return _PLAIN_BF16 if wire.payload is torch.bfloat16 else _PLAIN_FP16
    if wire.is_integer:
        return _INTEGER
    return _FP16 if wire.payload is torch.float16 else _FP8


def _views(wire: WireFormat, wires: Tensor, rows: Rows) -> tuple[Any, ...]:
    """Return payload and headers of rows as kernels take them, each with its stride."""
    start = wire.payload_start(rows.length, rows.extra)
    payload = wires[:, start : start + rows.length * wire.payload.itemsize].view(wire.payload)
    if wire.payload is torch.bfloat16:
        payload = payload.view(torch.int16)
    elif wire.payload is torch.float8_e4m3fn:
        payload = payload.view(torch.int8)
    headers = wires[:, : max(start, 2)].view(torch.int16)
    return payload, payload.stride(0), headers, headers.stride(0)


def _tables(rows: Rows, place: tuple[Any, ...]) -> tuple[Tensor, ...]:
    splits = rows.splits
    if splits is None:
        # Not read.
        return (next(each for each in place if isinstance(each, Tensor)),) * 5
    return splits.table, splits.local, splits.first, splits.parts, splits.header


def _head(head: Tensor | None, values: Tensor) -> tuple[Tensor]:
    return (values if head is None else head,)


def _fed_back(
    feedback: Feedback | None, numel: int, values: Tensor
) -> tuple[Tensor | None, tuple[Any, ...]]:
    """Return where residuals go, and what kernels take of them: before, after, loss scale."""
    if feedback is None:
        return None, (values, values, values)
    left = torch.empty(numel, dtype=torch.float32, device=values.device)
    scale = feedback.scale
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float32, device=values.device)
    before = left if feedback.residual is None else feedback.residual
    return left, (before, left, scale)
